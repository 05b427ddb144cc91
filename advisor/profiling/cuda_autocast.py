"""Autocast of CUDA for tensors that stand for CUDA's: more operators run in fp32 there than on the CPU.

Softmax, norms and sums of a 16-bit tensor give fp32 under CUDA's autocast, 16 bits under the CPU's, and what follows moves twice the bytes.
The operators are those of torch's aten/src/ATen/autocast_mode.h (AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

#: Operators whose 16-bit operands are cast to fp32.
_CAST = (
    "layer_norm", "native_layer_norm", "group_norm", "rms_norm", "exp", "expm1", "log", "log1p", "log2", "log10", "pow.Tensor_Scalar",
    "pow.Tensor_Tensor", "pow.Scalar", "reciprocal", "rsqrt", "softplus", "binary_cross_entropy_with_logits", "smooth_l1_loss", "l1_loss",
    "kl_div", "mse_loss", "nll_loss", "nll_loss2d", "cosine_similarity", "cdist", "renorm", "logsumexp", "poisson_nll_loss",
    "upsample_nearest2d.vec", "upsample_nearest3d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec", "upsample_bicubic2d.vec",
)  # fmt: skip
#: Operators that read 16 bits and write fp32 where their caller names no dtype.
_TO_FP32 = ("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum", "prod", "prod.dim_int")
_KEY = torch._C.DispatchKey.AutocastCPU
_SHORT = (torch.float16, torch.bfloat16)


def install() -> Any:
    """Give the CPU's autocast, which fake tensors follow, the operators that it lacks of CUDA's; until the returned library's `_destroy`."""
    library: Any = torch.library.Library("aten", "IMPL", "AutocastCPU")  # type: ignore[no-untyped-call]
    for names, make in ((_CAST, _cast), (_TO_FP32, _to_fp32)):
        for name in names:
            if _exists(name) and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
                library.impl(name, make(_overload(name)))
    return library


def _exists(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel(f"aten::{name}"))


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
        return call(*args, **kwargs)


def _cast(overload: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        def wide(value: Any) -> Any:
            return value.float() if isinstance(value, torch.Tensor) and value.dtype in _SHORT else value

        return _without_autocast(lambda *a, **k: overload(*map(wide, a), **{n: wide(v) for n, v in k.items()}), args, kwargs)

    return kernel


def _to_fp32(overload: Any) -> Callable[..., Any]:
    softmax = {"aten::softmax": torch.ops.aten._softmax.default, "aten::log_softmax": torch.ops.aten._log_softmax.default}
    fused = softmax.get(overload._schema.name)

    def kernel(x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if fused is not None and len(args) > 1:
            args, dtype = args[:1], args[1]
        if x.dtype not in _SHORT or dtype is not None:
            return _without_autocast(overload, (x, *args), {**kwargs, "dtype": dtype})
        if fused is not None and x.dtype == torch.float16 and isinstance(x, FakeTensor):  # one kernel on CUDA, for fp16 alone
            return _without_autocast(fused, (x, *args, True), {})
        return _without_autocast(overload, (x, *args), {**kwargs, "dtype": torch.float32})

    return kernel
