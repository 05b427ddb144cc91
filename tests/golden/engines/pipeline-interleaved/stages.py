"""Runs parts of a model as the stages of a pipeline, without a change to the model's code.

A stage calls `loss_fn(model, batch)` as a single process would, but enters the call late and leaves it early: stand-ins for the modules
of earlier stages compute nothing, the last of them hands out what the stage before has sent, and the call ends behind the stage's own
last module. Masks, position tables and the loss need no thought that way.
"""

import copy
import math

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten


class EndOfStageError(Exception):
    """Ends a call of the model behind a stage's last module."""

    def __init__(self, hidden: torch.Tensor):
        super().__init__()
        self.hidden = hidden


def leave(_module, _inputs, output):
    """Forward hook of a stage's last module."""
    raise EndOfStageError(tree_flatten(output)[0][0])


def blank(value, device: torch.device, dtype: torch.dtype | None = None):
    """A tensor of that form without its numbers: NaN, or 0 where there is none; what is no tensor stays."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.full_like(value, math.nan if value.is_floating_point() else 0, device=device, dtype=dtype, requires_grad=False)


class StandIn(nn.Module):
    """Stands for a module of another stage: its output has that module's form and is NaN, but for what was received.

    Only the hidden state may cross a cut. Whatever else the model takes from another stage makes its loss NaN, and that is looked for.
    """

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype | None):
        super().__init__()
        self.original = [module]  # runs once, to see the form; in a list, so that it isn't part of the model
        empty = {id(tensor): tensor.detach().to("meta") for tensor in (*module.parameters(), *module.buffers())}
        self.shell = [copy.deepcopy(module, empty)]
        self.device, self.dtype, self.received = device, dtype, None

    def forward(self, *args, **kwargs):
        if self.original:
            with torch.no_grad():
                output = self.original.pop().to(self.device, self.dtype)(*args, **kwargs)
            leaves, self.structure = tree_flatten(output)
            self.leaves = [leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        filled = [blank(leaf, self.device) for leaf in self.leaves]
        if self.received is not None:
            filled[0], self.received = self.received, None
        return tree_unflatten(filled, self.structure)

    def __getattr__(self, name: str):
        """What a model may ask of its layers: settings, dtypes, layers inside."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.shell[0], name)


def keep_stages(
    model: nn.Module, stages: list[list[str]], mine: list[int], device: torch.device, dtype: torch.dtype | None = None
) -> dict[str, StandIn]:
    """Leave this rank the modules of the stages `mine`; returns stand-ins for those that its later stages must do without."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = tuple(name for stage in stages for name in stage)
    if strays := [p for p in parameters if p not in names and not p.startswith(tuple(f"{name}." for name in names))]:
        raise ValueError(f"in no stage: {', '.join(strays)}")
    aside: dict[str, StandIn] = {}
    for index, stage in enumerate(stages):
        for name in stage:
            if name in parameters and index not in mine:  # one that lies in no module of a stage
                owner, _, leaf = name.rpartition(".")
                delattr(model.get_submodule(owner), leaf)
                setattr(model.get_submodule(owner), leaf, blank(parameters[name], device, dtype))
            elif index not in mine:
                stand_in = StandIn(model.get_submodule(name), device, dtype)
                model.set_submodule(name, stand_in)
                if index > mine[-1]:
                    stand_in.original.clear()  # never called
            elif index < mine[-1]:
                aside[name] = StandIn(copy.deepcopy(model.get_submodule(name)), device, dtype)
    return aside


class Stage(nn.Module):
    """`loss_fn(model, batch)` from one cut to the next."""

    def __init__(self, model: nn.Module, loss_fn, stages: list[list[str]], index: int, aside: dict[str, StandIn]):
        super().__init__()
        before = [name for stage in stages[:index] for name in stage]
        self.own = nn.ModuleList([model.get_submodule(name) for name in stages[index]] if aside else [model])
        self.call, self.entry = [model, loss_fn], [model.get_submodule(name) for name in before[-1:]]  # lists: not its own
        self.aside = {name: stand_in for name, stand_in in aside.items() if name in before}
        self.shape: torch.Size | None = None
        if index + 1 < len(stages):
            model.get_submodule(stages[index][-1]).register_forward_hook(leave)

    def forward(self, *received: torch.Tensor, batch):
        model, loss_fn = self.call
        for entry, hidden in zip(self.entry, received, strict=True):
            entry.received = hidden
        own = {name: model.get_submodule(name) for name in self.aside}
        for name, stand_in in self.aside.items():
            model.set_submodule(name, stand_in)
        try:
            return loss_fn(model, batch)
        except EndOfStageError as end:
            self.shape = self.shape or end.hidden.shape
            if end.hidden.shape != self.shape:
                raise ValueError(f"{tuple(end.hidden.shape)} after {tuple(self.shape)}: pad micro-batches to one shape") from None
            return end.hidden
        finally:
            for name, module in own.items():
                model.set_submodule(name, module)
