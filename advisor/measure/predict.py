"""`advise predict`: step time, memory and their intervals for every run of a table that can be priced."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd

from advisor.measure.run_memory import RunMemory, run_memory
from advisor.measure.runs import RunTable, read_runs
from advisor.progress import Progress, quiet
from advisor.words import counted
from cost_models import Calibration, estimate_rows
from cost_models.types import Estimates, Workload

PREDICTED_COLUMNS = (
    "predicted_step_time_s", "predicted_low_s", "predicted_high_s", "predicted_samples_per_s", "predicted_peak_mem_gib", "predicted_fits", "predicted_mfu",
    "predicted_breakdown", "assumed", "skipped_reason",
)  # fmt: skip


def predict_runs(
    source: str | Path | pd.DataFrame, *, arch_csv: str | Path | None = None, calibration: Calibration | None = None, anchor: bool = False,
    progress: Progress = quiet,
) -> pd.DataFrame:  # fmt: skip
    """The table with predictions added; measured columns are ignored.

    Args:
        source: CSV file or frame with the columns of `runs.csv`.
        arch_csv: shapes of the models named.
        calibration: constants; the shipped ones by default.
        anchor: correct runs on several GPUs by the measured single-GPU run of the same model on the same GPU, where the table has one.
        progress: told what is being done.

    Returns:
        All rows in order with PREDICTED_COLUMNS. The step is that of the row's global batch, or of the one named in `assumed`, and
        `predicted_samples_per_s` all GPUs' samples in it by its time (mel frames or values of sound where the row's notes name
        them as unit). `predicted_peak_mem_gib` is what the row's source publishes (`PUBLISHED`), `predicted_fits` whether the fullest rank's peak is expected within the device's memory.
        `predicted_breakdown` is JSON (seconds by part), `assumed` names the
        fields that got a default, `skipped_reason` says why a row has no prediction.

    Raises:
        AdvisorError: the table can't be read.
    """
    runs = read_runs(source, arch_csv, progress=progress)
    out = runs.frame.copy()
    for name in PREDICTED_COLUMNS:
        out[name] = pd.Series([None] * len(out), dtype=object)
    reasons = pd.Series([runs.skipped.get(i, "") for i in range(len(out))], dtype=object)
    out["skipped_reason"] = reasons.to_numpy()
    if len(runs):
        progress(f"pricing {counted(len(runs), 'row')}")
        _fill(out, runs, estimate_runs(runs, calibration=calibration, anchor=anchor), run_memory(runs, calibration))
    numeric = [c for c in PREDICTED_COLUMNS if c.endswith(("_s", "_gib", "_mfu"))]
    out[numeric] = out[numeric].apply(pd.to_numeric)
    return out


def estimate_runs(runs: RunTable, *, calibration: Calibration | None = None, anchor: bool = False) -> Estimates:
    """Prices of the runs of a table, in its order."""
    workloads = anchored_workloads(runs) if anchor else runs.workloads
    return estimate_rows(workloads, runs.clusters, runs.plans, calibration)


def anchored_workloads(runs: RunTable) -> tuple[Workload, ...]:
    """Workloads of runs on several GPUs with the measured step of their model on one such GPU; single-GPU runs stay as they are.

    Of several single-GPU runs the one with the nearest micro-batch is taken.
    """
    plans = runs.plans
    devices = plans.dp_replicate_degree * plans.dp_shard_degree * plans.tp_degree * plans.cp_degree * plans.pp_degree
    single: dict[tuple[int, str, int], list[int]] = {}
    for i in np.flatnonzero((devices == 1) & np.isfinite(runs.step_time_s) & (plans.num_microbatches == 1)):
        single.setdefault(_anchor_key(runs, int(i)), []).append(int(i))
    made: dict[tuple[int, int], Workload] = {}
    out = list(runs.workloads)
    for i in np.flatnonzero(devices > 1):
        known = single.get(_anchor_key(runs, int(i)), [])
        if known:
            nearest = min(known, key=lambda j: abs(np.log(plans.micro_batch[j] / plans.micro_batch[i])))
            key = (id(runs.workloads[i]), nearest)
            if key not in made:
                made[key] = dataclasses.replace(
                    runs.workloads[i], measured_step_s=float(runs.step_time_s[nearest]), measured_device=runs.clusters[i].device.name,
                    traced_batch=int(plans.micro_batch[nearest]),
                )  # fmt: skip
            out[i] = made[key]
    return tuple(out)


def _anchor_key(runs: RunTable, i: int) -> tuple[int, str, int]:
    return id(runs.workloads[i]), runs.clusters[i].device.name, int(runs.plans.runtime[i])


def _fill(out: pd.DataFrame, runs: RunTable, prices: Estimates, memory: RunMemory) -> None:
    plans = runs.plans
    samples = plans.dp_replicate_degree * plans.dp_shard_degree * plans.micro_batch * plans.num_microbatches * runs.units_per_sample
    columns = {
        "predicted_step_time_s": prices.step_time_s, "predicted_low_s": prices.low_s, "predicted_high_s": prices.high_s,
        "predicted_samples_per_s": samples / prices.step_time_s,
        "predicted_peak_mem_gib": memory.figure, "predicted_fits": memory.fits,
        "predicted_mfu": prices.mfu, "predicted_breakdown": _breakdowns(prices), "assumed": ["; ".join((*a, *([m] if m else []))) for a, m in zip(runs.assumed, memory.assumed, strict=True)],
    }  # fmt: skip
    for name, values in columns.items():
        column = out[name].to_numpy(dtype=object, copy=True)
        column[runs.row] = values
        out[name] = column


def _breakdowns(prices: Estimates) -> list[str]:
    names = list(prices.breakdown_s)
    table = np.stack([prices.breakdown_s[name] for name in names], axis=1)
    return [json.dumps({n: float(f"{v:.6g}") for n, v in zip(names, row, strict=True)}) for row in table.tolist()]
