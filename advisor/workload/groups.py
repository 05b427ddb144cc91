"""One part as a LayerGroup: its operator table, its parameters by what divides them, its saved bytes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from advisor.workload.assign import Part
from advisor.workload.gemms import Product
from advisor.workload.layout import Layout, vocab_parameters
from advisor.workload.pricing import Entry, Pricing, entries
from advisor.workload.records import Parameter, Shape, is_expert, num_elements
from advisor.workload.saved import saved_bytes
from advisor.workload.split_facts import split_facts
from advisor.workload.tensor_parallel import BlockSplit
from cost_models.types import BATCH_DIMS, OP_CLASSES, PHASES, PRICING_KINDS, TP_SPLITS, LayerGroup, OpTable, ParamShape

#: An expert's own number in a module path.
_EXPERT = re.compile(r"experts\.\d+(?=\.|$)")
PricedOps = list[tuple[Entry, str, str, str]]  # entry, operator class, phase, tensor-parallel split


def price_part(layout: Layout, i: int, pricing: Pricing) -> PricedOps:
    """Priced operators of the mean repeat of part `i`."""
    part, products, split = layout.parts[i], layout.products[i], layout.splits[i]
    found: PricedOps = []
    banks: dict[tuple[str, str, int], list[int]] = {}  # equal products of different experts, by position in `found`
    for at, local in enumerate(part.ops):
        product = products.get(at)
        for j, entry in enumerate(entries(local, product, pricing)):
            bank = _EXPERT.sub("experts.*", local.module)
            if bank != local.module and entry.kind == "gemm":
                banks.setdefault((bank, f"{local.op.phase} {local.op.name} {entry.batch_dim} {entry.out_side}", j), []).append(len(found))
            found.append((entry, local.op.op_class, local.op.phase, _tp_split(entry, product, split, at)))
    return _merged_banks(found, list(banks.values()))


def _merged_banks(priced: PricedOps, banks: list[list[int]]) -> PricedOps:
    """One entry for the same product of all experts: `batch` independent products at the mean number of tokens."""
    dropped: set[int] = set()
    for bank in banks:
        first, *rest = (priced[i][0] for i in bank)
        total = sum(e.batch for e in (first, *rest))
        if first.batch_dim not in ("m", "k") or any(_weight_sides(e) != _weight_sides(first) for e in rest):
            continue
        work = sum(getattr(e, first.batch_dim) * e.batch * e.work_share for e in (first, *rest)) / total
        merged = dataclasses.replace(
            first, **{first.batch_dim: work}, work_share=1.0, batch=total, num_kernels=sum(e.num_kernels for e in (first, *rest)),
            bytes_per_sample=sum(e.bytes_per_sample for e in (first, *rest)), bytes_fixed=sum(e.bytes_fixed for e in (first, *rest)),
        )  # fmt: skip
        priced[bank[0]] = (merged, *priced[bank[0]][1:])
        dropped.update(bank[1:])
    return [row for i, row in enumerate(priced) if i not in dropped]


def _weight_sides(entry: Entry) -> tuple[float, float]:
    return entry.n, entry.m if entry.batch_dim == "k" else entry.k


def _tp_split(entry: Entry, product: Product | None, split: BlockSplit, at: int) -> str:
    if not split.active:
        return "none"
    tag = split.tags.get(at, "sequence")
    if entry.kind == "memory":
        return tag
    if product is not None and product.weight:
        side = split.sides.get(product.weight, "")
        return {"out": product.out_side, "in": product.in_side}.get(side, "none")
    if tag == "inner" and entry.batch_dim == "batch":
        return "batch"
    return "none"


def op_table(priced: PricedOps) -> OpTable:
    """Arrays of the cost models."""

    def code(names: tuple[str, ...], values: list[str]) -> np.ndarray:
        return np.array([names.index(v) for v in values], dtype=np.int64)

    def column(name: str) -> np.ndarray:
        return np.array([getattr(e, name) for e, _c, _p, _t in priced], dtype=np.float64)

    return OpTable(
        op_class=code(OP_CLASSES, [c if c in OP_CLASSES else "other" for _e, c, _p, _t in priced]),
        kind=code(PRICING_KINDS, [e.kind for e, _c, _p, _t in priced]),
        phase=code(PHASES, [p for _e, _c, p, _t in priced]),
        batch_dim=code(BATCH_DIMS, [e.batch_dim for e, _c, _p, _t in priced]),
        tp_split=code(TP_SPLITS, [t for _e, _c, _p, t in priced]),
        m=column("m"), n=column("n"), k=column("k"), batch=column("batch"), work_share=column("work_share"),
        bytes_per_sample=column("bytes_per_sample"), bytes_fixed=column("bytes_fixed"), num_kernels=column("num_kernels"),
    )  # fmt: skip


def layer_group(layout: Layout, i: int, pricing: Pricing, activation_bytes: float) -> LayerGroup:
    """Part `i` of a layout.

    Args:
        layout: the profile cut up.
        i: position of the part.
        pricing: batch and byte scales.
        activation_bytes: bytes per element handed from layer to layer.
    """
    part, split = layout.parts[i], layout.splits[i]
    kept = saved_bytes(part, layout.products[i], split, pricing=pricing, logits=layout.logits)
    handed_on = part.segment.is_blocks or i + 1 < len(layout.parts)
    boundary = (
        num_elements(_boundary_shape(layout, i)) * activation_bytes / pricing.batch_size * _num_calls(layout, part) if handed_on else 0.0
    )
    can_recompute = part.segment.is_blocks and bool(_boundary_shape(layout, i))
    selective = dict(kept.selective)
    selective["sequence" if split.active else "other"] += boundary
    if not can_recompute or sum(selective.values()) > sum(kept.kept.values()):
        selective = kept.kept
    total, sides = sum(p.num_elements for p in part.parameters), _tp_sides(layout, i)
    return LayerGroup(
        name=part.segment.name, num_repeats=part.num_repeats, ops=op_table(price_part(layout, i, pricing)),
        num_params=total / part.num_repeats, num_trainable_params=sum(p.num_elements for p in part.parameters if p.trainable) / part.num_repeats,
        num_tp_params=sum(p.num_elements for p in part.parameters if p.name in sides) / part.num_repeats,
        num_expert_params=sum(p.num_elements for p in part.parameters if is_expert(p)) / part.num_repeats,
        num_layers=len(part.segment.repeats[0]) if part.segment.is_run else 1,
        saved_inner_bytes=kept.kept["inner"], saved_sequence_bytes=kept.kept["sequence"], saved_other_bytes=kept.kept["other"],
        selective_inner_bytes=selective["inner"], selective_sequence_bytes=selective["sequence"], selective_other_bytes=selective["other"],
        boundary_bytes=boundary, temporary_bytes=kept.temporary, num_tp_collectives=float(split.num_collectives),
        **_adapter_sums(layout, i, activation_bytes / pricing.batch_size), can_recompute=can_recompute, can_cut=i in layout.cuts.parts,
        param_shapes=_param_shapes(layout, i, sides),
    )  # fmt: skip


def _adapter_sums(layout: Layout, i: int, bytes_per_element: float) -> dict[str, float]:
    """Low-rank products beside divided weights that are divided with them: calls in a repeat, and bytes that they sum over tensor ranks."""
    split, forward = layout.splits[i], {p.weight: p for p in layout.products[i].values() if p.role == "forward"}
    found: dict[str, float] = {}
    for side, end in (("row", "in"), ("column", "out")):
        names = [name for name, (base, of) in split.adapters.items() if of == end == split.sides.get(base)]
        cut = [forward[name] for name in names if name in forward]
        found[f"num_{side}_adapters"] = float(len(cut))
        found[f"{side}_adapter_bytes"] = sum(p.m * (p.n if end == "in" else p.k) for p in cut) * bytes_per_element
    return found


def _boundary_shape(layout: Layout, i: int) -> Shape:
    """What is handed on: what the next block takes, else what the last module of the part returns."""
    units = layout.parts[i].segment.repeats[0]
    own = layout.tree.modules[units[-1].path].output_shape
    following = layout.parts[i + 1].segment if i + 1 < len(layout.parts) else None
    if not layout.parts[i].segment.is_blocks and following is not None and following.is_blocks:
        return layout.tree.modules[following.repeats[0][0].path].input_shape or own
    return own


def _num_calls(layout: Layout, part: Part) -> int:
    """How often a shared block is called: each call keeps its own input."""
    return max(layout.tree.modules[part.segment.repeats[0][-1].path].num_calls, 1) if part.segment.is_blocks else 1


def _tp_sides(layout: Layout, i: int) -> dict[str, str]:
    """What tensor parallelism divides, by name: "out" or "in" side of weights of pairs, biases of column weights, tables and heads."""
    part, split, tree = layout.parts[i], layout.splits[i], layout.tree
    if not split.active:
        return {}
    names = {local.op.weight: split.sides[p.weight] for at, p in layout.products[i].items() for local in [part.ops[at]]
             if p.role == "forward" and p.weight in split.sides}  # fmt: skip
    divided = _in_all_repeats({tree.parameter_by_name[name].name: side for name, side in names.items()}, part)
    columns = {p.module: p.shape for p in part.parameters if divided.get(p.name) == "out"}
    biases = {p.name: "out" for p in part.parameters if len(p.shape) == 1 and p.module in columns and p.shape[0] in columns[p.module]}
    tables = {p.name: "out" for p in vocab_parameters(part, tree)} if not split.pairs else {}
    owned = {p.name for p in part.parameters}
    return {name: side for name, side in (tables | biases | divided).items() if name in owned}


def _param_shapes(layout: Layout, i: int, sides: Mapping[str, str]) -> tuple[ParamShape, ...]:
    """Parameters of the first repeat, in order of definition."""
    part = layout.parts[i]
    paths = tuple(f"{u.path}." for u in part.segment.repeats[0])
    own = [p for p in part.parameters if part.num_repeats == 1 or p.name.startswith(paths)]
    summed = {p.module for p in own if sides.get(p.name) == "in"}
    shares = _shares(layout, i)
    return tuple(
        ParamShape(
            rows=float(p.shape[0]) if p.shape else 1.0, num_elements=p.num_elements, trainable=p.trainable,
            tp_split=_dimension(layout, p, sides[p.name]) if p.name in sides else "bias" if p.module in summed and len(p.shape) == 1 else "none",
            tp_shares=shares.get(p.module, (1.0,)),
        )
        for p in own
    )  # fmt: skip


def _shares(layout: Layout, i: int) -> dict[str, tuple[float, ...]]:
    """Of the products that lie side by side in a weight, by the name of its module."""
    units = layout.parts[i].segment.repeats[0]
    return {
        f"{units[pair['unit']].path}.{name}": tuple(part / sum(parts) for part in parts)
        for pair in split_facts(layout)["tp_pairs"] if pair["group"] == layout.parts[i].segment.name
        for name, parts in zip(pair["column"], pair["parts"], strict=True) if len(parts) > 1
    }  # fmt: skip


def _dimension(layout: Layout, p: Parameter, side: str) -> str:
    """Dimension of a divided parameter; Conv1D-style weights have their inputs first, stacks of experts the experts."""
    inputs_first = layout.tree.modules[p.module].weight_layout == "in_out" and len(p.shape) > 1
    return "columns" if len(p.shape) > 2 or (side == "in") != inputs_first else "rows"


def _in_all_repeats(divided: dict[str, str], part: Part) -> dict[str, str]:
    """Names seen in one repeat, carried over to the others."""
    paths = [[u.path for u in repeat] for repeat in part.segment.repeats]
    found = dict(divided)
    for name, side in divided.items():
        home = next(((j, path) for repeat in paths for j, path in enumerate(repeat) if name.startswith(path + ".")), None)
        if home is not None:
            found.update({repeat[home[0]] + name[len(home[1]) :]: side for repeat in paths})
    return found
