"""`advise evaluate`: predicted against measured step times, per source, GPU and layout, and how well sweeps are ranked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from advisor.errors import AdvisorError
from advisor.measure.predict import estimate_runs
from advisor.measure.run_memory import run_memory
from advisor.measure.runs import RunTable, read_runs
from advisor.progress import Progress, quiet
from advisor.words import counted
from cost_models import Calibration, load_calibration
from cost_models.types import FloatArray

_FEWEST_FOR_MEAN = 3  # sources with fewer runs don't count in the mean of medians
_FEWEST_IN_SWEEP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Errors are absolute shares: |predicted / measured - 1|. `bias` is the median of log(predicted / measured)."""

    overall: Mapping[str, float]
    by_source: pd.DataFrame
    by_gpu: pd.DataFrame
    by_layout: pd.DataFrame
    sweeps: pd.DataFrame  # one row per sweep: runs, regret of the picked plan, Spearman
    memory: Mapping[str, float]  # errors of the peak memory, where measured

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        tables = {n: getattr(self, n).reset_index().to_dict("records") for n in ("by_source", "by_gpu", "by_layout", "sweeps")}
        return {"overall": dict(self.overall), **tables, "memory": dict(self.memory)}


def evaluate_runs(
    source: str | Path | pd.DataFrame, *, arch_csv: str | Path | None = None, calibration: Calibration | None = None, anchor: bool = False,
    progress: Progress = quiet,
) -> Evaluation:  # fmt: skip
    """Price a table of runs and compare with what was measured.

    Args:
        source: CSV file or frame with the columns of `runs.csv`.
        arch_csv: shapes of the models named.
        calibration: constants; the shipped ones by default. Their error on runs of the sources that they were fitted on is no held-out
            error: `num_fitted_source_runs` of `overall` counts them, and `other_median_error_share` is the error of the others.
        anchor: as in `predict_runs`.
        progress: told what is being done.

    Raises:
        AdvisorError: unreadable, or no row has both a price and a measured time.
    """
    runs = read_runs(source, arch_csv, progress=progress)
    measured = np.flatnonzero(np.isfinite(runs.step_time_s) | np.isfinite(runs.peak_mem_gib))
    if not len(measured):
        hint = "See `skipped_reason` of `advise predict`."
        if len(runs):
            hint = "Fill in step_time_s, tokens_per_s_per_gpu, samples_per_s_total or peak_mem_gib."
        raise AdvisorError(f"None of the {len(runs.frame)} rows has both a price and a measurement.", hint=hint)
    progress(f"pricing {counted(len(runs), 'row')}")
    prices = estimate_runs(runs, calibration=calibration, anchor=anchor)
    memory_gib, fitted = run_memory(runs, calibration).figure, (calibration or load_calibration()).data.get("sources", ())
    return _evaluation(runs, prices.step_time_s, (prices.low_s, prices.high_s), memory_gib, fitted)


def _evaluation(
    runs: RunTable, predicted_s: FloatArray, interval: tuple[FloatArray, FloatArray], memory_gib: FloatArray, fitted_sources: Sequence[str]
) -> Evaluation:
    timed = np.isfinite(runs.step_time_s)
    table = error_table(runs, predicted_s)[timed]
    inside = (interval[0] <= runs.step_time_s) & (runs.step_time_s <= interval[1])
    sweeps = sweep_table(runs.column("sweep_id"), runs.step_time_s, predicted_s)
    share = float(np.mean(inside[timed])) if timed.any() else float("nan")
    overall = {
        "num_rows": len(runs.frame),
        "num_priced": len(runs),
        "num_measured": int(timed.sum()),
        **error_figures(table),
        "interval_share": share,
        **_in_sample(table, fitted_sources),
    }
    if len(sweeps):
        overall |= {"mean_regret_share": float(sweeps.regret.mean()), "median_spearman": float(sweeps.spearman.median())}
    weighed = np.isfinite(runs.peak_mem_gib)
    off = np.abs(memory_gib[weighed] / runs.peak_mem_gib[weighed] - 1)
    memory = {"num_measured": float(weighed.sum())}
    if len(off):
        memory |= {"median_error_share": float(np.median(off)), "p90_error_share": float(np.quantile(off, 0.9))}
    return Evaluation(
        overall=overall, by_source=grouped(table, "source"), by_gpu=grouped(table, "gpu"), by_layout=grouped(table, "layout"), sweeps=sweeps,
        memory=memory,
    )  # fmt: skip


def _in_sample(table: pd.DataFrame, fitted_sources: Sequence[str]) -> dict[str, float]:
    """How many measured runs are of sources that the constants were fitted on, and the median error of the others where there are some."""
    known = table["source"].isin(list(fitted_sources))
    others = {} if known.all() else {"other_median_error_share": float(table.error[~known].median())}
    return {"num_fitted_source_runs": int(known.sum()), **others}


def error_table(runs: RunTable, predicted_s: FloatArray) -> pd.DataFrame:
    """Source, GPU, layout, absolute error and log ratio of each priced run (NaN where nothing was measured)."""
    ratio = predicted_s / runs.step_time_s
    plans = runs.plans
    layouts = ["+".join(n for n, d in (("TP", plans.tp_degree[i]), ("PP", plans.pp_degree[i]), ("CP", plans.cp_degree[i]), ("EP", plans.ep_degree[i])) if d > 1)
               or ("FSDP" if plans.zero_stage[i] == 3 else "data only") for i in range(len(runs))]  # fmt: skip
    return pd.DataFrame({"source": runs.column("source_repo_or_doc", "own").astype(str), "gpu": [c.device.name for c in runs.clusters],
                         "layout": layouts, "error": np.abs(ratio - 1), "bias": np.log(ratio)})  # fmt: skip


def error_figures(table: pd.DataFrame) -> dict[str, float]:
    """Median, 90th percentile, mean of the sources' medians (sources of three runs and more), share within 20%, bias."""
    if not len(table):
        return {}
    medians = table.groupby("source")["error"].median()[table.groupby("source").size() >= _FEWEST_FOR_MEAN]
    return {
        "median_error_share": float(table.error.median()), "p90_error_share": float(table.error.quantile(0.9)),
        "mean_of_source_medians": float(medians.mean()), "within_20_percent_share": float((table.error <= 0.2).mean()),
        "bias": float(table.bias.median()),
    }  # fmt: skip


def grouped(table: pd.DataFrame, by: str) -> pd.DataFrame:
    """Error figures per value of a column, most runs first."""
    groups = table.groupby(by)
    out = pd.DataFrame({
        "num_runs": groups.size(), "median_error_share": groups.error.median(), "mean_error_share": groups.error.mean(),
        "p90_error_share": groups.error.quantile(0.9), "bias": groups.bias.median(),
    })  # fmt: skip
    return out.sort_values("num_runs", ascending=False)


def sweep_table(sweep: np.ndarray, measured_s: FloatArray, predicted_s: FloatArray) -> pd.DataFrame:
    """Regret (how much slower the plan predicted best is than the best) and Spearman of each sweep of four runs and more."""
    frame = pd.DataFrame({"sweep": pd.Series(sweep, dtype=object), "measured": measured_s, "predicted": predicted_s}).dropna()
    rows: list[dict[str, Any]] = []
    for name, group in frame[frame["sweep"].astype(str) != ""].groupby("sweep"):
        if len(group) < _FEWEST_IN_SWEEP or min(group.measured.nunique(), group.predicted.nunique()) < 2:
            continue
        picked = float(group.measured.iloc[int(np.argmin(group.predicted))])
        rows.append({"sweep": name, "num_runs": len(group), "regret": picked / float(group.measured.min()) - 1,
                     "spearman": float(group.measured.corr(group.predicted, method="spearman"))})  # fmt: skip
    return pd.DataFrame(rows, columns=["sweep", "num_runs", "regret", "spearman"]).set_index("sweep")
