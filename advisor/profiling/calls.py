"""What is kept of a module's call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class ModuleCall:
    """What is known of a module's calls in the recorded micro-batch."""

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
