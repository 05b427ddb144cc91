"""Where a pipeline stage may end: after a repeat whose output is the only tensor handed on, in one stack of equal blocks."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.workload.assign import Part
from advisor.workload.records import Shape, Tree

#: Share of the forward flops of all blocks that must lie in the stack.
_MIN_STACK_SHARE = 0.6
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
        recurrent = any(
            o.op.op_class == "recurrent" or tree.modules[o.op.module].class_name in ("LSTM", "GRU", "RNN") for p in parts for o in p.ops
        )
        return Cuts(reason="recurrent layers wait for each time step" if recurrent else "no repeated blocks to spread over stages")
    shared = next((i for i in blocks for u in parts[i].segment.repeats[0] if tree.modules[u.path].num_calls > 1), None)
    if shared is not None:
        unit = parts[shared].segment.repeats[0][0].path
        return Cuts(reason=f"{unit} is called {tree.modules[unit].num_calls} times with the same weights")
    flops = {i: sum(o.op.flops * o.share for o in parts[i].ops if o.op.phase == "forward") * parts[i].num_repeats for i in blocks}
    stacks = _stacks(parts, blocks, tree)
    if not stacks:
        return Cuts(reason="its blocks change the shape of what they pass on")
    best = max(stacks, key=lambda s: sum(flops[i] for i in s))
    share = sum(flops[i] for i in best) / max(sum(flops.values()), 1e-30)
    if any(o.op.name.rstrip("_") in _GRAPH_OPERATORS and o.op.phase == "forward" for i in best for o in parts[i].ops) and _boundary(parts[best[0]], tree)[1:2] and len(_boundary(parts[best[0]], tree)) == 2:  # fmt: skip
        return Cuts(reason="message passing over a graph: every block also needs the edges, and sizes change from batch to batch")
    if len(stacks) > 1 and share < 1 - 1e-9 and share < 0.95:
        return Cuts(
            reason=f"{len(stacks)} separate stacks of blocks ({', '.join(parts[s[0]].segment.name for s in stacks)}), not one chain"
        )
    if share < _MIN_STACK_SHARE:
        return Cuts(reason="blocks of different shapes: stages can't be balanced")
    return Cuts(parts=frozenset(best))


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
