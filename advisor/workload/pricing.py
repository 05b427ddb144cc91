"""Operators as priced shapes at one sample: entries of an OpTable.

    product      m x k by k x n, `batch` of them;               2 m n k flops each
    convolution  implicit product: output positions x output channels per group x (input channels per group x kernel)
    attention    m queries, n keys, head size k, `batch` heads;  forward 4 m n k flops (two products), backward 10 (five)
    recurrent    one product for all inputs, and per time step one that waits for the step before
    the rest     bytes read and written

The dimension that grows with the batch is divided by the traced batch. Weights count as fixed bytes, activations per sample.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from advisor.workload.assign import LocalOp
from advisor.workload.gemms import BATCHED_PRODUCTS, Product
from advisor.workload.kernels import gpu_kernels
from advisor.workload.records import Op, Shape, num_elements

#: Batch normalisation goes over its maps twice, for the statistics and for the result: 2 reads and 1 write forward, 4 and 1 backward, where
#: a count of operands says 1 and 1, and 2 and 1.
_BATCH_NORM_PASSES = {"forward": 3 / 2, "backward": 5 / 3}
_RECURRENT_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu", "mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
_CONVOLUTIONS = ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "convolution_overrideable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One row of an OpTable, names instead of indices. Sizes at one sample."""

    kind: str
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    batch: float = 1.0
    batch_dim: str = "none"
    work_share: float = 1.0
    bytes_per_sample: float = 0.0
    bytes_fixed: float = 0.0
    num_kernels: float = 1.0
    out_side: str = ""  # sides of the weight, for tensor parallelism
    in_side: str = ""
    is_causal: bool = False  # `work_share` leaves out what the mask hides


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """What is the same for all operators of a profile."""

    batch_size: int
    weight_shapes: frozenset[Shape]  # of the model's parameters: tensors of these shapes do not grow with the batch
    byte_scale: dict[str, float]  # planned over traced bytes, by traced dtype
    masks_are_causal: bool = False  # a square mask given to attention hides later positions


def flops_of(entry: Entry, phase: str) -> float:
    """Flops of one entry at one sample, as the cost models count them."""
    factor = {"gemm": 2.0, "convolution": 2.0, "attention": 10.0 if phase == "backward" else 4.0}.get(entry.kind, 0.0)
    return factor * entry.m * entry.n * entry.k * entry.batch * entry.work_share


def entries(local: LocalOp, product: Product | None, pricing: Pricing) -> list[Entry]:
    """Priced shapes of one operator of a mean repeat.

    Args:
        local: the operator; `share` scales its work, bytes and kernels.
        product: its sides if it is a matrix product.
        pricing: batch and byte scales.
    """
    op = local.op
    found = _shapes(local, product, pricing)
    if found and op.flops > 0 and found[0].kind != "attention":
        counted = sum(flops_of(e, op.phase) for e in found) * pricing.batch_size
        if abs(counted - op.flops) > 1e-9 * op.flops and counted > 0:
            found = [dataclasses.replace(e, k=e.k * op.flops / counted) for e in found]
    if not found:
        found = [_by_flops(local, pricing.batch_size) if op.flops > 0 else Entry(kind="memory")]
    per_sample, fixed = moved_bytes(local, product, pricing)
    kernels = gpu_kernels(op.name, op.num_kernels)
    scale = local.share / len(found)
    return [
        dataclasses.replace(
            e,
            work_share=e.work_share * local.share,
            bytes_per_sample=per_sample * scale,
            bytes_fixed=fixed * scale,
            num_kernels=kernels * scale,
        )
        for e in found
    ]


def _shapes(local: LocalOp, product: Product | None, pricing: Pricing) -> list[Entry]:
    op, batch_size = local.op, pricing.batch_size
    if product is not None:
        return [_product_entry(local, product, batch_size)]
    if op.name in _CONVOLUTIONS and op.outputs:
        return _convolution(op.inputs[0], op.inputs[1], op.outputs[0], batch_size)
    if op.name == "convolution_backward":
        return _convolution_backward(op.inputs, op.outputs, batch_size)
    if op.op_class == "attention" and "attention" in op.name:
        return _attention(local, pricing)
    if op.name.removesuffix("_backward") in _RECURRENT_LAYERS:
        return _recurrent(local, batch_size)
    return []


def _product_entry(local: LocalOp, p: Product, batch_size: int) -> Entry:
    dim = _batch_dim(local, p, batch_size)
    m, n, k, batch = (size / batch_size if dim == name else size for name, size in (("m", p.m), ("n", p.n), ("k", p.k), ("batch", p.batch)))
    return Entry(kind="gemm", m=m, n=n, k=k, batch=batch, batch_dim=dim, out_side=p.out_side, in_side=p.in_side)


def _batch_dim(local: LocalOp, p: Product, batch_size: int) -> str:
    if p.role:
        return "k" if p.role == "weight-gradient" else "m"
    if local.weight:  # a weight transformed on its own
        return "none" if len(local.op.inputs) < 2 else "m"
    if local.op.name in BATCHED_PRODUCTS and p.batch % batch_size == 0:
        return "batch"
    for dim, size in (("m", p.m), ("k", p.k), ("n", p.n)):
        if size % batch_size == 0:
            return dim
    return "m"


def _convolution(x: Shape, weight: Shape, y: Shape, batch_size: int) -> list[Entry]:
    """Forward: output positions by output channels by (input channels x kernel), per group. Transposed ones swap positions."""
    groups, in_channels, out_channels, positions = _conv_sides(x, weight, y)
    kernel = num_elements(weight[2:])
    rows = positions * y[0] / batch_size
    return [Entry(kind="convolution", m=rows, n=out_channels, k=in_channels * kernel, batch=groups, batch_dim="m")]


def _conv_sides(x: Shape, weight: Shape, y: Shape) -> tuple[float, float, float, float]:
    """(groups, input channels per group, output channels per group, positions that meet the kernel)."""
    if weight[0] == y[1] and x[1] % weight[1] == 0:
        groups = x[1] // weight[1]
        return float(groups), float(weight[1]), y[1] / groups, num_elements(y[2:])
    groups = max(y[1] // weight[1], 1)  # transposed: weight is (in, out per group, ...)
    return float(groups), x[1] / groups, float(weight[1]), num_elements(x[2:])


def _convolution_backward(inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], batch_size: int) -> list[Entry]:
    """Input and weight gradient, whichever were computed; each does the forward's flops.

    The input gradient has input positions as rows; with a stride, each meets only a share of the kernel.
    """
    if len(inputs) < 3:
        return []
    gy, x, weight = inputs[0], inputs[1], inputs[2]
    groups, in_channels, out_channels, positions = _conv_sides(x, weight, gy)
    kernel, in_positions = num_elements(weight[2:]), num_elements(x[2:])
    found = []
    samples = x[0] / batch_size
    if x in outputs:
        found.append(Entry(kind="convolution", m=in_positions * samples, n=in_channels, k=out_channels * kernel * positions / in_positions,
                           batch=groups, batch_dim="m"))  # fmt: skip
    if weight in outputs:
        found.append(Entry(kind="convolution", m=out_channels, n=in_channels * kernel, k=positions * samples, batch=groups, batch_dim="k"))
    return found


def attention_sides(op: Op) -> tuple[Shape, Shape] | None:
    """(queries, keys) of fused attention as (batch, heads, positions, head size); None if the arguments are not of that form.

    Forward, the result has the queries' positions; backward, the first two results are their gradients. Masks may come before them.
    """
    four = [s for s in op.inputs if len(s) == 4]
    out = [s for s in op.outputs if len(s) == 4]
    if len(four) < 2:
        return None
    if op.phase == "backward":
        query, key = (out[0], out[1]) if len(out) > 1 else (four[1], four[2]) if len(four) > 2 else (four[0], four[1])
    else:
        at = next((i for i, s in enumerate(four[:-1]) if out and s[:3] == out[0][:3] and s[3] == four[i + 1][3]), 0)
        query, key = four[at], four[at + 1]
    if op.name.startswith("_flash_attention"):  # heads come after positions
        query, key = ((s[0], s[2], s[1], s[3]) for s in (query, key))
    return query, key


def _attention(local: LocalOp, pricing: Pricing) -> list[Entry]:
    sides = attention_sides(local.op)
    if sides is None:
        return []
    query, key = sides
    square = query[2] == key[2]
    masked = pricing.masks_are_causal and any(len(s) == 4 and s[1] == 1 and s[2:] == (query[2], key[2]) for s in local.op.inputs)
    share = 0.5 if square and (local.op.causal or masked) else 1.0
    value = next((s for s in local.op.inputs[::-1] if s[:3] == key[:3] and len(s) == 4), key)
    heads, size = query[0] * query[1] / pricing.batch_size, (query[3] + value[3]) / 2
    return [Entry(kind="attention", m=query[2], n=key[2], k=size, batch=heads, batch_dim="batch", work_share=share, is_causal=share < 1)]


def _recurrent(local: LocalOp, batch_size: int) -> list[Entry]:
    """A whole recurrent layer (or several): weights (gates x inputs) and (gates x hidden) in turn.

    The product with the inputs covers all time steps at once; the one with the hidden state runs once per step, after the step before.
    """
    op = local.op
    sequence = next((s for s in op.inputs if len(s) == 3), None)
    weights = [s for s in op.inputs if len(s) == 2]
    if op.name.startswith("mkldnn"):
        weights = weights[:2]
    if sequence is None or not weights:
        return []
    gradients = 2 if op.phase == "backward" else 1
    steps = max(op.num_kernels / (len(weights) * gradients), 1.0) if op.num_kernels > 2 * len(weights) else float(sequence[0])
    positions = sequence[0] * sequence[1] / batch_size
    found = []
    for i, (gates, inputs) in enumerate(weights):
        count = steps if i % 2 else 1.0
        if op.phase == "backward":
            found.append(Entry(kind="gemm", m=positions / count, n=inputs, k=gates, batch=count, batch_dim="m"))
            found.append(Entry(kind="gemm", m=gates, n=inputs, k=positions, batch_dim="k"))
        else:
            found.append(Entry(kind="gemm", m=positions / count, n=gates, k=inputs, batch=count, batch_dim="m"))
    return found


def _by_flops(local: LocalOp, batch_size: int) -> Entry:
    """An operator that no shape rule knows but that does flops: rows and columns of its output, the inner side from its flops."""
    out = max(local.op.outputs, key=num_elements, default=(1,)) or (1,)
    rows, columns = num_elements(out[:-1]) or 1.0, float(out[-1]) or 1.0
    return Entry(kind="gemm", m=rows / batch_size, n=columns, k=local.op.flops / (2.0 * rows * columns), batch_dim="m")


def moved_bytes(local: LocalOp, product: Product | None, pricing: Pricing) -> tuple[float, float]:
    """(bytes per sample, fixed bytes) at the planned precision."""
    op = local.op
    total = (op.read_bytes + op.written_bytes) * pricing.byte_scale.get(op.dtype, 1.0)
    if "batch_norm" in op.name:
        total *= _BATCH_NORM_PASSES.get(op.phase, 1.0)
    if product is not None and product.role:
        weight = product.m * product.n if product.role == "weight-gradient" else product.k * product.n
        share = weight / (product.m * product.k + product.k * product.n + product.m * product.n)
        return total * (1 - share) / pricing.batch_size, total * share
    if op.name == "embedding":  # reads the rows it returns, not the table
        return 2 * op.written_bytes * pricing.byte_scale.get(op.dtype, 1.0) / pricing.batch_size, 0.0
    tensors = [s for s in (*op.inputs, *op.outputs) if s]
    elements = sum(map(num_elements, tensors))
    if elements == 0:
        return 0.0, total
    share = sum(num_elements(s) for s in tensors if _is_fixed(s, local, pricing)) / elements
    return total * (1 - share) / pricing.batch_size, total * share


def _is_fixed(shape: Shape, local: LocalOp, pricing: Pricing) -> bool:
    if shape in pricing.weight_shapes:
        return len(shape) != 2 or bool(local.weight) or local.op.phase == "backward" or shape[0] % pricing.batch_size != 0
    return num_elements(shape) < pricing.batch_size
