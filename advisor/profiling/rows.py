"""A recorded operator call, before its names are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from advisor.profiling.storages import num_bytes

_DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.int64: "int64", torch.int32: "int32",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
}  # fmt: skip

#: Kernels of a multi-tensor launch: at most 320 chunks of 65,536 elements and about 64 tensors each (ATen/native/cuda/MultiTensorApply.cuh).
_CHUNK_ELEMENTS, _CHUNKS_PER_LAUNCH, _TENSORS_PER_LAUNCH = 65536, 320, 64


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


def sum_up_lists(row: Row, args: Any, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> None:
    """A multi-tensor call has one shape per list: the number of its elements."""
    lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)]
    row.input_shapes = [[sum(t.numel() for t in a)] for a in lists]
    elements, tensors = (row.input_shapes[0][0], len(lists[0])) if lists else (0, 1)
    row.output_shapes = [[elements]]
    row.read_bytes = sum(map(num_bytes, ins))
    row.written_bytes = sum(map(num_bytes, outs))
    row.num_kernels = max(1, -(-tensors // _TENSORS_PER_LAUNCH), -(-elements // (_CHUNK_ELEMENTS * _CHUNKS_PER_LAUNCH)))


def dtype_of(outs: list[torch.Tensor], ins: list[torch.Tensor]) -> str:
    for t in (*outs, *ins):
        if t.dtype.is_floating_point:
            return dtype_name(t.dtype)
    first = outs or ins
    return dtype_name(first[0].dtype) if first else ""


def is_causal(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if "is_causal" in kwargs:
        return bool(kwargs["is_causal"])
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal" and i < len(args):
            return bool(args[i])
    return False
