"""One step without a device: the script runs on fake tensors (or small real ones) under the recorder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from advisor.profiling import assemble, devices, hooks, notes, sandbox, single_process, values
from advisor.profiling.child import Failure, Request, explain, leave, run_script
from advisor.profiling.recorder import Recorder
from advisor.profiling.schema import StepProfile, save_profile
from advisor.profiling.source import Source
from advisor.profiling.watcher import Watcher
from advisor.profiling.world import World


def run(request: Request) -> Failure | None:
    """Run the script, record one step, save its profile."""
    sandbox.never_raise_warnings()
    fake = request.way == "fake"
    world, watcher = World(fake=fake, num_devices=request.num_devices), Watcher(Path(request.path))
    asked_workers: list[int] = []
    recorder = Recorder(world, watcher)
    watcher.recorder = recorder
    devices.install(world)
    values.install(world)
    single_process.install(watcher.facts, watcher.location)
    sandbox.quiet_torch(asked_workers)
    sandbox.note_processes(watcher.processes)
    hooks.install(watcher, replays=fake)
    hooks.fold_calls(recorder, drops_dropout=True)
    _prefer_device_optimizers()
    world.on_copy, recorder.is_recording = recorder.add_copy, True
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    recorder.guesses = request.guesses

    own = os.getpid()

    def finish() -> None:
        recorder.is_recording = False
        if os.getpid() != own:  # a copy of this process that the script forked
            os._exit(0)
        save_profile(_profile(request, recorder, asked_workers, None), Path(request.folder) / "profile")
        leave()

    watcher.finish = finish
    with mode, recorder, hooks.observe_saved(recorder):
        error = run_script(request, 2, "cuda", request.batch_size)
    recorder.is_recording = False
    if os.getpid() != own:
        os._exit(0)
    if watcher.has_step:
        save_profile(_profile(request, recorder, asked_workers, error), Path(request.folder) / "profile")
        return None
    failure = explain(request, error, watcher)
    return dataclasses.replace(failure, host_model_bytes=_model_bytes(watcher, world))


def _profile(request: Request, recorder: Recorder, asked_workers: list[int], error: BaseException | None) -> StepProfile:
    watcher, world = recorder.watcher, recorder.world
    told = [*request.warnings, *notes.of_step(watcher)]
    if error is not None and not isinstance(error, SystemExit):
        told.append(f"The script stopped after its first step: {explain(request, error, watcher).message}")
    source = Source(path=Path(request.path), entry=request.entry, form=request.form, declared=tuple(request.declared),
                    imports=tuple(request.imports), facts=request.facts)  # fmt: skip
    batch_size = request.batch_size if request.form == "functions" else None
    return assemble.build(source, request.script, watcher=watcher, recorder=recorder, world=world, warnings=told, asked_workers=asked_workers,
                          batch_size=batch_size)  # fmt: skip


def _model_bytes(watcher: Watcher, world: World) -> int:
    """Bytes of the largest model seen, to tell whether it could be run for real."""
    called = sum(p.numel() * p.element_size() for p in watcher.parameters.values())
    return max(called, world.host_model_bytes)


def _prefer_device_optimizers() -> None:
    """Optimizers take their multi-tensor form, as they do on a GPU, and a gradient scaler never skips a step."""
    for place in map(sys.modules.get, ("torch.utils._foreach_utils", "torch.optim.optimizer")):
        kinds: list[Any] = getattr(place, "_foreach_supported_types", [])
        if FakeTensor not in kinds:
            kinds.append(FakeTensor)
    scaler: Any = torch.amp.GradScaler
    scaler._maybe_opt_step = lambda _self, optimizer, _state, *args, **kwargs: optimizer.step(*args, **kwargs)
