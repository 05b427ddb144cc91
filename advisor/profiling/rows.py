"""A recorded operator call, before its names are known."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.int64: "int64", torch.int32: "int32",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a dtype: "bf16", "int64", ..."""
    return _DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


@dataclass(slots=True)
class Row:
    """One operator call; names of modules and weights are found when the step is over."""

    phase: str
    operator: str
    module: torch.nn.Module | None
    input_shapes: list[list[int]] = field(default_factory=list)
    output_shapes: list[list[int]] = field(default_factory=list)
    dtype: str = ""
    weight: torch.Tensor | None = None
    flops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    saved_bytes: int = 0
    causal: int = 0
    num_kernels: int = 1
    device: str = "cpu"
    copy_from: str = ""
    copy_to: str = ""
    forward: Row | None = None  # of a backward call
    evaluated: torch.nn.Module | None = None  # model that was called without gradients
    is_folded: bool = False  # several calls in one row
