"""Reports side by side: what another GPU, more nodes or another batch would change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from advisor.report.format import GIB_BYTES
from advisor.report.report import Report

_FIGURES = ("step_time_s", "low_s", "high_s", "samples_per_s", "tokens_per_s", "mfu", "communication_share")


def compare(reports: Mapping[str, Report]) -> pd.DataFrame:
    """One row per report: its recommended plan and that plan's figures (columns carry their units), peak memory in GiB."""
    return pd.DataFrame([_row(report) for report in reports.values()], index=pd.Index(list(reports), name="case"))


def _row(report: Report) -> dict[str, Any]:
    if not report.plans:
        return {"plan": "nothing fits"}
    best = report.plans[0]
    peak_bytes = best.estimate.get("peak_memory_bytes")
    row: dict[str, Any] = {"plan": best.label, "num_gpus": best.plan.get("world_size"), "global_batch": best.plan.get("global_batch")}
    row |= {name: best.estimate.get(name) for name in _FIGURES}
    return row | {"peak_memory_gib": None if peak_bytes is None else peak_bytes / GIB_BYTES}
