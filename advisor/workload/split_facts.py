"""What an engine must know to cut the layers of a tensor-parallel model, told in module names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from advisor.workload.assign import Part
from advisor.workload.facts import num_heads
from advisor.workload.gemms import Product
from advisor.workload.layout import Layout, vocab_parameters
from advisor.workload.records import Module, Parameter, Tree, ancestors, parent
from advisor.workload.tensor_parallel import BlockSplit, Pair, mixes_positions

_NO_MODULE = Module(path="")
#: Operators of a cross-entropy over whole logits, and what may stand before it: each works on a part of the vocabulary alone.
_LOSSES = {"nll_loss_forward", "nll_loss2d_forward"}
_PART_OF_A_LOSS = {"_log_softmax", "_to_copy", "clone", "slice", "view", "_unsafe_view"}
#: Fused weights that hold the queries, keys and values of one head after the other (GPT-NeoX, BLOOM): a contiguous cut keeps heads whole.
_BY_HEAD = ("query_key_value",)


def split_facts(layout: Layout) -> dict[str, Any]:
    """Plain values for the report and the engines.

    Returns:
        `tp_blocks`: paths of the blocks that hold pairs.
        `tp_pairs`: per pair its `group` and `class` of block (`unit`: which of the group's, where they alternate), module names relative to the block (`column`, `row`), whether it makes heads
        (`attention`), `layout` of the weights ("out_in" as nn.Linear, "in_out" as Conv1D, "" other or mixed), `linear` (all out_in), `parts`
        (per column the shares of products that lie side by side in its weight; `[]` where they are not known), `inner` (modules with weights
        that run between columns and rows), `low_rank` (linear layers of adapters that are cut with the pair: by "out" beside columns, by "in"
        beside rows) and `adapters` (low-rank weights beside the pair's that are no linear layers).
        `tp_tables`: embedding tables and heads that may be divided by vocabulary: `module`, `kind` ("embedding" or "head"), `rows`.
        `whole_logits`: why logits can't stay divided so until the loss; "" where they can.
        `loose_parameters`: parameters held by modules that have layers of their own, such as a class token.
    """
    pairs = [
        _pair(layout, part, products, split, pair)
        for part, products, split in zip(layout.parts, layout.products, layout.splits, strict=True)
        for pair in split.pairs
    ]
    return {
        "tp_blocks": _blocks(layout), "tp_pairs": pairs, "tp_tables": _tables(layout), "whole_logits": why_not_cut_loss(layout),
        "loose_parameters": _loose(layout.tree),
    }  # fmt: skip


def _blocks(layout: Layout) -> list[str]:
    return [
        repeat[unit].path
        for part, split in zip(layout.parts, layout.splits, strict=True)
        for repeat in part.segment.repeats
        for unit in sorted({_unit(pair) for pair in split.pairs})
    ]


def _unit(pair: Pair) -> int:
    return int(pair.rows[0].split(":")[0])


def _pair(layout: Layout, part: Part, products: dict[int, Product], split: BlockSplit, pair: Pair) -> dict[str, Any]:
    tree = layout.tree
    unit = part.segment.repeats[0][_unit(pair)].path
    columns, rows = [_module_name(w) for w in pair.columns], [_module_name(w) for w in pair.rows]
    layouts = {tree.modules.get(f"{unit}.{name}", _NO_MODULE).weight_layout for name in (*columns, *rows)}
    forward = {p.weight: p for p in products.values() if p.role == "forward"}
    calls = {part.ops[i].weight: part.ops[i].op.call for i, p in products.items() if p.role == "forward"}
    first, last = min(calls[w] for w in pair.columns), max(calls[w] for w in pair.rows)
    attention = any(
        first < o.op.call < last and o.op.phase == "forward" and mixes_positions(o, products.get(i)) for i, o in enumerate(part.ops)
    )
    beside = {_module_name(w): end for w, (base, end) in split.adapters.items() if base in (*pair.columns, *pair.rows)}
    low_rank = {end: sorted(_module_name(w) for w, (base, of) in split.adapters.items() if of == end and base in cut)
                for end, cut in (("out", pair.columns), ("in", pair.rows))}  # fmt: skip
    odd = sorted(name for name in beside if tree.modules.get(f"{unit}.{name}", _NO_MODULE).weight_layout != "out_in")
    heads = num_heads(layout) if attention else (0, 0)
    return {
        "group": part.segment.name, "unit": _unit(pair), "class": tree.modules[unit].class_name, "column": columns, "row": rows,
        "attention": attention,
        "layout": next(iter(layouts)) if len(layouts) == 1 else "", "linear": layouts == {"out_in"},
        "parts": _parts(columns, [forward[w].n for w in pair.columns], forward[pair.rows[0]].k, heads),
        "inner": _inner(part, unit, (first, last), {*columns, *rows, *beside, *map(parent, odd)}), "low_rank": low_rank, "adapters": odd,
    }  # fmt: skip


def _parts(columns: list[str], outputs: list[float], width: float, heads: tuple[int, int]) -> list[list[int]]:
    """Shares of the products in each column weight, by its width against what the row weight reads; [] where they are not known."""
    if not heads[0]:
        return [{1.0: [1], 2.0: [1, 1]}.get(size / width, []) for size in outputs]
    if len(columns) >= 3 or any(part in columns[0] for part in _BY_HEAD):
        return [[1]] * len(columns)
    key_width = width * heads[1] / heads[0]
    if len(columns) == 1:
        shares = [width, key_width, key_width]
        return [_reduced(shares) if math.isclose(sum(shares), outputs[0]) else []]
    queries, keys_values = outputs
    return [[1] if queries == width else [], [1, 1] if keys_values == 2 * key_width else []]


def _reduced(shares: Iterable[float]) -> list[int]:
    whole = [round(share) for share in shares]
    return [share // math.gcd(*whole) for share in whole]


def _inner(part: Part, unit: str, span: tuple[int, int], split: set[str]) -> list[str]:
    """Modules of the block that use weights of their own between columns and rows: each rank would see only its heads' share of them."""
    found = {
        o.op.module.removeprefix(f"{unit}.")
        for o in part.ops
        if o.op.phase == "forward" and o.op.weight and span[0] < o.op.call < span[1] and o.op.module.startswith(f"{unit}.")
    }
    return sorted(found - split)


def _tables(layout: Layout) -> list[dict[str, Any]]:
    """Divided tables and heads; those tied to each other are listed both."""
    if layout.tp_reason:
        return []
    found = []
    for part, split in zip(layout.parts, layout.splits, strict=True):
        for p in vocab_parameters(part, layout.tree) if not split.pairs else []:
            found += [_table(layout.tree, name, p) for name in (p.name, *p.aliases)]
    return list({table["module"]: table for table in found}.values())


def _table(tree: Tree, name: str, p: Parameter) -> dict[str, Any]:
    module = parent(name)
    kind = "embedding" if tree.modules.get(module, _NO_MODULE).weight_layout == "embedding" else "head"
    return {"module": module, "kind": kind, "rows": p.shape[0]}


def why_not_cut_loss(layout: Layout) -> str:
    """Why tensor ranks can't each keep their part of the logits: something beside a cross-entropy reads them; empty where nothing does."""
    vocab = layout.logits[-1] if layout.logits else 0
    ops = [o.op for part in layout.parts for o in part.ops if o.op.phase == "forward" and any(s[-1:] == (vocab,) for s in o.op.inputs)]
    names = {op.name for op in ops if not (op.flops and op.weight)}
    if not any(_table_feeds(vocab, t) for t in _tables(layout)):
        return "no head is divided by vocabulary"
    if not names & _LOSSES:
        return "the loss is no cross-entropy of the logits"
    if any((vocab,) in op.inputs for op in ops if op.name in _LOSSES):
        return "the cross-entropy weighs its classes"
    others = sorted(names - _LOSSES - _PART_OF_A_LOSS)
    return f"{others[0]} reads the logits beside the cross-entropy" if others else ""


def _table_feeds(vocab: int, table: dict[str, Any]) -> bool:
    return bool(table["kind"] == "head" and table["rows"] == vocab)


def _loose(tree: Tree) -> list[str]:
    weighted = {p.module for p in tree.parameters}
    holders = {above for path in weighted for above in ancestors(path)[1:]}
    return [p.name for p in tree.parameters if p.module in holders]


def _module_name(weight: str) -> str:
    """The module of a relative weight name: self_attn.q_proj of 0:self_attn.q_proj.weight."""
    return re.sub(r"\.weight$", "", weight.split(":", 1)[-1])
