"""What a script reads out of tensors that have no values: known small ones, stand-ins otherwise, and never an exception."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from advisor.profiling.world import MAX_INTEGER_VALUES, World

_ROUTES = ("aten::topk", "aten::argmax", "aten::max", "aten::min", "aten::argmin", "aten::sort", "aten::argsort", "aten::multinomial")
_USUALLY_TRUE = ("aten::all", "aten::_is_all_true", "aten::isfinite", "aten::eq")


def install(world: World) -> None:
    """Patch the ways out of a tensor: tolist, numpy, format. `item`, `int`, `float` and `bool` are answered by the recorder."""
    tensor_class: Any = torch.Tensor
    plain_numpy: Callable[..., Any] = torch.Tensor.numpy
    plain_tolist: Callable[..., Any] = torch.Tensor.tolist
    plain_array: Callable[..., Any] = torch.Tensor.__array__

    def outside(plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self, FakeTensor):
                return plain(self, *args, **kwargs)
            values = world.real_values(self)
            with unset_fake_temporarily():
                return plain(values, *args, **kwargs)

        return read

    def formatted(self: torch.Tensor, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, "")

    plain_deepcopy: Callable[..., Any] = torch.Tensor.__deepcopy__

    def deepcopied(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        if not isinstance(self, FakeTensor) or id(self) in memo:
            return memo.get(id(self)) if id(self) in memo else plain_deepcopy(self, memo)
        with torch.no_grad():
            copy: Any = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        elif self.requires_grad:
            copy.requires_grad_()
        world.set_device(copy, world.device_of(self))
        memo[id(self)] = copy
        return copy

    fake_class: Any = FakeTensor
    tensor_class.__deepcopy__ = deepcopied
    tensor_class.numpy = outside(plain_numpy)
    tensor_class.__array__ = outside(plain_array)
    tensor_class.tolist = fake_class.tolist = outside(plain_tolist)
    tensor_class.__format__ = formatted


def tensors_in(values: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors among arguments or results, in order, lists and tuples opened."""
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            tensors_in(value, found)
    return found


def keep(
    world: World, func: Any, args: Any, kwargs: dict[str, Any], *, ins: list[torch.Tensor], outs: list[torch.Tensor], mutates: bool
) -> None:
    """Work the values of a small result out of the values of its arguments, where all are known."""
    if not outs and not mutates:
        return
    known = all(world.is_small(t) for t in outs) and all(world.value_of(t) is not None for t in ins)
    if known:
        try:
            results = tensors_in([run(world, func, args, kwargs)], [])
        except (RuntimeError, NotImplementedError, ValueError, IndexError):
            known = False
        else:
            for out, result in zip(outs, results, strict=False):
                if isinstance(out, FakeTensor):
                    world.set_value(out, result)
    if known:
        return
    if func._schema.name in _ROUTES and ins and ins[0].numel() <= MAX_INTEGER_VALUES:
        _route(world, func, args, kwargs, outs)
    for t in ins[:1] if mutates else ():
        world.set_value(t, None)
    if len(outs) == 1 and outs[0].dtype == torch.bool and outs[0].dim() == 0:
        with unset_fake_temporarily():  # loops that run while anything is wrong must end, checks that all is well must pass
            is_not_infinite = func._schema.name == "aten::ne" and args[1] == math.inf  # half of isfinite()
            world.set_value(outs[0], torch.tensor(is_not_infinite or func._schema.name in _USUALLY_TRUE))


def _route(world: World, func: Any, args: Any, kwargs: dict[str, Any], outs: list[torch.Tensor]) -> None:
    """Indices chosen by unknown scores: those that random scores would choose, so that work is spread evenly over experts."""
    with unset_fake_temporarily(), torch.no_grad():
        results = tensors_in([func(torch.rand(tuple(args[0].shape)), *args[1:], **kwargs)], [])
    for out, result in zip(outs, results, strict=False):
        if not out.dtype.is_floating_point and isinstance(out, FakeTensor):
            world.set_value(out, result)


def guess(world: World, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operator on made-up values: half of a mask is true, other values are counted up from 0."""

    def made_up(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(made_up(v) for v in value)
        if not isinstance(value, torch.Tensor):
            return value
        known = world.value_of(value)
        if known is not None:
            return known
        counted = torch.arange(value.numel()).reshape(tuple(value.shape))
        return counted % 2 == 0 if value.dtype == torch.bool else counted.to(value.dtype)

    with unset_fake_temporarily(), torch.no_grad():
        return func(*[made_up(a) for a in args], **{k: made_up(v) for k, v in kwargs.items()})


def as_fake(world: World, real: Any) -> Any:
    """Real results as fake tensors that remember their values."""
    if isinstance(real, (list, tuple)):
        return type(real)(as_fake(world, r) for r in real)
    if not isinstance(real, torch.Tensor):
        return real
    out = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
    world.set_value(out, real)
    return out


def run(world: World, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operator on the known values of its arguments."""
    with unset_fake_temporarily(), torch.no_grad():
        return func(*_values(world, args), **{k: _values(world, [v])[0] for k, v in kwargs.items()})


def _values(world: World, args: Any) -> list[Any]:
    out: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            out.append(world.value_of(arg))
        elif isinstance(arg, (list, tuple)):
            out.append(type(arg)(_values(world, arg)) if type(arg) in (list, tuple) else arg)
        else:
            out.append(arg)
    return out
