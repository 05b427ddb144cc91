"""How tensor parallelism would divide a block: which weights by columns, which by rows, and what lies between them.

Megatron's scheme (Shoeybi et al. 2019): weights that share an input are divided by their output side (columns: q, k, v; gate, up), the
weight that consumes the result by its input side (rows: o; down), so each pair needs one all-reduce forward and one backward. What
runs between the two is divided with them ("inner"), the rest only by sequence parallelism ("sequence"; Korthikanti et al. 2022).
Pairs are found from order, sides and shared inputs of the products; weights that a module uses by hand are left whole.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from advisor.workload.assign import LocalOp, Part
from advisor.workload.gemms import BATCHED_PRODUCTS, Product
from advisor.workload.records import Tree, num_elements, parent

#: Share of the block's weight products that must lie in pairs.
_MIN_COVERAGE = 0.5
_FUSED_ATTENTION_CLASSES = ("MultiheadAttention",)
_PLAIN_LAYOUTS = ("out_in", "in_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Weights divided by columns and the weights by rows that consume their result; names relative to the repeat."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSplit:
    """The division of one part; without pairs everything stays whole and `reason` says why."""

    pairs: tuple[Pair, ...] = ()
    sides: dict[str, str] = field(default_factory=dict)  # relative weight -> "out" or "in"
    adapters: dict[str, tuple[str, str]] = field(default_factory=dict)  # low-rank weight -> one beside it, shared side
    tags: dict[int, str] = field(default_factory=dict)  # position in Part.ops -> "inner" or "sequence"
    num_collectives: int = 0
    active: bool = False  # something of the part is divided, or it stands beside divided blocks
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A weight product in a forward pass."""

    weight: str
    parameter: str  # full name
    owner: str
    call: int
    inputs: float
    outputs: float
    group: int  # shared-input number of the owner, -1 if it was not called
    plain: bool  # an ordinary linear layer's weight, used as it is
    flops: float


def split_block(part: Part, products: dict[int, Product], tree: Tree, width: float) -> BlockSplit:
    """Column and row weights of a block.

    Args:
        part: a segment of blocks.
        products: its matrix products.
        tree: modules, for owners and shared inputs.
        width: last side of the block's output.
    """
    uses = _uses(part, products, tree)
    if not uses:
        return BlockSplit(reason="its blocks hold no linear layers")
    adapters = _adapters(uses)
    base = [u for u in uses if u.weight not in adapters]
    attention = [o.op.call for i, o in enumerate(part.ops) if o.op.phase == "forward" and mixes_positions(o, products.get(i))]
    pairs = [p for p in _pairs(base, attention, width) if all(u.plain for u in (*p[0], *p[1]))]
    covered = sum(u.flops for p in pairs for u in (*p[0], *p[1]))
    if covered < _MIN_COVERAGE * sum(u.flops for u in base):
        return BlockSplit(reason=_why_not(base, part))
    sides = {u.weight: "out" for p in pairs for u in p[0]} | {u.weight: "in" for p in pairs for u in p[1]}
    for name, (base_weight, end) in adapters.items():
        if sides.get(base_weight) == end:
            sides[name] = end
    rows = {re.sub(r"\d+", "*", u.weight) for p in pairs for u in p[1]}
    named = tuple(Pair(columns=tuple(u.weight for u in p[0]), rows=tuple(u.weight for u in p[1])) for p in pairs)
    return BlockSplit(active=True, pairs=named, sides=sides, adapters=adapters, tags=_tags(part, pairs, width), num_collectives=len(rows))


def mixes_positions(local: LocalOp, product: Product | None) -> bool:
    """Attention: a fused kernel, or a batched product of two activations."""
    return local.op.op_class == "attention" or (product is not None and not product.weight and local.op.name in BATCHED_PRODUCTS)


def _uses(part: Part, products: dict[int, Product], tree: Tree) -> list[_Use]:
    transformed = {o.weight for i, o in enumerate(part.ops) if o.weight and i not in products and o.op.phase == "forward"
                   and o.op.op_class in ("elementwise", "reduction")}  # fmt: skip
    found: dict[str, _Use] = {}
    for i, p in products.items():
        local = part.ops[i]
        if p.role != "forward" or p.weight in found:
            continue
        parameter = tree.parameter_by_name[local.op.weight]
        owner = tree.modules[parameter.module]
        plain = owner.class_name in _FUSED_ATTENTION_CLASSES or parent_class(tree, owner.path) in _FUSED_ATTENTION_CLASSES
        plain = plain or (owner.weight_layout in _PLAIN_LAYOUTS and local.op.module == owner.path)
        plain = plain or (len(parameter.shape) == 3 and "experts" in parameter.name.split("."))  # a stack of experts' weights
        found[p.weight] = _Use(
            weight=p.weight, parameter=parameter.name, owner=owner.path, call=local.op.call, inputs=p.k, outputs=p.n, group=owner.input_group,
            plain=plain and p.weight not in transformed, flops=2.0 * p.m * p.n * p.k * p.batch,
        )  # fmt: skip
    return sorted(found.values(), key=lambda u: u.call)


def parent_class(tree: Tree, path: str) -> str:
    """Class of the enclosing module."""
    return tree.modules[parent(path)].class_name if path else ""


def _adapters(uses: list[_Use]) -> dict[str, tuple[str, str]]:
    """Low-rank side paths of a layer: weight -> (the layer's weight, which of the layer's sides it shares)."""
    found: dict[str, tuple[str, str]] = {}
    for base in uses:
        home = parent(base.owner)
        near = [u for u in uses if home and u.weight != base.weight and (u.owner == home or u.owner.startswith(home + "."))]
        for down in near:
            for up in near:
                narrow = 4 * down.outputs <= min(base.inputs, base.outputs) and up.inputs == down.outputs
                if narrow and (down.inputs, up.outputs) == (base.inputs, base.outputs):
                    found[down.weight], found[up.weight] = (base.weight, "in"), (base.weight, "out")
    return found


def _pairs(uses: list[_Use], attention: list[int], width: float) -> list[tuple[list[_Use], list[_Use]]]:
    """Column and row groups in order of execution."""
    found: list[tuple[list[_Use], list[_Use]]] = []
    waiting: list[_Use] = []
    for u in uses:
        if waiting and u.outputs == width and any(waiting[-1].call < a < u.call for a in attention):
            before, feeding = _feeding_attention(waiting, width)
            found += _chains(before)
            found += [(feeding, [u])] if feeding else []
            waiting = []
        else:
            waiting.append(u)
    return found + _chains(waiting)


def _feeding_attention(waiting: list[_Use], width: float) -> tuple[list[_Use], list[_Use]]:
    """Split what came before an attention into earlier pairs and the weights that make queries, keys and values.

    Of a down-projection and the up-projection behind it (latent attention) only the second is divided.
    """
    cut = next((i + 1 for i in range(len(waiting) - 1, -1, -1) if waiting[i].outputs == width and waiting[i].inputs > 1.5 * width), 0)
    feeding = waiting[cut:]
    narrow = {i for i, u in enumerate(feeding) if u.inputs < 0.75 * width}
    return waiting[:cut], [u for i, u in enumerate(feeding) if i + 1 not in narrow or i in narrow]


def _chains(uses: list[_Use]) -> list[tuple[list[_Use], list[_Use]]]:
    """Pairs outside attention: weights that share an input, then one that leads back to that width."""
    found: list[tuple[list[_Use], list[_Use]]] = []
    pending: list[_Use] = []
    for u in uses:
        if _is_narrow(u):
            continue
        shares = bool(pending) and u.inputs == pending[0].inputs and u.group == pending[0].group and u.group >= 0
        closes = bool(pending) and u.outputs == pending[0].inputs and u.inputs in _results(pending)
        if shares or (pending and not closes and u.inputs == pending[0].inputs):
            pending.append(u)
        elif closes:
            found.append((pending, [u]))
            pending = []
        else:
            pending = [u]
    return found


def _is_narrow(u: _Use) -> bool:
    """A router or another small head: not worth dividing."""
    return 8 * u.outputs <= u.inputs and u.outputs <= 1024


def _results(group: list[_Use]) -> set[float]:
    """Widths that the next weight may see: an output, or half of one whose gate is fused in."""
    return {u.outputs for u in group} | {u.outputs / 2 for u in group}


def _why_not(uses: list[_Use], part: Part) -> str:
    opaque = next((u for u in uses if not u.plain and not _is_narrow(u)), None)
    if opaque is not None:
        return f"{opaque.parameter} is not used as a plain linear layer's weight (custom function or transformed weight)"
    return f"the linear layers of {part.segment.name} form no column-row pairs"


def _tags(part: Part, pairs: list[tuple[list[_Use], list[_Use]]], width: float) -> dict[int, str]:
    """Where each operator that moves activations lies: between the weights of a pair, or outside."""
    spans = [(min(u.call for u in columns), max(u.call for u in rows)) for columns, rows in pairs]
    tags: dict[int, str] = {}
    columns_of = {u.weight.rpartition(".")[0] for columns, _rows in pairs for u in columns}
    moved: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for i, local in enumerate(part.ops):
        if local.op.phase == "forward" and local.share == 1.0:
            tags[i] = "inner" if any(a < local.op.call < b for a, b in spans) else "sequence"
            moved[local.module][tags[i]] += local.op.read_bytes + local.op.written_bytes
    for i, local in enumerate(part.ops):
        if i not in tags:
            inside = local.module in columns_of and local.module not in moved
            tags[i] = "inner" if inside else _by_module(local, moved.get(local.module, {}), width)
    return tags


def _by_module(local: LocalOp, moved: dict[str, float], width: float) -> str:
    """Backward rows lie where the forward rows of their module lie; in mixed modules the width of the result decides."""
    if len(moved) == 1:
        return next(iter(moved))
    largest = max(local.op.outputs or local.op.inputs, key=num_elements, default=())
    if not moved:
        return "sequence"
    return "sequence" if largest and largest[-1] == width and len(largest) != 4 else max(moved, key=lambda tag: moved[tag])
