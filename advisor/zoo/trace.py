"""One training step of a network on fake tensors, inside this process: the recorder of user scripts, without patching torch for good.

A user's script is traced in a process of its own, where torch is patched from end to end. The zoo's networks touch no device and start
nothing, so hooks on their own modules and two scoped modes are enough.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from advisor.profiling import assemble, cuda_autocast, recurrent
from advisor.profiling.recorder import Recorder
from advisor.profiling.schema import StepProfile
from advisor.profiling.source import Source
from advisor.profiling.watcher import Watcher
from advisor.profiling.world import World
from advisor.zoo.network import Batch, Network

_DEVICE = torch.device("cuda", 0)


def trace(
    network: Network, name: str, *, batch_size: int, autocast: torch.dtype | None = None, weights: torch.dtype = torch.float32
) -> StepProfile:
    """The profile of one training step.

    Args:
        network: its functions.
        name: said in the profile's header.
        batch_size: samples in the step; nothing is computed, so it costs no memory.
        autocast: 16-bit dtype of an autocast context around the forward pass; None for none.
        weights: dtype of weights, buffers and inputs that are no integers.
    """
    world, watcher = World(fake=True), Watcher(Path(name))
    recorder = Recorder(world, watcher)
    watcher.recorder, watcher.autocast_dtype = recorder, autocast
    with FakeTensorMode(), _restored(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the recorder looks at every object of the process, deprecated ones too
        with _default_dtype(weights):
            model, batch = network.build_model().train(), network.make_batch(batch_size)
        _place(world, [*model.parameters(), *model.buffers(), *batch])
        with _hooked(model, watcher):
            recurrent.fold(recorder)
            _step(network, model, batch, recorder, autocast)
        source = Source(path=Path(name), entry="build_model", form="functions", declared=("build_model", "make_batch", "loss_fn"))
        profile = assemble.build(
            source, name, watcher=watcher, recorder=recorder, world=world, warnings=[], asked_workers=[], batch_size=batch_size
        )
    return dataclasses.replace(profile, meta=dataclasses.replace(profile.meta, other_models={}))  # the caller's own modules


def _place(world: World, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        world.set_device(tensor, _DEVICE)


def _step(network: Network, model: nn.Module, batch: Batch, recorder: Recorder, autocast: torch.dtype | None) -> None:
    """Forward, backward and the simplest update, recorded; its own optimizer is priced from what it keeps."""
    world, watcher = recorder.world, recorder.watcher
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=True)
    watcher.optimizers.append(optimizer)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        recorder.saved(tensor)
        return tensor

    world.factory_device, recorder.is_recording = _DEVICE, True
    with recorder, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss = network.loss_fn(model, batch)
        with watcher.backward():
            torch.autograd.backward(loss)
        watcher.before_update(optimizer)
        optimizer.step()
        watcher.after_update(optimizer)
    recorder.is_recording = False


@contextlib.contextmanager
def _hooked(model: nn.Module, watcher: Watcher) -> Iterator[None]:
    """The watcher is told of the calls of this model's modules."""

    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        watcher.enter(module, args, kwargs)

    def leave(module: nn.Module, _args: Any, _kwargs: dict[str, Any], result: Any) -> None:
        watcher.leave(module, result)

    handles = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in model.modules()]
    handles += [m.register_forward_hook(leave, with_kwargs=True) for m in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Tensors made inside are of this dtype where nobody asks for another."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Afterwards torch's recurrent layers and autocast are its own again."""
    functions = vars(torch._VF)
    own, library = dict(functions), cuda_autocast.install()
    try:
        yield
    finally:
        library._destroy()
        functions.clear()
        functions.update(own)
