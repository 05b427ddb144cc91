"""One step measured: the script runs for real under the same hooks, warms up, is timed, and is profiled for one step."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from advisor.profiling import hooks, sandbox, single_process, tables
from advisor.profiling.child import Failure, Request, explain, run_script
from advisor.profiling.events import MODULE_RANGE, UPDATE_RANGE, Event, busy_s
from advisor.profiling.watcher import Stop, Watcher


class LiveWatcher(Watcher):
    """Counts whole steps, times them, and opens a profiler around the last one.

    A step ends when a model is called again after `updates_per_step` optimizer steps (or, for updates by hand, after
    `backward_per_step` backward passes).
    """

    def __init__(self, request: Request) -> None:
        super().__init__(Path(request.path))
        self.warm_up_steps, self.timed_steps = request.warm_up_steps, request.timed_steps
        self.updates_per_step, self.backward_per_step = request.updates_per_step, request.backward_per_step
        self.num_updates = self.num_backward_before = 0
        self.boundaries: list[float] = []
        self.profiler: Any = None
        self.profiled_s = 0.0
        self.ranges: list[Any] = []

    def enter(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        super().enter(module, args, kwargs)
        if self.profiler is not None:
            self._open(f"{MODULE_RANGE}{id(module)}")

    def leave(self, module: torch.nn.Module, result: Any) -> None:
        if self.profiler is not None and self.ranges:
            self.ranges.pop().__exit__(None, None, None)
        super().leave(module, result)

    def _open(self, name: str) -> None:
        opened: Any = torch.profiler.record_function(name)
        opened.__enter__()
        self.ranges.append(opened)

    def _enter_root(self, module: torch.nn.Module, tensors: list[torch.Tensor]) -> None:
        if id(module) not in self.roots:
            self._note_root(module, tensors)
        self.stage = "forward"
        if not self.boundaries and torch.is_grad_enabled():
            self.boundaries.append(_now())
        updates, backward = self.num_updates, self.num_backward - self.num_backward_before
        if updates >= self.updates_per_step if self.updates_per_step else backward >= self.backward_per_step:
            self.end_step()

    def end_step(self) -> None:
        """A step is over: note the time; start the profiler, or stop everything."""
        self.num_updates, self.num_backward_before = 0, self.num_backward
        now = _now()
        if self.profiler is not None:
            self.profiled_s = now - self.boundaries[-1]
            self.profiler.stop()
            self.boundaries.append(now)
            raise Stop
        self.boundaries.append(now)
        if len(self.boundaries) - 1 >= self.warm_up_steps + self.timed_steps:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self.profiler = torch.profiler.profile(activities=activities, record_shapes=True)
            self.profiler.start()
            self.boundaries[-1] = _now()

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        del optimizer
        self.update_depth += 1

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        self.update_depth -= 1
        self.num_updates += 1
        if not any(o is optimizer for o in self.stepped):
            self.stepped.append(optimizer)

    def step_times_s(self) -> list[float]:
        """Wall seconds of the steps after warm-up that ran without the profiler."""
        times = [b - a for a, b in zip(self.boundaries, self.boundaries[1:], strict=False)]
        return times[self.warm_up_steps : self.warm_up_steps + self.timed_steps]


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def run(request: Request) -> Failure | None:
    """Run the script for real; leave `events.json` with one profiled step and `live.json` with its times."""
    sandbox.never_raise_warnings()
    watcher = LiveWatcher(request)
    single_process.install(watcher.facts, watcher.location)
    sandbox.quiet_torch([], keeps_workers=True)
    hooks.install(watcher, replays=False)
    hooks.mark_updates(UPDATE_RANGE)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_steps = request.warm_up_steps + request.timed_steps + 2
    error = run_script(request, num_steps, device, request.batch_size)
    if watcher.profiler is not None and not watcher.profiled_s:  # the script ended with the profiled step
        try:
            watcher.end_step()
        except Stop:
            error = None
    if not watcher.profiled_s:
        if error is None or isinstance(error, SystemExit):
            return Failure(kind="few-steps", message=f"{request.script} ended before a step could be measured.")
        return explain(request, error, watcher)
    _save(request, watcher, device)
    return None


def _save(request: Request, watcher: LiveWatcher, device: str) -> None:
    model = tables.find_model(watcher)
    events = [_event(e) for e in watcher.profiler.events()]
    times = sorted(watcher.step_times_s()) or [watcher.profiled_s]
    paths = {str(key): path for key, path in {**model.other_paths, **model.paths}.items()}
    step_s = times[len(times) // 2]
    summary = {
        "device": torch.cuda.get_device_name() if device == "cuda" else _processor(), "step_time_s": step_s,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "idle_s": max(0.0, step_s - busy_s(events)), "on_device": device == "cuda", "paths": paths,
        "num_params": sum(p.numel() for p in model.parameters.values()),
    }  # fmt: skip
    folder = Path(request.folder)
    (folder / "events.json").write_text(json.dumps([e.as_list() for e in events]), encoding="utf8")
    (folder / "live.json").write_text(json.dumps(summary), encoding="utf8")


def _event(event: Any) -> Event:
    """The few fields we need of a `torch.autograd.profiler_util.FunctionEvent`; times there are microseconds."""
    is_device = not str(event.device_type).endswith("CPU")
    return Event(
        id=int(event.id), name=str(event.name), thread=int(event.thread), start_us=float(event.time_range.start), end_us=float(event.time_range.end),
        sequence=int(event.sequence_nr), is_device=is_device, device_us=float(sum(k.duration for k in event.kernels)), num_kernels=len(event.kernels),
    )  # fmt: skip


def _processor() -> str:
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines() if Path("/proc/cpuinfo").is_file() else ():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"CPU {name}, {torch.get_num_threads()} threads"
