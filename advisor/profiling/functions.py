"""Runs the step of a script that declares build_model(), make_batch(), loss_fn() and build_optimizer(), any but the first two absent."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from advisor.profiling import values

DEFAULT_BATCH_SIZE = 8


def train(namespace: Mapping[str, Any], entry: str, batch_size: int | None, *, num_steps: int, device: str) -> None:
    """Build the model and take steps with it, each with a fresh batch."""
    model = namespace[entry]()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{entry}() returned {type(model).__name__}, not a torch.nn.Module")
    model.to(device)
    model.train()
    build_optimizer = namespace.get("build_optimizer")
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = build_optimizer(model) if build_optimizer is not None else torch.optim.AdamW(trainable, lr=1e-4)
    loss_fn: Callable[[Any, Any], torch.Tensor] = namespace.get("loss_fn") or default_loss
    for _ in range(num_steps):
        batch = make_batch(namespace["make_batch"], batch_size)
        batch = tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, batch)
        loss = loss_fn(model, batch)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def make_batch(function: Callable[..., Any], batch_size: int | None) -> Any:
    """One batch: of the size asked for, else of the function's own default."""
    takes = inspect.signature(function).parameters
    if not takes:
        return function()
    first = next(iter(takes.values()))
    if batch_size is None and first.default is not inspect.Parameter.empty:
        return function()
    return function(batch_size or DEFAULT_BATCH_SIZE)


def default_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The output's own loss where it has one, else the mean of its floating-point outputs."""
    if isinstance(batch, Mapping):
        out = model(**batch)
    elif isinstance(batch, (list, tuple)):
        out = model(*batch)
    else:
        out = model(batch)
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    outs = values.tensors_in([out], []) or values.tensors_in(getattr(out, "__dict__", {}).values(), [])
    floats = [t.float().mean() for t in outs if t.dtype.is_floating_point]
    if not floats:
        raise TypeError("the model returned no floating-point tensor to take a loss of; declare loss_fn(model, batch)")
    return torch.stack(floats).sum() if len(floats) > 1 else floats[0]
