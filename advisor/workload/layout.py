"""A profile cut into parts, with their products, their tensor-parallel division and the pipeline's cuts."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.profiling.schema import StepProfile
from advisor.workload.assign import Part, find_parts
from advisor.workload.cuts import Cuts, find_cuts
from advisor.workload.gemms import Product, find_products
from advisor.workload.kernels import with_fused_dropout
from advisor.workload.records import Parameter, Shape, Tree, read_tree
from advisor.workload.saved import is_logit_sized
from advisor.workload.tensor_parallel import BlockSplit, split_block

NO_MODULES = "the profile names no modules and parameters (it was read from a trace)"
#: A table or head with at least this many rows is worth dividing by vocabulary.
_MIN_VOCAB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What the workload, the summary and the notes are made from."""

    profile: StepProfile
    tree: Tree
    parts: tuple[Part, ...]  # in execution order
    products: tuple[dict[int, Product], ...]  # per part
    splits: tuple[BlockSplit, ...]  # per part; inactive where the model can't be split
    cuts: Cuts
    tp_reason: str  # why there is no tensor parallelism; "" if there is

    @property
    def logits(self) -> Shape:
        return tuple(self.profile.meta.logits_shape)

    @property
    def main(self) -> int:
        """Position of the part with most of the work among the runs of blocks, or among all parts."""
        weight = [sum(o.op.flops * o.share for o in p.ops) * p.num_repeats * (2 if p.segment.is_run else 1) for p in self.parts]
        return max(range(len(weight)), key=lambda i: (self.parts[i].segment.is_run, weight[i]))


def find_layout(profile: StepProfile) -> Layout:
    """Cut a profile up."""
    tree = read_tree(profile)
    tree = Tree(ops=with_fused_dropout(tree.ops), modules=tree.modules, parameters=tree.parameters)
    parts = find_parts(tree)
    products = tuple(find_products(p.ops) for p in parts)
    splits = [
        split_block(p, q, tree, _width(p, tree)) if p.segment.is_run or p.segment.is_blocks else BlockSplit()
        for p, q in zip(parts, products, strict=True)
    ]
    reason = _tp_reason(parts, splits, tree)
    if reason:
        splits = [BlockSplit(reason=s.reason) for s in splits]
    else:
        logits = tuple(profile.meta.logits_shape)
        splits = [s if s.active else _vocab_split(p, q, tree, logits) for s, p, q in zip(splits, parts, products, strict=True)]
    cuts = find_cuts(parts, tree) if tree.parameters else Cuts(reason=NO_MODULES)
    return Layout(profile=profile, tree=tree, parts=parts, products=products, splits=tuple(splits), cuts=cuts, tp_reason=reason)


def _width(part: Part, tree: Tree) -> float:
    shape = tree.modules[part.segment.repeats[0][-1].path].output_shape
    return float(shape[-1]) if shape else 0.0


def _tp_reason(parts: tuple[Part, ...], splits: list[BlockSplit], tree: Tree) -> str:
    """Why the model as a whole can't be divided by tensor parallelism; "" if its runs of blocks can."""
    if not tree.parameters:
        return NO_MODULES
    flops = [sum(o.op.flops * o.share for o in p.ops) * p.num_repeats for p in parts]
    by_class: dict[str, float] = {}
    for p in parts:
        for o in p.ops:
            by_class[o.op.op_class] = by_class.get(o.op.op_class, 0.0) + o.op.flops * o.share * p.num_repeats
    dominant = max(by_class, key=lambda c: by_class[c], default="")
    shared = next((u.path for p in parts if p.segment.is_blocks for u in p.segment.repeats[0] if tree.modules[u.path].num_calls > 1), None)
    runs = [i for i, p in enumerate(parts) if p.segment.is_run]
    if dominant == "convolution":
        return f"convolutions do {by_class[dominant] / max(sum(flops), 1.0):.0%} of the flops; tensor parallelism divides linear layers"
    if any(tree.modules[o.op.module].class_name in ("LSTM", "GRU", "RNN") or o.op.op_class == "recurrent" for p in parts for o in p.ops):
        return "recurrent layers would need an all-reduce at every time step"
    if shared is not None:
        return (
            f"{shared} is called {tree.modules[shared].num_calls} times with the same weights: its gradients would be reduced at each call"
        )
    if not runs:
        return "no repeated blocks of linear layers"
    split_flops = sum(flops[i] for i in runs if splits[i].active)
    if split_flops == 0 or split_flops < 0.5 * sum(flops[i] for i in runs):
        return splits[max(runs, key=lambda i: flops[i])].reason or "its blocks form no column-row pairs"
    return ""


def vocab_parameters(part: Part, tree: Tree) -> list[Parameter]:
    """Embedding tables and heads that tensor parallelism may divide by rows of the vocabulary."""
    found = []
    for p in part.parameters:
        layout = tree.modules[p.module].weight_layout
        if len(p.shape) == 2 and (layout == "embedding" or _feeds_loss(p, part)) and p.shape[0] >= _MIN_VOCAB and p.shape[0] >= p.shape[1]:
            found.append(p)
    return found


def _feeds_loss(p: Parameter, part: Part) -> bool:
    """A head: the last weight product of a part that no block follows."""
    last = [o for o in part.ops if o.op.phase == "forward" and o.op.weight and o.op.flops > 0]
    return bool(last) and last[-1].op.weight in (p.name, *p.aliases)


def _vocab_split(part: Part, products: dict[int, Product], tree: Tree, logits: Shape) -> BlockSplit:
    """Parts beside divided blocks: tables and heads by vocabulary, logits and loss with them, the rest by sequence."""
    tables = vocab_parameters(part, tree)
    names = {name for p in tables for name in (p.name, *p.aliases)}
    sides = {}
    for i, p in products.items():
        if p.role == "forward" and (part.ops[i].op.weight in names or (logits and p.n == logits[-1] and p.n >= _MIN_VOCAB)):
            sides[p.weight] = "out"
    tags = {i: "inner" if is_logit_sized(o, logits) else "sequence" for i, o in enumerate(part.ops)}
    has_table = any(tree.modules[p.module].weight_layout == "embedding" for p in tables)
    return BlockSplit(active=True, sides=sides, tags=tags, num_collectives=int(has_table))
