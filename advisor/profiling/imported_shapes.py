"""Flops and bytes of an operator from the shapes that a trace recorded (`record_shapes=True`); zeros where it did not."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

#: Trace's names of element types -> dtype as in StepProfile, and bytes.
DTYPES: Mapping[str, tuple[str, int]] = {
    "float": ("fp32", 4), "double": ("fp64", 8), "c10::half": ("fp16", 2), "half": ("fp16", 2), "c10::bfloat16": ("bf16", 2),
    "bfloat16": ("bf16", 2), "long": ("int64", 8), "long int": ("int64", 8), "int": ("int32", 4), "short": ("int16", 2),
    "unsigned char": ("uint8", 1), "byte": ("uint8", 1), "char": ("int8", 1), "signed char": ("int8", 1), "bool": ("bool", 1),
    "float8": ("fp8", 1), "c10::float8_e4m3fn": ("fp8", 1), "c10::float8_e5m2": ("fp8", 1), "float8_e4m3fn": ("fp8", 1),
}  # fmt: skip
_CONVOLUTIONS = ("aten::cudnn_convolution", "aten::miopen_convolution", "aten::convolution", "aten::_convolution", "aten::mkldnn_convolution",
                 "aten::convolution_overrideable", "aten::conv2d", "aten::conv1d", "aten::conv3d")  # fmt: skip
Shape = list[int]


def input_shapes(args: Mapping[str, Any]) -> list[Shape]:
    """Shapes of the arguments in order, [] for one that is no tensor; [] where the trace has none."""
    raw = _literal(args.get("Input Dims", args.get("Input dims")))
    if not isinstance(raw, list):
        return []
    return [[int(d) for d in dims] if isinstance(dims, list) and all(isinstance(d, int) for d in dims) else [] for dims in raw]


def input_dtype(args: Mapping[str, Any]) -> str:
    """Dtype of the first floating tensor, else of the first tensor, "" if unknown."""
    known = [DTYPES[t][0] for t in _types(args) if t in DTYPES]
    return next((d for d in known if d.startswith(("fp", "bf"))), known[0] if known else "")


def operator_flops(name: str, args: Mapping[str, Any]) -> float:
    """Multiply-add counted as 2: matrix products, convolutions (forward and backward) and attention; else 0.

    Attention is counted in full (traces don't tell causal masks), its backward as 2.5 times the forward (five products).
    """
    shapes = input_shapes(args)
    plain = name.removesuffix("_backward")
    tensors = [s for s in shapes if s]
    if name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", "aten::_addmm_activation", "aten::addmm_"):
        pair = tensors[-2:] if name in ("aten::mm", "aten::bmm") else [s for s in shapes if len(s) >= 2][-2:]
        pair = tensors[:2] if name == "aten::_scaled_mm" else pair
        return 2.0 * prod(pair[0]) * pair[1][-1] if len(pair) == 2 and pair[0] and pair[0][-1] == pair[1][-2] else 0.0
    if name == "aten::linear" and len(tensors) >= 2 and tensors[0][-1] == tensors[1][-1]:
        return 2.0 * prod(tensors[0]) * prod(tensors[1][:-1])
    if plain in _CONVOLUTIONS and len(tensors) >= 2:
        return _convolution_flops(name, shapes, args)
    if "attention" in plain and plain.startswith(("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention")):
        return _attention_flops(name, tensors)
    return 0.0


def input_bytes(args: Mapping[str, Any]) -> int:
    """Bytes of the tensor arguments."""
    types = _types(args)
    return sum(prod(s) * DTYPES.get(t, ("", 0))[1] for s, t in zip(input_shapes(args), types, strict=False) if s)


def output_bytes(name: str, args: Mapping[str, Any]) -> int:
    """Bytes written, as far as the inputs tell: exact for products, else taken as those of the largest tensor argument."""
    shapes, size = input_shapes(args), DTYPES.get(next((t for t in _types(args) if t in DTYPES), ""), ("", 0))[1]
    tensors = [s for s in shapes if s]
    if not tensors:
        return 0
    if name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm") and len(tensors) >= 2:
        left, right = tensors[-2:]
        return prod(left[:-1]) * right[-1] * size
    if name in ("aten::sum", "aten::mean", "aten::max", "aten::min", "aten::linalg_vector_norm"):
        return 0
    return max(prod(s) for s in tensors) * size


def _convolution_flops(name: str, shapes: Sequence[Shape], args: Mapping[str, Any]) -> float:
    """2 x output positions x weight elements x batch; backward has up to two such products. 0 where the stride isn't recorded."""
    backward = name.endswith("_backward")
    tensors = [s for s in shapes if len(s) >= 3]
    if backward:
        if len(tensors) < 3:
            return 0.0
        grad, _, weight = tensors[:3]
        masks = [v for v in _concrete(args) if isinstance(v, list) and len(v) == 3 and isinstance(v[0], bool)]
        num_products = sum(masks[-1][:2]) if masks else 2  # the first layer of a network has no gradient of its input
        return 2.0 * num_products * float(grad[0] * prod(grad[2:]) * prod(weight))
    if len(tensors) < 2:
        return 0.0
    image, weight = tensors[:2]
    lists = [v for v in _concrete(args) if isinstance(v, list) and v and all(isinstance(i, int) for i in v)]
    if len(lists) < 2:
        return 0.0
    padding_first = name in ("aten::cudnn_convolution", "aten::miopen_convolution", "aten::mkldnn_convolution")
    stride, padding = (lists[1], lists[0]) if padding_first else (lists[0], lists[1])
    dims = len(image) - 2
    stride, padding = (v * dims if len(v) == 1 else v for v in (stride, padding))
    dilation = (lists[2] * dims if len(lists[2]) == 1 else lists[2]) if len(lists) > 2 else [1] * dims
    if min(len(stride), len(padding), len(dilation)) < dims or 0 in stride:
        return 0.0
    outputs = [(image[2 + i] + 2 * padding[i] - dilation[i] * (weight[2 + i] - 1) - 1) // stride[i] + 1 for i in range(dims)]
    return 2.0 * float(image[0] * prod(outputs) * prod(weight))


def _attention_flops(name: str, tensors: Sequence[Shape]) -> float:
    """Two products of query positions x key positions x head size per head; backward five."""
    backward = "_backward" in name
    start = 1 if backward else 0
    if len(tensors) < start + 2 or len(tensors[start]) != 4 or len(tensors[start + 1]) != 4:
        return 0.0
    query, key = tensors[start], tensors[start + 1]
    heads_last = name.startswith(("aten::_flash_attention", "aten::_efficient_attention"))  # batch, positions, heads, size
    positions, keys = (1, key[1]) if heads_last else (2, key[2])
    heads = query[2] if heads_last else query[1]
    return (10.0 if backward else 4.0) * float(query[0] * heads * query[positions] * keys * query[3])


def _types(args: Mapping[str, Any]) -> list[str]:
    raw = _literal(args.get("Input type"))
    return [str(t).strip().lower() for t in raw] if isinstance(raw, list) else []


def _concrete(args: Mapping[str, Any]) -> list[Any]:
    """Values of the arguments that are no tensors, as far as the trace has them."""
    raw = _literal(args.get("Concrete Inputs"))
    return [_literal(value) for value in raw] if isinstance(raw, list) else []


def _literal(value: Any) -> Any:
    """A value that some versions of kineto write as text, e.g. "[3, 224]"."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value) if value.startswith(("[", "(")) else value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value
