"""Bytes that a part keeps for its backward pass, per sample: without recomputation, under selective, and the short-lived ones.

Without recomputation: what autograd was seen to keep. Where the script checkpoints, the second forward shows what the first one did not
keep. Selective: every product's and fused attention's output is kept, everything else is computed again from them (torch's
per-operator policy); the score matrix of unfused attention never is. Tensors of the size of the logits are counted in `logits_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from advisor.workload.assign import LocalOp, Part
from advisor.workload.gemms import Product
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


def saved_bytes(
    part: Part, products: dict[int, Product], split: BlockSplit, *, batch_size: int, byte_scale: dict[str, float], logits: Shape
) -> SavedBytes:  # fmt: skip
    """Bytes kept by one mean repeat.

    Args:
        part: the segment with its operators.
        products: its matrix products.
        split: what tensor parallelism divides.
        batch_size: samples in the traced pass.
        byte_scale: planned over traced bytes, by traced dtype.
        logits: shape of the class scores, () if none.
    """
    kept = dict.fromkeys(("inner", "sequence", "other"), 0.0)
    selective = dict(kept)
    logit_bytes = 0.0
    for i, local in enumerate(part.ops):
        if local.op.phase != "forward":
            continue
        where, scale = _where(i, products, split), byte_scale.get(local.op.dtype, 1.0) / batch_size
        if is_logit_sized(local, logits) and i not in products:
            logit_bytes += local.saved_bytes * scale
            continue
        kept[where] += local.saved_bytes * scale
        if _is_kept_product(i, local, products):
            result = "sequence" if split.sides.get(products[i].weight if i in products else "") == "in" else where
            result = "inner" if i in products and split.sides.get(products[i].weight) == "out" else result
            selective[result] += local.op.written_bytes * local.share * scale
    for local in part.recomputed:
        kept[_same_place(local, part, products, split)] += local.saved_bytes * byte_scale.get(local.op.dtype, 1.0) / batch_size
    return SavedBytes(kept=kept, selective=selective, logits=logit_bytes, temporary=_temporary(part, batch_size, byte_scale, logits))


def is_logit_sized(local: LocalOp, logits: Shape) -> bool:
    """Whether an operator reads or returns a tensor of the size of the class scores."""
    if len(logits) < 2:
        return False
    return any(s and s[-1] == logits[-1] and num_elements(s) == num_elements(logits) for s in (*local.op.outputs, *local.op.inputs))


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


def _temporary(part: Part, batch_size: int, byte_scale: dict[str, float], logits: Shape) -> float:
    """Largest working set of a backward operator and the next one's result: what is read and written but not kept."""
    rows = [o for o in part.ops if o.op.phase == "backward" and not is_logit_sized(o, logits)]
    largest = 0.0
    for i, local in enumerate(rows):
        following = rows[i + 1].op.written_bytes if i + 1 < len(rows) else 0.0
        moved = local.op.read_bytes + local.op.written_bytes + following
        largest = max(largest, moved * byte_scale.get(local.op.dtype, 1.0) / batch_size)
    return largest
