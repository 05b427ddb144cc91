"""Hotspots of a trace that somebody recorded with torch.profiler: no script, no plan, only where the time went."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from advisor.errors import HardwareError


def trace_summary(path: Path) -> dict[str, Any]:
    """Device, step time, verdict and hotspot classes of a Chrome trace (.json or .json.gz).

    Raises:
        AdvisorError: the file is no trace.
    """
    from advisor.classify.hotspots import hotspots, step_verdict
    from advisor.measure.cluster import resolve_cluster
    from advisor.profiling.imported import import_trace
    from advisor.workload import shape
    from cost_models import catalogue

    profile = import_trace(path)
    try:
        cluster, _ = resolve_cluster(gpu=catalogue.gpu_for_device_name(profile.meta.device))
    except (ValueError, HardwareError):
        cluster, _ = resolve_cluster(gpu="cpu")
    spots = hotspots(profile, shape(profile), cluster)
    return {
        "trace": str(path), "device": profile.meta.device, "step_time_s": profile.meta.step_time_s, "idle_s": profile.meta.idle_s,
        "bound_by": step_verdict(spots), "hotspots": [dataclasses.asdict(spot) for spot in spots], "warnings": list(profile.meta.warnings),
    }  # fmt: skip


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """The summary as a table; shares are of the step, idle gaps included."""
    step_s = summary["step_time_s"]
    title = f"{summary['trace']} · {summary['device'] or 'unknown device'} · step {step_s * 1e3:.3g} ms" if step_s else summary["trace"]
    console.print(title, markup=False, highlight=False)
    table = Table(box=None)
    for title in ("class", "share", "ms", "calls", "bound by"):
        table.add_column(title, justify="right" if title in ("share", "ms", "calls") else "left", overflow="fold")
    for spot in summary["hotspots"]:
        row = (spot["op_class"], f"{spot['time_share']:.1%}", f"{spot['time_s'] * 1e3:.3g}", str(spot["num_calls"]), spot["bound_by"])
        table.add_row(*row)
    console.print(table)
    console.print(f"the step is bound by: {summary['bound_by'] or 'unknown'}")
    for warning in summary["warnings"]:
        console.print(f"! {warning}", markup=False, highlight=False)
