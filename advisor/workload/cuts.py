"""Where a pipeline stage may end: after a repeat whose output is the only tensor handed on, in one stack of equal blocks."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.workload.assign import Part
from advisor.workload.records import Shape, Tree

#: Share of the forward flops of all blocks that must lie in the stack.
_MIN_STACK_SHARE = 0.6
#: A second stack below this share of the work (an auxiliary head) does not stand in the way.
_ONE_STACK_SHARE = 0.95
_NO_BLOCKS = "no repeated blocks to spread over stages"
_GRAPH_OPERATORS = ("index_add", "scatter_add", "scatter_reduce", "segment_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Positions of the parts that may be cut, or why there are none."""

    parts: frozenset[int] = frozenset()
    reason: str = ""


def find_cuts(parts: tuple[Part, ...], tree: Tree) -> Cuts:
    """The stack of blocks that a pipeline may cut."""
    blocks = [i for i, p in enumerate(parts) if p.segment.is_blocks or p.segment.is_run]
    if not any(parts[i].segment.is_run for i in blocks):
        recurrent = any(o.op.op_class == "recurrent" for p in parts for o in p.ops)
        return Cuts(reason=_no_run(parts, blocks, tree) or ("recurrent layers wait for each time step" if recurrent else _NO_BLOCKS))
    stacks = _stacks(parts, blocks, tree)
    if _num_joins(parts, blocks) > 1:
        return Cuts(reason="skip connections: outputs of early blocks are concatenated to inputs of late ones")
    if not stacks:
        return Cuts(reason="its blocks change the shape of what they pass on")
    flops = {i: sum(o.op.flops * o.share for o in parts[i].ops if o.op.phase == "forward") * parts[i].num_repeats for i in blocks}
    best = max(stacks, key=lambda stack: sum(flops[i] for i in stack))
    if _passes_graph(parts, best, tree):
        return Cuts(reason="message passing over a graph: every block also needs the edges, and sizes change from batch to batch")
    share = sum(flops[i] for i in best) / max(sum(flops.values()), 1e-30)
    if len(stacks) > 1 and share < _ONE_STACK_SHARE:
        names = ", ".join(parts[stack[0]].segment.name for stack in stacks)
        return Cuts(reason=f"{len(stacks)} separate stacks of blocks ({names}), not one chain of equal ones")
    if share < _MIN_STACK_SHARE:
        return Cuts(reason="blocks of different shapes: stages can't be balanced")
    return Cuts(parts=frozenset(best))


def _num_joins(parts: tuple[Part, ...], blocks: list[int]) -> float:
    """Concatenations between blocks, in the code around them."""
    joins = (o.share * parts[i].num_repeats for i in blocks for o in parts[i].ops
             if o.op.name == "cat" and o.op.phase == "forward" and o.module.startswith("-"))  # fmt: skip
    return sum(joins)


def _no_run(parts: tuple[Part, ...], blocks: list[int], tree: Tree) -> str:
    """A block that is called several times is no run of blocks."""
    for i in blocks:
        for unit in parts[i].segment.repeats[0]:
            if (calls := tree.modules[unit.path].num_calls) > 1:
                return f"{unit.path} is called {calls} times with the same weights"
    return ""


def _passes_graph(parts: tuple[Part, ...], stack: list[int], tree: Tree) -> bool:
    """Nodes in the first dimension, and sums over edges inside the blocks."""
    flat = len(_boundary(parts[stack[0]], tree)) == 2
    return flat and any(o.op.name.rstrip("_") in _GRAPH_OPERATORS and o.op.phase == "forward" for i in stack for o in parts[i].ops)


def _boundary(part: Part, tree: Tree) -> Shape:
    return tree.modules[part.segment.repeats[0][-1].path].output_shape


def _stacks(parts: tuple[Part, ...], blocks: list[int], tree: Tree) -> list[list[int]]:
    """Neighbouring parts whose repeats take and return the same shape."""
    stacks: list[list[int]] = []
    for i in blocks:
        first, last = parts[i].segment.repeats[0][0], parts[i].segment.repeats[0][-1]
        shape = tree.modules[last.path].output_shape
        if not shape or tree.modules[first.path].input_shape != shape:
            continue
        if stacks and stacks[-1][-1] == i - 1 and _boundary(parts[i - 1], tree) == shape:
            stacks[-1].append(i)
        else:
            stacks.append([i])
    return [s for s in stacks if any(parts[i].segment.is_run for i in s)]
