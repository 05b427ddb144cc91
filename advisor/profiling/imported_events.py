"""Events of a Chrome trace in one form, whoever recorded it: names of categories and arguments differ between kineto's versions.

Reads traces of torch.profiler on CUDA, ROCm and the CPU; times become seconds, each host event knows what encloses it.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advisor.errors import AdvisorError

#: Largest trace read, in bytes of JSON: parsing takes about ten times as much memory.
MAX_JSON_BYTES = 600 * 2**20
_HINT = "Record one or two steps with torch.profiler and export_chrome_trace()."

#: Category of an event in kineto's versions -> what it is here.
_KINDS = {
    "cpu_op": "operator", "operator": "operator", "user_annotation": "annotation", "kernel": "kernel", "gpu_memcpy": "copy",
    "memcpy": "copy", "gpu_memset": "fill", "memset": "fill", "cuda_runtime": "launch", "cuda_driver": "launch", "runtime": "launch",
    "hip_runtime": "launch", "xpu_runtime": "launch", "driver": "launch",
}  # fmt: skip


@dataclass(slots=True, eq=False)
class Event:
    """One interval of the trace. `parent` is what encloses it on the same host thread."""

    kind: str  # operator, annotation, launch (host); kernel, copy, fill (device)
    name: str
    start_s: float
    duration_s: float
    thread: tuple[str, str]
    args: Mapping[str, Any]
    parent: Event | None = None
    children_s: float = 0.0  # of its operators, for the time an operator spends itself

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s

    def number(self, *names: str) -> float | None:
        """The first of these arguments that is there, as a number."""
        for name in names:
            try:
                return float(self.args[name])
            except (KeyError, TypeError, ValueError):
                continue
        return None

    def ancestors(self) -> Iterable[Event]:
        """What encloses it, innermost first."""
        above = self.parent
        while above is not None:
            yield above
            above = above.parent


@dataclass(slots=True, kw_only=True)
class Trace:
    """A trace's events, sorted by start, and its header."""

    host: list[Event] = field(default_factory=list)  # operators, annotations and launches
    device: list[Event] = field(default_factory=list)  # kernels, copies and fills
    header: Mapping[str, Any] = field(default_factory=dict)


def read_trace(path: Path) -> Trace:
    """Read and sort a trace.

    Raises:
        AdvisorError: no such file, too large, cut off, no JSON, or no trace of torch.profiler.
    """
    data = _load(path)
    if isinstance(data, list):
        data = {"traceEvents": data}
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list):
        raise AdvisorError(f"{path} is JSON, but no Chrome trace: it has no traceEvents.", hint=_HINT)
    trace = Trace(header={key: value for key, value in data.items() if key != "traceEvents"})
    for raw in events:
        event = _event(raw)
        if event:
            (trace.device if event.kind in ("kernel", "copy", "fill") else trace.host).append(event)
    trace.host.sort(key=lambda e: (e.start_s, -e.duration_s))
    trace.device.sort(key=lambda e: e.start_s)
    if not any(e.kind == "operator" for e in trace.host) and not trace.device:
        raise AdvisorError(f"{path} holds neither operators nor device kernels.", hint=_HINT)
    _nest(trace.host)
    return trace


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as probe:
            packed = probe.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else path.open("rb") as source:
            text = source.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError as error:
        raise AdvisorError(f"There is no trace {path}.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise AdvisorError(f"{path} is cut off or damaged ({error}).", hint="Copy or record it again.") from error
    except OSError as error:
        raise AdvisorError(f"{path} can't be read ({error.strerror or error}).") from error
    if len(text) > MAX_JSON_BYTES:
        raise AdvisorError(f"{path} holds more than {MAX_JSON_BYTES >> 20} MiB of JSON.", hint=f"{_HINT} Leave out with_stack.")
    if not text.strip():
        raise AdvisorError(f"{path} is empty.", hint=_HINT)
    try:
        return json.loads(text.decode("utf8", errors="replace"), strict=False)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at character {error.pos:,}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise AdvisorError(f"{path} is cut off or no JSON ({reason}).", hint="Was the program stopped while it wrote the trace?") from error


def _event(raw: object) -> Event | None:
    """An interval of a kind that matters, or None."""
    if not isinstance(raw, dict) or raw.get("ph") != "X":
        return None
    kind = _KINDS.get(str(raw.get("cat", "")).lower())
    try:
        start_s, duration_s = float(raw["ts"]) * 1e-6, max(float(raw.get("dur", 0.0)), 0.0) * 1e-6
    except (KeyError, TypeError, ValueError):
        return None
    if kind is None or not math.isfinite(start_s + duration_s):
        return None
    args = raw.get("args")
    name = str(raw.get("name", ""))
    if kind == "operator" and name.startswith(("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)")):
        kind = "annotation"  # before kineto had a category for them
    if kind == "annotation" and name.startswith(("gloo:", "mpi:", "ucc:")):
        kind = "operator"  # the collective at work, on a thread of the backend
    return Event(kind=kind, name=name, start_s=start_s, duration_s=duration_s, thread=(str(raw.get("pid")), str(raw.get("tid"))),
                 args=args if isinstance(args, dict) else {})  # fmt: skip


def _nest(host: list[Event]) -> None:
    """Give every host event what encloses it on its thread, and every operator the seconds of its operators."""
    open_events: dict[tuple[str, str], list[Event]] = {}
    for event in host:
        stack = open_events.setdefault(event.thread, [])
        while stack and stack[-1].end_s <= event.start_s:
            stack.pop()
        event.parent = stack[-1] if stack else None
        if event.kind == "operator":
            above = next((e for e in event.ancestors() if e.kind == "operator"), None)
            if above:
                above.children_s += event.duration_s
        stack.append(event)
