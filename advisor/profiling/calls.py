"""What is kept of modules' calls, and the modules there are."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class ModuleCall:
    """What is known of a module's calls in the recorded micro-batch."""

    module: torch.nn.Module  # held, so that its id stays its own
    order: int
    input_shape: list[int]
    input_group: int
    num_calls: int = 0
    output_shape: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Frame:
    module: torch.nn.Module
    last_input: torch.Tensor | None = None  # first argument of the last child that owns parameters
    last_group: int = -1


class ModuleCalls(dict[int, ModuleCall]):
    """Calls by the id of their module."""

    def __init__(self) -> None:
        super().__init__()
        self.num_groups = 0

    def note(self, module: torch.nn.Module, tensors: list[torch.Tensor], parent: Frame | None) -> None:
        """A module is called with these tensors from inside another; calls that share their first input form a group."""
        first = tensors[0] if tensors else None
        group = -1
        if first is not None and parent is not None and any(True for _ in module.parameters()):
            if parent.last_input is first:
                group = parent.last_group
            parent.last_input = first
        if group < 0:
            group, self.num_groups = self.num_groups, self.num_groups + 1
        if parent is not None:
            parent.last_group = group if first is parent.last_input else parent.last_group
        key = id(module)
        if key not in self:
            self[key] = ModuleCall(module, len(self), list(first.shape) if first is not None else [], group)
        self[key].num_calls += 1


@dataclass(slots=True)
class RootCall:
    """First call of a model: its inputs and outputs."""

    module: torch.nn.Module
    inputs: list[torch.Tensor]
    input_shapes: list[list[int]]
    signature: Any
    outputs: list[torch.Tensor] = field(default_factory=list)
    result: Any = None
    has_grad: bool = True


def signature(tensors: list[torch.Tensor]) -> Any:
    """What must be equal for two calls of a model to do the same work."""
    return tuple((tuple(t.shape), t.dtype) for t in tensors)


def fields_of(result: Any) -> list[Any]:
    """Values of a mapping or of an object with attributes, for results that are neither tensors nor tuples."""
    if isinstance(result, dict):
        return list(result.values())
    return list(getattr(result, "__dict__", {}).values())


def all_modules() -> list[torch.nn.Module]:
    """Every module in memory."""
    found = []
    for thing in gc.get_objects():
        try:
            if isinstance(thing, torch.nn.Module):
                found.append(thing)
        except ReferenceError:
            continue
    return found
