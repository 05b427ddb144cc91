"""`advise calibrate`: refit the shipped constants on the user's own runs, and say by cross-validation whether it helped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.model_selection import KFold

from advisor.errors import AdvisorError
from advisor.measure.fit import BY_FAMILY, BY_RUNTIME, Parameter, Problem, fit, make_problem, to_calibration
from advisor.measure.runs import RunTable, read_runs
from cost_models import Calibration, load_calibration
from cost_models.types import FloatArray

_FOLDS = 5
#: How far a user's runs may move a factor from its shipped value (standard deviation of the logarithm). Wider than between published
#: runtimes: a user's cluster and scripts differ from all of them. Also what published runs hardly identify, such as overlap.
DEVIATIONS: Mapping[str, float] = {
    **BY_RUNTIME, "gemm_rate_share": 0.15, "memory_traffic": 0.3, "overlap_contention": 0.4, "dp_hidden_share": 0.3, "step_s": 0.8,
    "batched_rate_share": 0.2, "pcie_rate_share": 0.3,
}  # fmt: skip
_SCALE = 0.12  # miss that weighs like one standard deviation; smaller ones chase the noise of single runs (tried on unseen sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """A refit. Errors are shares of the measured step time."""

    calibration: Calibration
    num_runs: int
    error_before: Mapping[str, float]  # median, p90, with the constants started from
    error_after: Mapping[str, float]  # of runs left out of the fit (cross-validation); of the fit itself under two runs
    moved: pd.DataFrame  # what moved: runtime, family, constant, factor


def calibrate_runs(
    source: str | Path | pd.DataFrame, *, arch_csv: str | Path | None = None, calibration: Calibration | None = None
) -> CalibrationResult:
    """Fit the factors of the runtimes and GPU families in a table of measured runs.

    Args:
        source: CSV file or frame with the columns of `runs.csv`.
        arch_csv: shapes of the models named.
        calibration: constants to start from and to stay near; the shipped ones by default.

    Raises:
        AdvisorError: unreadable, or no run with a measured step time.
    """
    runs = read_runs(source, arch_csv)
    measured = np.flatnonzero(np.isfinite(runs.step_time_s))
    if not len(measured):
        raise AdvisorError(
            "No run in the table has both a price and a measured step time.", hint="See `skipped_reason` of `advise predict`."
        )
    return calibrate_table(runs.take(measured), calibration or load_calibration())


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
    named = dataclasses.replace(final, name=f"{base.name}, refitted on {len(runs)} runs", data={**base.data, "num_own_runs": len(runs)})
    return CalibrationResult(
        calibration=named, num_runs=len(runs), error_before=_figures(before), error_after=_figures(held_out), moved=_moved(base, final)
    )


def refit_factors(problem: Problem, train: np.ndarray | None = None) -> Calibration:
    """Move the runtimes' and families' factors towards the runs, held near where they are."""
    base = problem.base
    params = [
        Parameter(constant=c, runtime=r, mean=float(np.log(base.by_runtime.get(r, {}).get(c, 1.0))), deviation=sd)
        for c, sd in DEVIATIONS.items() for r in sorted(set(problem.runtime))
    ]  # fmt: skip
    params += [
        Parameter(constant=c, family=f, mean=float(np.log(base.by_family.get(f, {}).get(c, 1.0))), deviation=sd)
        for c, sd in BY_FAMILY.items() for f in sorted(set(problem.family))
    ]  # fmt: skip
    return to_calibration(problem, params, fit(problem, params, train=train, scale=_SCALE))


def _figures(error: FloatArray) -> dict[str, float]:
    return {"median_error_share": float(np.median(error)), "p90_error_share": float(np.quantile(error, 0.9))}


def _moved(before: Calibration, after: Calibration) -> pd.DataFrame:
    rows = []
    for kind, old, new in (("runtime", before.by_runtime, after.by_runtime), ("family", before.by_family, after.by_family)):
        for key, factors in new.items():
            for constant, factor in factors.items():
                change = factor / old.get(key, {}).get(constant, 1.0)
                if abs(change - 1) > 0.01:
                    rows.append({"kind": kind, "name": key, "constant": constant, "factor": factor, "change": change})
    return pd.DataFrame(rows, columns=["kind", "name", "constant", "factor", "change"])
