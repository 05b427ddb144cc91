"""Each operator row and each parameter to exactly one segment; the repeats of a segment folded into one mean repeat.

Rows that lie in no unit (a residual sum in the root's forward, the loss) go to a neighbour in execution order. Repeats may differ
a little (the first block needs no input gradient, a table is computed once): a row that only some repeats have counts with that share,
so a mean repeat times the number of repeats gives the profile's totals exactly.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field

from advisor.workload.records import Op, Parameter, Tree
from advisor.workload.units import Segment, Unit, find_segments, unit_of_modules

#: Phases that are priced as operators; optimizer rows are priced from states, data rows as input copies.
PASS_PHASES = ("forward", "backward", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOp:
    """An operator of the mean repeat."""

    op: Op  # as one repeat showed it
    module: str  # relative to the repeat: "0:self_attn.q_proj"; "-" and a path outside of it
    weight: str  # likewise, "" if none
    share: float  # of the repeats that have it
    saved_bytes: float  # mean over all repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A segment with what belongs to it."""

    segment: Segment
    ops: tuple[LocalOp, ...]  # forward and backward of the mean repeat
    recomputed: tuple[LocalOp, ...]  # forward run again by a checkpoint of the script
    parameters: tuple[Parameter, ...]  # of all repeats

    @property
    def num_repeats(self) -> int:
        return len(self.segment.repeats)


@dataclass(slots=True)
class _Draft:
    segment: Segment
    rows: list[tuple[int, Op]] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)


def find_parts(tree: Tree) -> tuple[Part, ...]:
    """Segments in execution order with their operators and parameters."""
    segments = find_segments(tree)
    if not segments:
        segments = [_outside("(model)")]
    homes = unit_of_modules(tree, segments)
    drafts = [_Draft(segment=s) for s in segments]
    before, after = _Draft(segment=_outside("(inputs)")), _Draft(segment=_outside("(loss)"))
    for phase in PASS_PHASES:
        rows = [op for op in tree.ops if op.phase == phase]
        places = [homes[op.module][:2] if op.module in homes else None for op in rows]
        for op, place in zip(rows, _fill(places, segments, backward=phase == "backward"), strict=True):
            draft = before if place[0] < 0 else after if place[0] >= len(drafts) else drafts[place[0]]
            draft.rows.append((place[1], op))
    ordered = [d for d in (before, *drafts, after) if d.rows or d not in (before, after)]
    _place_parameters(tree, ordered, homes, offset=int(ordered[0] is before))
    unit_paths = {path: home[2] for path, home in homes.items()}
    return tuple(_part(d, unit_paths, tree) for d in ordered)


def _outside(name: str) -> Segment:
    unit = Unit(path="", is_block=False, key=(name, "", 1, (), (), 0.0))
    return Segment(name=name, repeats=((unit,),))


def _fill(places: list[tuple[int, int] | None], segments: list[Segment], *, backward: bool) -> list[tuple[int, int]]:
    """A place for each row; glue joins a neighbour, by preference one that is not a run. -1: before all, len(segments): after all."""
    if backward:
        return _fill(places[::-1], segments, backward=False)[::-1]
    following: list[tuple[int, int] | None] = []
    upcoming: tuple[int, int] | None = None
    for place in reversed(places):
        upcoming = place or upcoming
        following.append(upcoming)
    result: list[tuple[int, int]] = []
    previous: tuple[int, int] | None = None
    for place, after in zip(places, reversed(following), strict=True):
        previous = place or previous
        result.append(place or _neighbour(previous, after, segments))
    return result


def _neighbour(before: tuple[int, int] | None, after: tuple[int, int] | None, segments: list[Segment]) -> tuple[int, int]:
    if before is None:
        if after is None:
            return (0, 0)
        return (-1, 0) if segments[after[0]].is_run else after
    if after is None:
        return (len(segments), 0) if segments[before[0]].is_run else before
    if before[0] != after[0] and segments[before[0]].is_run and not segments[after[0]].is_run:
        return after
    return before


def _place_parameters(tree: Tree, drafts: list[_Draft], homes: dict[str, tuple[int, int, str]], *, offset: int) -> None:
    """By the owning module; parameters of opened containers by the first row that uses them, unused ones to the nearest module."""
    users: dict[str, _Draft] = {}
    for draft in drafts:
        for _repeat, op in draft.rows:
            if op.weight in tree.parameter_by_name:
                users.setdefault(tree.parameter_by_name[op.weight].name, draft)
    for p in tree.parameters:
        called = tree.modules[p.module].num_calls > 0 or p.name not in users
        if p.module in homes and called:
            drafts[homes[p.module][0] + offset].parameters.append(p)
        else:
            draft = users.get(p.name) or next((d for d in drafts if not d.segment.is_run), drafts[-1])
            draft.parameters.append(p)


def _part(draft: _Draft, unit_paths: dict[str, str], tree: Tree) -> Part:
    passes = [(r, op) for r, op in draft.rows if op.phase != "recompute"]
    again = [(r, op) for r, op in draft.rows if op.phase == "recompute"]
    index = {u.path: str(i) for repeat in draft.segment.repeats for i, u in enumerate(repeat)}
    return Part(segment=draft.segment, ops=_fold(passes, draft, unit_paths, index, tree), parameters=tuple(draft.parameters),
                recomputed=_fold(again, draft, unit_paths, index, tree))  # fmt: skip


def _fold(rows: list[tuple[int, Op]], draft: _Draft, unit_paths: dict[str, str], index: dict[str, str], tree: Tree) -> tuple[LocalOp, ...]:
    """The mean repeat: rows with equal place, operator, shapes and order of occurrence are one."""
    num_repeats = len(draft.segment.repeats)

    def local(path: str) -> str:
        unit = unit_paths.get(path)
        if unit is None or unit not in index:
            return f"-{path}"
        return f"{index[unit]}:{path[len(unit) :].lstrip('.')}"

    seen: Counter[tuple[object, ...]] = Counter()
    merged: dict[tuple[object, ...], list[float]] = {}
    first: dict[tuple[object, ...], tuple[Op, str, str]] = {}
    for repeat, op in rows:
        module, weight = local(op.module), ""
        p = _weight(op, tree)
        if p is not None:
            weight = f"{local(p.module)}.{p.name[len(p.module) :].lstrip('.')}"
        what = (module, op.phase, op.name, op.inputs, op.outputs, weight)
        seen[repeat, what] += 1
        key = (*what, seen[repeat, what])
        first.setdefault(key, (op if p is None or p.name == op.weight else dataclasses.replace(op, weight=p.name), module, weight))
        counted = merged.setdefault(key, [0.0, 0.0])
        counted[0] += 1.0
        counted[1] += op.saved_bytes
    return tuple(
        LocalOp(op=op, module=module, weight=weight, share=merged[key][0] / num_repeats, saved_bytes=merged[key][1] / num_repeats)
        for key, (op, module, weight) in first.items()
    )


def _weight(op: Op, tree: Tree) -> Parameter | None:
    """The parameter that an operator works with; of a product that also adds a bias the matrix, not the bias."""
    named = tree.parameter_by_name.get(op.weight)
    if named is None or len(named.shape) > 1 or op.op_class not in ("matmul", "convolution"):
        return named
    matrices = (p for p in tree.params_below.get(named.module, ()) if p.module == named.module and len(p.shape) > 1)
    return next((p for p in matrices if p.shape in op.inputs or p.shape[::-1] in op.inputs), named)
