"""Which term is to blame? `python -m tests.accuracy.ablation` leaves out one term at a time and refits everything else on all runs.

Prints the in-sample errors: all runs, mean of the sources' medians, and the sources a term is expected to show in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pandas as pd

from advisor.measure.evaluate import error_figures, error_table
from advisor.measure.fit import PRIORS, Problem, fit, parameters, to_calibration
from cost_models.price import price
from cost_models.types import FloatArray
from tests.accuracy import folds

#: Term -> constants that switch it off.
BY_CONSTANT: Mapping[str, Mapping[str, float]] = {
    "host time": {"host_s_per_kernel": 1e-12, "host_s_per_collective": 1e-12, "host_s_per_micro_batch": 1e-12},
    "saturation by shape": {"gemm_half_m": 1e-6, "gemm_half_n": 1e-6, "gemm_half_k": 1e-6},
    "partly filled waves": {"wave_exponent": 0.0},
    "memory-bound operators": {"memory_traffic": 1e-6},
    "hidden reduction": {"dp_hidden_share": 1e-6},
    "contention of hidden traffic": {"overlap_contention": 1e-6},
    "rate falling with nodes": {"inter_decay": 1e-6, "inter_decay_whole_node": 1e-6},
    "latency inside a node": {"intra_latency_s": 1e-12},
    "slower reductions": {"reduction_rate_share": 1.0},
    "latency between nodes": {"inter_latency_s_per_node": 1e-12},
    "stragglers": {"straggler_share": 0.0},
}
#: Term -> part of the step that is left out of the sum.
BY_PART = (
    "tp_communication",
    "pipeline_bubble",
    "pipeline_p2p",
    "dp_communication",
    "fsdp_communication",
    "optimizer",
    "recompute",
    "fixed",
)
COLUMNS = {
    "nanotron": "huggingface/nanotron",
    "vtrain": "VIA-Research",
    "llm-foundry": "mosaicml",
    "bridge": "NVIDIA-NeMo",
    "lambdal": "lambdal",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _WithoutPart(Problem):
    """Runs priced without one part of the step."""

    part: str

    def log_predicted(self, calibration: object) -> FloatArray:
        parts = price(self.packed, calibration)  # type: ignore[arg-type]
        return np.log(sum(values for name, values in parts.items() if name != self.part))


def main() -> None:
    runs = folds.load_runs()
    problem, everything = folds.load_problem(runs)
    source = runs.column("source_repo_or_doc").astype(str)
    fields = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem)}
    cases: dict[str, tuple[Problem, set[str]]] = {"(full)": (problem, set())}
    for term, values in BY_CONSTANT.items():
        base = dataclasses.replace(problem.base, constants={**problem.base.constants, **values})
        cases[term] = (dataclasses.replace(problem, base=base), set(values))
    cases["quirks"] = (folds.without_quirks(problem), set())
    cases |= {part: (_WithoutPart(**fields, part=part), set()) for part in BY_PART}
    rows = []
    start = fit(problem, everything, max_steps=20)
    for term, (case, gone) in cases.items():
        kept = [i for i, p in enumerate(everything) if p.constant not in gone]
        params = [everything[i] for i in kept]
        x = fit(case, params, start=start[kept], max_steps=6)
        predicted = np.exp(case.log_predicted(to_calibration(case, params, x)))
        error = np.abs(predicted / runs.step_time_s - 1)
        figures = error_figures(error_table(runs, predicted))
        rows.append({"without": term, "median": figures["median_error_share"], "macro": figures["mean_of_source_medians"],
                     "p90": figures["p90_error_share"], **{k: np.median(error[np.char.startswith(source, v)]) for k, v in COLUMNS.items()}})  # fmt: skip
    assert set().union(*BY_CONSTANT.values()) - set(problem.base.constants) == set(), "a term names a constant that doesn't exist"
    print(pd.DataFrame(rows).sort_values("median", ascending=False).round(3).to_string(index=False))
    print(f"{len(PRIORS)} generic constants, {len(parameters(problem))} with the factors of runtimes and families")


if __name__ == "__main__":
    main()
