"""Bytes that a part keeps for its backward pass, per sample: without recomputation, under selective, and the short-lived ones.

Without recomputation: what autograd was seen to keep. Where the script checkpoints, the second forward shows what the first one did not
keep. Selective: every product's and fused attention's output is kept, everything else is computed again from them (torch's
per-operator policy); the score matrix of unfused attention never is. Tensors of the size of the logits are counted in `logits_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from advisor.workload.assign import LocalOp, Part
from advisor.workload.gemms import Product
from advisor.workload.pricing import Pricing, attention_sides, moved_bytes
from advisor.workload.records import Shape, num_elements
from advisor.workload.tensor_parallel import BlockSplit

#: Bytes alive per logit at the loss: fp32 logits (or 16-bit ones and their fp32 copy: 2 + 4), log-softmax 4, gradients 4 (+ 2).
BYTES_PER_LOGIT = 12.0
_PRODUCT_CLASSES = ("matmul", "convolution", "attention", "recurrent")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """Per sample and repeat."""

    kept: dict[str, float] = field(default_factory=dict)  # by "inner", "sequence", "other"
    selective: dict[str, float] = field(default_factory=dict)
    logits: float = 0.0  # of what autograd kept: tensors of logit size, left out of `kept`
    temporary: float = 0.0


def saved_bytes(part: Part, products: dict[int, Product], split: BlockSplit, *, pricing: Pricing, logits: Shape) -> SavedBytes:
    """Bytes kept by one mean repeat.

    Args:
        part: the segment with its operators.
        products: its matrix products.
        split: what tensor parallelism divides.
        pricing: batch and byte scales.
        logits: shape of the class scores, () if none.
    """
    kept = dict.fromkeys(("inner", "sequence", "other"), 0.0)
    selective = dict(kept)
    logit_bytes = 0.0
    byte_scale, batch_size = pricing.byte_scale, pricing.batch_size
    for i, local in enumerate(part.ops):
        if local.op.phase != "forward":
            continue
        where, scale = _where(i, products, split), byte_scale.get(local.op.dtype, 1.0) / batch_size
        if is_logit_sized(local, logits) and i not in products:
            logit_bytes += local.saved_bytes * scale
            continue
        kept[where] += _kept_on_gpu(local, pricing) * scale
        if _is_kept_product(i, local, products):
            result = "sequence" if split.sides.get(products[i].weight if i in products else "") == "in" else where
            result = "inner" if i in products and split.sides.get(products[i].weight) == "out" else result
            selective[result] += local.op.written_bytes * local.share * scale
    for local in part.recomputed:
        kept[_same_place(local, part, products, split)] += _kept_on_gpu(local, pricing) * byte_scale.get(local.op.dtype, 1.0) / batch_size
    return SavedBytes(kept=kept, selective=selective, logits=logit_bytes, temporary=_temporary(part, products, pricing, logits))


def _kept_on_gpu(local: LocalOp, pricing: Pricing) -> float:
    """Bytes kept by one operator, for fused GPU kernels where a CPU trace differs.

    Attention keeps queries, keys, values, output and its row sums; the trace may show the scores of attention with dropout, or a causal
    mask that GPU kernels do without. A recurrent layer keeps its gates and cell states: about 1.5 times the gates.
    """
    if local.op.op_class == "recurrent" and (sequence := next((s for s in local.op.inputs if len(s) == 3), None)):
        gates = sum(s[0] for s in [s for s in local.op.inputs if len(s) == 2][1::2])
        element = local.op.written_bytes / max(sum(map(num_elements, local.op.outputs)), 1.0)
        return max(local.saved_bytes, 1.5 * gates * sequence[0] * sequence[1] * element)
    sides = attention_sides(local.op) if local.op.op_class == "attention" and "attention" in local.op.name else None
    if sides is None:
        return local.saved_bytes
    query, key = sides
    element = local.op.written_bytes / max(sum(map(num_elements, local.op.outputs)), 1.0)
    fused = element * (2 * num_elements(query) + 2 * num_elements(key)) + 4 * num_elements(query[:3])
    mask = 0.0 if pricing.masks_are_causal else sum(num_elements(s) for s in local.op.inputs if len(s) == 4 and s[2:] == (query[2], key[2]))
    return min(local.saved_bytes, fused + element * mask)


def is_logit_sized(local: LocalOp, logits: Shape) -> bool:
    """Whether an operator reads or returns a tensor of the size of the class scores."""
    if len(logits) < 2:
        return False
    return any(logits[-1] in s and num_elements(s) == num_elements(logits) for s in (*local.op.outputs, *local.op.inputs))


def _where(i: int, products: dict[int, Product], split: BlockSplit) -> str:
    """Which tensors an operator keeps: a product keeps its input, the rest what surrounds them."""
    if not split.active:
        return "other"
    side = split.sides.get(products[i].weight, "") if i in products else ""
    if side:
        return "sequence" if side == "out" else "inner"
    return split.tags.get(i, "sequence")


def _is_kept_product(i: int, local: LocalOp, products: dict[int, Product]) -> bool:
    if local.op.op_class == "attention":
        return products[i].n <= products[i].k if i in products else "attention" in local.op.name
    return local.op.op_class in _PRODUCT_CLASSES


def _same_place(local: LocalOp, part: Part, products: dict[int, Product], split: BlockSplit) -> str:
    """Place of the forward operator that a checkpoint ran again."""
    for i, other in enumerate(part.ops):
        if other.op.phase == "forward" and (other.module, other.op.name, other.weight) == (local.module, local.op.name, local.weight):
            return _where(i, products, split)
    return "sequence" if split.active else "other"


def _temporary(part: Part, products: dict[int, Product], pricing: Pricing, logits: Shape) -> float:
    """Largest working set of backward: what two operators that follow each other read and write, weights and their gradients left out."""
    rows = [(o, products.get(i)) for i, o in enumerate(part.ops) if o.op.phase == "backward" and not is_logit_sized(o, logits)]
    moved = [moved_bytes(o, p, pricing)[0] for o, p in rows]
    written = [m * o.op.written_bytes / max(o.op.read_bytes + o.op.written_bytes, 1.0) for m, (o, _p) in zip(moved, rows, strict=True)]
    return max((m + w for m, w in zip(moved, [*written[1:], 0.0], strict=False)), default=0.0)
