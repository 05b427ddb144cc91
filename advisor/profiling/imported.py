"""StepProfile from a Chrome trace that somebody recorded with torch.profiler, on CUDA, ROCm or the CPU.

One step is taken: by ProfilerStep# annotations, else between two optimizer steps, else all of it. Kernels count for the operator that
launched them (correlation -> runtime call -> enclosing operator on the same thread).
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.errors import AdvisorError
from advisor.profiling.imported_events import Event, Trace, read_trace
from advisor.profiling.imported_rows import device_rows, host_rows
from advisor.profiling.schema import MODULE_COLUMNS, OPERATOR_COLUMNS, PARAMETER_COLUMNS, ProfileMeta, StepProfile, frame

#: A step with less device time than this share of the fullest one is a partial step (warm-up, end of the recording).
_FULL_STEP_SHARE = 0.5
_TORCH_OPTIMIZERS = (
    "sgd",
    "adam",
    "adamw",
    "adagrad",
    "adadelta",
    "adafactor",
    "adamax",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
    "lbfgs",
    "muon",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """One step: the host's time span, its device events, and how it was found."""

    start_s: float
    end_s: float
    events: list[Event]
    found_by: str  # "ProfilerStep", "Optimizer.step" or "whole trace"


def import_trace(path: Path) -> StepProfile:
    """Read a trace (.json or .json.gz) as one training step.

    Args:
        path: what `torch.profiler` exported, of one rank.

    Returns:
        A profile with source "imported": one row per operator call with `measured_s`, copies with their devices, collectives with their
        message bytes where recorded, `idle_s` from the gaps between kernels. It knows no modules and no parameters. Flops and bytes are
        there only if the trace was recorded with `record_shapes=True`. Kernels that overlap on several streams count in full each.

    Raises:
        AdvisorError: no such file, damaged, too large, or without operators and kernels.
    """
    trace = read_trace(path)
    launches = {c: e for e in trace.host if e.kind == "launch" and (c := e.number("correlation", "Correlation")) is not None}
    operators = {i: e for e in trace.host if e.kind == "operator" and (i := e.number("External id", "external id")) is not None}
    window = _step(trace, launches)
    if trace.device:
        rows, busy_events = device_rows(window.events, launches, operators), window.events
    else:
        rows, busy_events = host_rows(window.events)
    rows = [row for row in rows if row["measured_s"] > 0]
    if not rows:
        raise AdvisorError(f"{path} holds no operator that took time.", hint="Record at least one whole training step.")
    meta = _meta(path, trace, window, rows, _busy_s(busy_events))
    blank = {"module": "", "weight": "", "saved_bytes": 0, "causal": 0}
    operators_frame = frame([{**blank, **row, "call": call} for call, row in enumerate(rows)], OPERATOR_COLUMNS)
    return StepProfile(meta=meta, operators=operators_frame, modules=frame([], MODULE_COLUMNS), parameters=frame([], PARAMETER_COLUMNS))


def _step(trace: Trace, launches: dict[float, Event]) -> _Window:
    """The step of median device time among the full ones."""
    spans, found_by = _spans(trace)
    if trace.device:
        when = [_launch_time_s(event, launches) for event in trace.device]
        inside = [[e for e, t in zip(trace.device, when, strict=True) if start <= t < end] for start, end in spans]
    else:
        inside = [[e for e in trace.host if start <= e.start_s < end] for start, end in spans]
    busy = [sum(e.duration_s for e in events if e.kind != "annotation") for events in inside]
    full = [i for i, seconds in enumerate(busy) if seconds >= _FULL_STEP_SHARE * max(busy)]
    chosen = sorted(full, key=lambda i: busy[i])[(len(full) - 1) // 2]
    start_s = spans[chosen][0]
    length_s = statistics.median(spans[i][1] - spans[i][0] for i in full)
    return _Window(start_s=start_s, end_s=start_s + length_s, events=inside[chosen], found_by=found_by)


def _spans(trace: Trace) -> tuple[list[tuple[float, float]], str]:
    """Time spans of the steps on the host, and what showed them."""
    steps = {e.name: (e.start_s, e.end_s) for e in trace.host if e.kind == "annotation" and e.name.startswith("ProfilerStep#")}
    if steps:
        return sorted(steps.values()), "ProfilerStep"
    ends = sorted(e.end_s for e in trace.host if e.kind == "annotation" and e.name.startswith("Optimizer.step#"))
    if len(ends) >= 3:
        return list(itertools.pairwise(ends)), "Optimizer.step"
    events = trace.device or [e for e in trace.host if e.kind == "operator"]
    first_s = min([e.start_s for e in events] + ([e.start_s for e in trace.host] if trace.device else []))
    return [(first_s, max(e.end_s for e in events) + 1e-9)], "whole trace"


def _launch_time_s(event: Event, launches: dict[float, Event]) -> float:
    correlation = event.number("correlation", "Correlation")
    launch = launches.get(correlation) if correlation is not None else None
    return launch.start_s if launch else event.start_s


def _busy_s(events: Sequence[Event]) -> float:
    """Seconds in which at least one of the events runs."""
    total_s, until_s = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e.start_s):
        total_s += max(event.end_s - max(event.start_s, until_s), 0.0)
        until_s = max(until_s, event.end_s)
    return total_s


def _meta(path: Path, trace: Trace, window: _Window, rows: Sequence[dict[str, Any]], busy_s: float) -> ProfileMeta:
    step_s = window.end_s - window.start_s
    if window.found_by == "whole trace" and trace.device:  # start-up before the first kernel is no part of a step
        step_s = max(e.end_s for e in window.events) - min(e.start_s for e in window.events)
    names = sorted({m.group(1) for e in trace.host if e.kind == "annotation" and (m := re.match(r"Optimizer\.step#(\w+)\.step", e.name))})
    names.sort(key=lambda name: name.lower() not in _TORCH_OPTIMIZERS)
    first = _first_input(rows)
    dtypes = [row["dtype"] for row in rows if row["flops"] and row["dtype"]]
    return ProfileMeta(
        script=str(path), form="trace", source="imported", device=_device_name(trace, rows), framework=_framework(trace),
        optimizer=names[0].lower() if names else "", num_optimizers=max(len(names), 1), batch_size=first[0] if first else 1,
        input_shapes=[first] if first else [], param_dtype=statistics.mode(dtypes) if dtypes else "fp32", step_time_s=step_s, idle_s=max(step_s - busy_s, 0.0),
        warnings=_warnings(trace, window, rows),
        versions={key: str(value) for key, value in trace.header.items() if "version" in key.lower() and not isinstance(value, dict | list)},
    )  # fmt: skip


def _first_input(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Shape of the forward pass's first input, for its batch size: of a convolution, else of attention, else of a plain product.

    Products of token models have batch and positions in one dimension, so they count only where nothing looks like tokens.
    """
    forward = [row for row in rows if row["phase"] == "forward"]
    has_tokens = any(row["op_class"] in ("attention", "embedding") for row in forward)
    for op_class in ("convolution", "attention", *(() if has_tokens else ("matmul",))):
        for row in forward:
            shapes: list[list[int]] = row["input_shapes"]
            if row["op_class"] == op_class and row["flops"]:
                return next((shape for shape in shapes if len(shape) >= 2), [])
    return []


def _device_name(trace: Trace, rows: Sequence[dict[str, Any]]) -> str:
    if not trace.device:
        return "cpu"
    index = str(rows[0]["device"]).split(":")[1]
    listed = trace.header.get("deviceProperties")
    named = [
        (str(p.get("id", i)), str(p.get("name", "")))
        for i, p in enumerate(listed if isinstance(listed, list) else [])
        if isinstance(p, dict)
    ]
    return dict(named).get(index) or next((name for _, name in named if name), "GPU (name not recorded)")


def _framework(trace: Trace) -> str:
    version = trace.header.get("torch_version") or trace.header.get("pytorch_version")
    return f"torch {version}" if version else "torch"


def _warnings(trace: Trace, window: _Window, rows: Sequence[dict[str, Any]]) -> list[str]:
    found = []
    if window.found_by == "whole trace":
        found.append("The trace marks no steps: all of it counts as one step. Call prof.step() after each step when recording.")
    if not any(row["input_shapes"] for row in rows):
        found.append("The trace holds no shapes, so flops and bytes are unknown. Record with record_shapes=True.")
    unknown_s = sum(row["measured_s"] for row in rows if row["op_class"] == "other")
    if unknown_s > 0.02 * sum(row["measured_s"] for row in rows):
        names = {row["operator"] for row in rows if row["op_class"] == "other"}
        found.append(f"{len(names)} operators belong to no known class, e.g. {min(names)[:60]}.")
    ranks = trace.header.get("distributedInfo")
    if isinstance(ranks, dict) and str(ranks.get("world_size", 1)) not in ("0", "1"):
        rank, size = ranks.get("rank", "?"), ranks.get("world_size")
        found.append(f"Recorded on rank {rank} of {size}: collectives and idle time include waiting for others.")
    return found
