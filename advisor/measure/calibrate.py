"""`advise calibrate`: refit the shipped constants on the user's own runs, and say by cross-validation whether it helped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.model_selection import KFold

from advisor.errors import AdvisorError
from advisor.measure.fit import BY_FAMILY, Parameter, Problem, fit, make_problem, to_calibration
from advisor.measure.memory_eval import cross_validated_memory, memory_runs
from advisor.measure.runs import RunTable, read_runs
from advisor.progress import Progress, quiet
from advisor.words import counted
from cost_models import Calibration, load_calibration
from cost_models.terms.memory_traits import MemoryConstants
from cost_models.types import FloatArray

_FOLDS = 5
_OWN_ERROR = "own_runs_median_share"  # in a calibration: median error on the runs it was refitted on, left out in turn
_MOVED = ["kind", "name", "constant", "factor", "change"]
#: How far a user's runs may move a factor from its shipped value (standard deviation of the logarithm): about as far as the factors of the
#: published sources lie apart. Also what published runs hardly identify, such as overlap.
DEVIATIONS: Mapping[str, float] = {
    "gemm_rate_share": 0.09, "host_s_per_kernel": 0.15, "step_s": 0.15, "inter_rate_share": 0.35, "intra_rate_share": 0.25,
    "inter_latency_s_per_node": 0.65, "intra_latency_s": 0.8, "reduction_rate_share": 0.2, "attention_rate_share": 0.12, "memory_traffic": 0.12,
    "overlap_contention": 0.2, "dp_hidden_share": 0.15, "batched_rate_share": 0.1, "pcie_rate_share": 0.3,
}  # fmt: skip
FAMILY_DEVIATIONS: Mapping[str, float] = {name: value / 2 for name, value in BY_FAMILY.items()}
_SCALE = 0.12  # miss that weighs like one standard deviation; smaller ones chase the noise of single runs (tried on unseen sources)
_TAIL = 3.0  # in it: a run half again as slow as its like may be stuck, and five runs with one such must not follow it


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """A refit. Errors are shares of the measured step time."""

    calibration: Calibration
    num_runs: int  # with a measured step time or memory
    error_before: Mapping[str, float]  # median, p90, of time and of memory where measured, with the constants started from
    error_after: Mapping[str, float]  # of runs left out of the fit (cross-validation); of the fit itself under two runs
    moved: pd.DataFrame  # what moved: runtime, family or memory, constant, factor


def calibrate_runs(
    source: str | Path | pd.DataFrame, *, arch_csv: str | Path | None = None, calibration: Calibration | None = None,
    progress: Progress = quiet,
) -> CalibrationResult:  # fmt: skip
    """Fit the factors of the runtimes and GPU families in a table of measured runs, and the memory constants where memory was measured.

    Args:
        source: CSV file or frame with the columns of `runs.csv`.
        arch_csv: shapes of the models named.
        calibration: constants to start from and to stay near; the shipped ones by default.
        progress: told what is being done.

    Raises:
        AdvisorError: unreadable, or no run with a measured step time or memory.
    """
    runs, base = read_runs(source, arch_csv, progress=progress), calibration or load_calibration()
    timed, weighed = (np.flatnonzero(np.isfinite(values) & runs.states_batch) for values in (runs.step_time_s, runs.peak_mem_gib))
    if not len(timed) and not len(weighed):
        raise AdvisorError(
            "No run in the table has both a price and a measured step time or memory.", hint="See `skipped_reason` of `advise predict`."
        )
    progress(f"refitting on {counted(len(np.union1d(timed, weighed)), 'run')}")
    time = calibrate_table(runs.take(timed), base) if len(timed) else None
    memory = _calibrate_memory(runs, base) if len(weighed) else None
    parts = [part for part in (time, memory) if part]
    num_runs = len(np.union1d(timed, weighed))
    error = {name: value for name, value in base.error.items() if name != _OWN_ERROR}
    if time and time.num_runs > 1:
        error[_OWN_ERROR] = time.error_after["median_error_share"]
    named = dataclasses.replace(
        time.calibration if time else base, memory=memory.calibration.memory if memory else base.memory,
        name=f"{base.name}, refitted on {counted(num_runs, 'run')}", data={**base.data, "num_own_runs": num_runs, "refitted_on": date.today().isoformat()}, error=error,
    )  # fmt: skip
    before, after = ({k: v for part in parts for k, v in figures(part).items()} for figures in (_before, _after))
    moved = pd.concat([part.moved for part in parts], ignore_index=True)
    return CalibrationResult(calibration=named, num_runs=num_runs, error_before=before, error_after=after, moved=moved)


def _before(result: CalibrationResult) -> Mapping[str, float]:
    return result.error_before


def _after(result: CalibrationResult) -> Mapping[str, float]:
    return result.error_after


def calibrate_table(runs: RunTable, base: Calibration) -> CalibrationResult:
    """As `calibrate_runs`, for runs that are all measured."""
    problem = make_problem(runs, base)
    before = np.abs(np.expm1(problem.log_predicted(base) - problem.log_measured))
    held_out = np.full(len(runs), np.nan)
    if len(runs) >= 2:
        for train, test in KFold(min(_FOLDS, len(runs)), shuffle=True, random_state=0).split(np.arange(len(runs))):
            mask = np.zeros(len(runs), dtype=bool)
            mask[train] = True
            refit = refit_factors(problem, mask)
            held_out[test] = np.abs(np.expm1(problem.log_predicted(refit) - problem.log_measured))[test]
    final = refit_factors(problem)
    if len(runs) < 2:
        held_out = np.abs(np.expm1(problem.log_predicted(final) - problem.log_measured))
    return CalibrationResult(
        calibration=final, num_runs=len(runs), error_before=_figures(before), error_after=_figures(held_out), moved=_moved(base, final)
    )


def _calibrate_memory(runs: RunTable, base: Calibration) -> CalibrationResult:
    """Refit the memory table. Kept only where it brings runs nearer that it had not seen: few odd runs must not ruin what is shipped."""
    own, start = memory_runs(runs), MemoryConstants.from_mapping(base.memory)
    found = cross_validated_memory(own, start)
    better = len(own) > 1 and found.error_after.mean() < found.error_before.mean()
    table = {**base.memory, **found.table} if better else dict(base.memory)
    shipped = dataclasses.asdict(start)
    moved = [{"kind": "memory", "name": "", "constant": name, "factor": value, "change": value / max(shipped[name], 1e-9)}
             for name, value in found.table.items() if better and abs(value - shipped[name]) > 0.01 * value]  # fmt: skip
    before, after = found.error_before, found.error_after if better else found.error_before
    return CalibrationResult(
        calibration=dataclasses.replace(base, memory=table), num_runs=len(own), error_before=_figures(before, "memory_"),
        error_after=_figures(after, "memory_"), moved=pd.DataFrame(moved, columns=_MOVED),
    )  # fmt: skip


def refit_factors(problem: Problem, train: np.ndarray | None = None) -> Calibration:
    """Move the runtimes' and families' factors towards the runs, held near where they are."""
    base = problem.base
    params = [
        Parameter(constant=c, runtime=r, mean=float(np.log(base.by_runtime.get(r, {}).get(c, 1.0))), deviation=sd)
        for c, sd in DEVIATIONS.items() for r in sorted(set(problem.runtime))
    ]  # fmt: skip
    params += [
        Parameter(constant=c, family=f, mean=float(np.log(base.by_family.get(f, {}).get(c, 1.0))), deviation=sd)
        for c, sd in FAMILY_DEVIATIONS.items() for f in sorted(set(problem.family))
    ]  # fmt: skip
    return to_calibration(problem, params, fit(problem, params, train=train, scale=_SCALE, tail=_TAIL))


def _figures(error: FloatArray, kind: str = "") -> dict[str, float]:
    return {f"{kind}median_error_share": float(np.median(error)), f"{kind}p90_error_share": float(np.quantile(error, 0.9))}


def _moved(before: Calibration, after: Calibration) -> pd.DataFrame:
    rows = []
    for kind, old, new in (("runtime", before.by_runtime, after.by_runtime), ("family", before.by_family, after.by_family)):
        for key, factors in new.items():
            for constant, factor in factors.items():
                change = factor / old.get(key, {}).get(constant, 1.0)
                if abs(change - 1) > 0.01:
                    rows.append({"kind": kind, "name": key, "constant": constant, "factor": factor, "change": change})
    return pd.DataFrame(rows, columns=_MOVED)
