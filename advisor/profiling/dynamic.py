"""Operators whose result has a shape that depends on values, on tensors of which only some have values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from advisor.profiling import values
from advisor.profiling.world import World


def result(world: World, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """What the operator gives where the values that decide its shape are known, else None."""
    ins = values.tensors_in([*args, *kwargs.values()], [])
    if all(world.value_of(t) is not None for t in ins):
        return values.as_fake(world, values.run(world, func, args, kwargs))
    own = _OWN.get(name)
    deciding = values.tensors_in(args[1:], [])
    if own is None or any(world.value_of(t) is None for t in deciding):
        return None
    return own(world, func, args)


def _index(world: World, func: Any, args: Any) -> Any:
    """By mask: by the places at which the mask is true."""
    places: list[torch.Tensor | None] = []
    for index in args[1]:
        known = world.value_of(index) if index is not None else None
        if known is None or known.dtype not in (torch.bool, torch.uint8):
            places.append(index)
            continue
        with unset_fake_temporarily():
            found = known.nonzero().unbind(1)
        places += [values.as_fake(world, place) for place in found]
    return func(args[0], places)


def _masked_select(world: World, _func: Any, args: Any) -> Any:
    mask = world.value_of(args[1])
    shape = torch.empty_like(args[0], dtype=torch.bool).logical_and(args[1]).shape
    with unset_fake_temporarily():
        count = int(mask.expand(tuple(shape)).sum()) if mask is not None else 0
    return torch.empty(count, dtype=args[0].dtype)


def _ctc_loss(world: World, func: Any, args: Any) -> Any:
    with unset_fake_temporarily(), torch.no_grad():
        known = [world.value_of(a) if isinstance(a, torch.Tensor) else a for a in args[1:]]
        real = func(torch.zeros(tuple(args[0].shape), dtype=args[0].dtype), *known)
    return tuple(torch.empty_like(r, device="cpu") if isinstance(r, torch.Tensor) else r for r in values.as_fake(world, real))


_OWN: dict[str, Callable[[World, Any, Any], Any]] = {
    "aten.index": _index,
    "aten.masked_select": _masked_select,
    "aten._ctc_loss": _ctc_loss,
}
