"""Runs the step of a script that declares build_model(), make_batch(), loss_fn() and build_optimizer(), any but the first two absent."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from advisor.profiling import values

DEFAULT_BATCH_SIZE = 8


CONTRACT = (
    "The contract: build_model() returns a torch.nn.Module; make_batch(batch_size) returns a tensor, or a tuple or dict of tensors; "
    "loss_fn(model, batch), if declared, returns a scalar tensor; build_optimizer(model), if declared, returns a torch optimizer."
)


class ContractError(TypeError):
    """One of the declared functions is not what it has to be."""

    hint = CONTRACT


def train(namespace: Mapping[str, Any], entry: str, batch_size: int | None, *, num_steps: int, device: str) -> None:
    """Build the model and take steps with it, each with a fresh batch.

    Raises:
        ContractError: a function takes or returns something else than it has to.
    """
    model = call(namespace, entry, ())
    if not isinstance(model, torch.nn.Module):
        raise ContractError(f"{entry}() must return a torch.nn.Module, and returned {_kind(model)}")
    model.to(device)
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ContractError(f"{entry}() must return a model to train, and none of its parameters requires a gradient")
    optimizer = call(namespace, "build_optimizer", (model,)) if "build_optimizer" in namespace else torch.optim.AdamW(trainable, lr=1e-4)
    if not (callable(getattr(optimizer, "step", None)) and callable(getattr(optimizer, "zero_grad", None))):
        raise ContractError(f"build_optimizer(model) must return a torch optimizer, and returned {_kind(optimizer)}")
    for _ in range(num_steps):
        batch = make_batch(namespace, batch_size)
        batch = tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, batch)
        loss = call(namespace, "loss_fn", (model, batch)) if "loss_fn" in namespace else default_loss(model, batch)
        _check_loss(loss)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def call(namespace: Mapping[str, Any], name: str, arguments: tuple[Any, ...]) -> Any:
    """Call a declared function, if it can be called with these arguments."""
    function = namespace[name]
    if not callable(function):
        raise ContractError(f"{name} must be a function, and is {_kind(function)}")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ContractError(f"{name}() must be a plain function, and is `async def`")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        shown = {"loss_fn": "loss_fn(model, batch)", "build_optimizer": "build_optimizer(model)", "make_batch": "make_batch(batch_size)"}
        raise ContractError(
            f"{shown.get(name, f'{name}()')} can't be called with {len(arguments)} argument{'s' * (len(arguments) != 1)}: {error}"
        ) from None
    except ValueError:
        pass  # no signature to look at
    return function(*arguments)


def make_batch(namespace: Mapping[str, Any], batch_size: int | None) -> Any:
    """One batch: of the size asked for, else of the function's own default."""
    function = namespace["make_batch"]
    takes = list(inspect.signature(function).parameters.values()) if callable(function) else []
    own = not takes or (batch_size is None and takes[0].default is not inspect.Parameter.empty)
    batch = call(namespace, "make_batch", () if own else (batch_size or DEFAULT_BATCH_SIZE,))
    if (
        batch is None
        or isinstance(batch, (str, bytes, bool, int, float))
        or type(batch).__module__ == "numpy"
        or inspect.isgenerator(batch)
    ):
        raise ContractError(f"make_batch(batch_size) must return a tensor, or a tuple or dict of tensors, and returned {_kind(batch)}")
    return batch


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise ContractError(f"loss_fn(model, batch) must return a scalar tensor, and returned {_kind(loss)}")
    if loss.numel() != 1:
        raise ContractError(f"loss_fn(model, batch) must return a scalar tensor, and returned one of shape {list(loss.shape)}")
    if not loss.requires_grad:
        raise ContractError("loss_fn(model, batch) must return a loss that depends on the model's parameters; this one has no gradient")


def _kind(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


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
        raise ContractError("the model returned no floating-point tensor to take a loss of; declare loss_fn(model, batch)")
    return torch.stack(floats).sum() if len(floats) > 1 else floats[0]
