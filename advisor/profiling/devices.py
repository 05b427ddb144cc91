"""Patches of torch in the child: every CUDA device is answered by the CPU and remembered per tensor (see `world.py`)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from advisor.profiling import cuda_api, cuda_autocast
from advisor.profiling.world import CPU, World

_FACTORIES = (
    "empty", "empty_permuted", "empty_strided", "ones", "arange", "bartlett_window", "blackman_window", "eye", "full", "hamming_window",
    "hann_window", "kaiser_window", "linspace", "logspace", "rand", "randn", "randint", "randperm", "range", "sparse_coo_tensor",
    "sparse_csr_tensor", "tril_indices", "triu_indices", "zeros", "asarray", "tensor", "as_tensor", "scalar_tensor", "normal",
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
)  # fmt: skip
_NEW = ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "new_empty_strided")


def install(world: World) -> None:
    """Patch torch for this process; nothing is undone, the process ends with the script."""
    _patch_factories(world)
    _patch_tensor(world)
    _patch_module(world)
    _patch_grouping(world)
    _patch_autocast(world)
    cuda_api.install(world)


def _patch_factories(world: World) -> None:
    context: Any = __import__("torch.utils._device", fromlist=["DeviceContext"])
    constructors = set(context._device_constructors())
    for name in _FACTORIES:
        setattr(torch, name, _factory(world, getattr(torch, name)))
    for name in _NEW:
        setattr(torch.Tensor, name, _factory(world, getattr(torch.Tensor, name)))

    def with_default_device(self: Any, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in constructors or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        return _make(world, func, self.device, args, kwargs)

    context.DeviceContext.__torch_function__ = with_default_device


def _factory(world: World, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        device = kwargs.get("device")
        if device is None:
            return original(*args, **kwargs)
        return _make(world, original, device, args, kwargs)

    return make


def _make(world: World, original: Callable[..., Any], device: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    intended = world.device(device)
    kwargs["device"] = world.real_device(device)
    if intended is None or intended.type != "cuda":
        return original(*args, **kwargs)
    before, world.factory_device = world.factory_device, intended
    try:
        out = original(*args, **kwargs)
    finally:
        world.factory_device = before
    if isinstance(out, torch.Tensor):
        world.set_device(out, intended)
    return out


class _IntendedCopy(torch.autograd.Function):
    """A copy between two devices that exist only by intention; its gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, target: torch.device, dtype: torch.dtype, world: World) -> torch.Tensor:
        ctx.source, ctx.dtype, ctx.world = world.device_of(tensor), tensor.dtype, world
        return _copied(world, tensor, target, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _copied(ctx.world, grads[0], ctx.source, ctx.dtype), None, None, None


def _copied(world: World, tensor: torch.Tensor, target: torch.device, dtype: torch.dtype) -> torch.Tensor:
    source = world.device_of(tensor)
    world.is_copying = True  # one row, not one more for the operator that stands in
    try:
        out: torch.Tensor = torch.ops.aten._to_copy.default(tensor.detach(), dtype=dtype)
    finally:
        world.is_copying = False
    world.set_device(out, target)
    if world.on_copy is not None:
        world.on_copy(tensor, out, source, target)
    return out


def move(world: World, tensor: torch.Tensor, device: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`tensor.to(device, dtype)` between intended devices: a copy with a gradient where they differ."""
    target = world.device(device) or CPU
    if world.device_of(tensor) == target:
        return tensor if dtype in (None, tensor.dtype) else _plain_to(tensor, dtype)
    if isinstance(tensor, torch.nn.Parameter) and not world.fake and not torch.is_grad_enabled():
        world.set_device(tensor, target)  # no second copy of a real model
        return tensor if dtype in (None, tensor.dtype) else _plain_to(tensor, dtype)
    if tensor.requires_grad and torch.is_grad_enabled():
        copy: Any = _IntendedCopy
        moved: torch.Tensor = copy.apply(tensor, target, dtype or tensor.dtype, world)
    else:
        with torch.no_grad():
            moved = _copied(world, tensor, target, dtype or tensor.dtype)
    world.set_device(moved, target)
    return moved


_plain_to: Callable[..., torch.Tensor] = torch.Tensor.to


def _patch_tensor(world: World) -> None:
    tensor_class: Any = torch.Tensor
    plain_device, plain_is_cuda = tensor_class.device, tensor_class.is_cuda

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        for arg in args[:2]:
            if isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, torch.Tensor):
                device, dtype = arg.device, arg.dtype
            elif not isinstance(arg, bool) and arg is not None:
                device = arg
        other = kwargs.get("other")
        wanted = world.device(other.device if other is not None else device)
        if wanted is None or wanted.type not in ("cuda", "cpu") or (wanted.type == "cpu" and not world.has_label(self)):
            return _plain_to(self, *args, **kwargs)
        return move(world, self, wanted, dtype)

    def device(self: torch.Tensor) -> torch.device:
        if not world.num_inside and world.has_label(self):
            return world.device_of(self)
        result: torch.device = plain_device.__get__(self, type(self))
        return result

    def fake_device(self: Any) -> torch.device:
        if not world.num_inside and world.has_label(self):
            return world.device_of(self)
        return torch.device("meta") if self.fake_mode.in_kernel_invocation else self.fake_device

    def is_cuda(self: torch.Tensor) -> bool:
        return world.has_label(self) or bool(plain_is_cuda.__get__(self, type(self)))

    tensor_class.to = to
    tensor_class.cuda = lambda self, device=None, **_: move(world, self, "cuda" if device is None else device)
    tensor_class.cpu = lambda self, **_: move(world, self, CPU)
    tensor_class.pin_memory = lambda self, *_: self
    tensor_class.is_pinned = lambda _self, *_: False
    tensor_class.record_stream = lambda *_: None
    tensor_class.share_memory_ = lambda self: self
    tensor_class.get_device = lambda self: world.device_of(self).index if world.has_label(self) else -1
    tensor_class.device = property(device)
    tensor_class.is_cuda = property(is_cuda)
    fake_class: Any = FakeTensor
    fake_class.device = property(fake_device, lambda *_: None)


def _patch_grouping(world: World) -> None:
    """Optimizers and clipping group tensors by their intended device."""
    library: Any = torch._C
    plain: Callable[..., dict[Any, Any]] = library._group_tensors_by_device_and_dtype

    def grouped(lists: Any, *args: Any) -> dict[Any, Any]:
        found = {}
        for (device, dtype), (tensors, places) in plain(lists, *args).items():
            first = next((t for group in tensors for t in group if t is not None), None)
            found[(world.device_of(first) if first is not None and world.has_label(first) else device, dtype)] = (tensors, places)
        return found

    library._group_tensors_by_device_and_dtype = grouped


def _patch_module(world: World) -> None:
    depth = 0

    def apply_in_place(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        nonlocal depth
        if depth == 0:
            held = {id(p): p for p in self.parameters() if not world.has_label(p) and not p.is_meta}
            world.host_model_bytes = max(world.host_model_bytes, sum(p.numel() * p.element_size() for p in held.values()))
        depth += 1
        try:
            for child in self.children() if recurse else ():
                child._apply(fn)
        finally:
            depth -= 1
        for name, p in self._parameters.items():
            if p is not None:
                self._parameters[name] = _converted(world, p, fn)
        for name, b in self._buffers.items():
            if b is not None:
                self._buffers[name] = fn(b)
        return self

    module_class: Any = torch.nn.Module
    module_class._apply = apply_in_place

    def module_cuda(self: Any, device: Any = None) -> Any:
        return self._apply(lambda t: t.cuda(device))

    module_class.cuda = module_cuda
    plain_to = torch.nn.Module.to

    def module_to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (world.device(args[0]), *args[1:])
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = world.device(kwargs["device"])
        return plain_to(self, *args, **kwargs)

    module_class.to = module_to


def _converted(world: World, p: torch.nn.Parameter, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Parameter:
    """The same parameter after `fn`: relabelled, or with new data, so that ties and optimizers keep hold of it."""
    with torch.no_grad():
        q = fn(p)
    if q is p:
        return p
    if q.dtype == p.dtype and q.shape == p.shape and q.is_meta == p.is_meta:
        world.set_device(p, world.device_of(q))
        return p
    if q.is_meta == p.is_meta:
        with contextlib.suppress(RuntimeError):
            p.data = q
            world.set_device(p, world.device_of(q))
            return p
    fresh = torch.nn.Parameter(q, p.requires_grad)
    world.set_device(fresh, world.device_of(q))
    return fresh


def _patch_autocast(world: World) -> None:
    """Autocast for "cuda" becomes autocast for "cpu", with CUDA's operators: the dispatch key follows the real device."""
    world.autocast_operators = cuda_autocast.install()
    autocast_class: Any = torch.autocast
    plain_init = autocast_class.__init__

    def init(
        self: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if device_type == "cuda" and dtype is None:
            dtype = torch.float16
        plain_init(self, "cpu" if device_type == "cuda" else device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    autocast_class.__init__ = init
    on_cpu: Callable[[str], str] = lambda device_type: "cpu" if device_type == "cuda" else device_type  # noqa: E731
    for name in ("get_autocast_dtype", "set_autocast_dtype", "set_autocast_enabled"):
        plain = getattr(torch, name)
        setattr(torch, name, lambda device_type, *rest, _plain=plain: _plain(on_cpu(device_type), *rest))
    plain_enabled = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda device_type="cpu": plain_enabled(on_cpu(device_type))
    torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype("cpu")
