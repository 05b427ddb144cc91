"""The module tree cut into units (blocks, stages, single layers) and units into segments (runs of equal ones) in execution order.

A unit is a module that is handed over whole: to a pipeline stage, a checkpoint, a sharding wrapper. Found from the outside in:

- lists (Sequential, ModuleList, anything never called itself) are opened;
- children of one list that are equal (class, sizes of their weights, calls, output) are blocks, and what stands beside them in that
  list is a unit as well; nothing inside a block is looked at, so experts never pass for layers;
- another module is opened only if such blocks hide inside it; else it is a unit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from advisor.workload.records import LIST_CLASSES, Shape, Tree, ancestors, parent

#: Parameters below this share of a block's own do not tell blocks apart (a bias table that only the first block has).
_SMALL_SHARE = 0.01
_MAX_PERIOD = 4
#: A single layer with this share of the model's forward flops starts a segment of its own.
_HEAVY_SHARE = 0.05

UnitKey = tuple[str, str, int, tuple[Shape, ...], Shape, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module handed over whole."""

    path: str
    is_block: bool  # called itself, with several weights inside
    key: UnitKey  # equal for units that do the same work


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Equal repeats, each of one or more units; or one repeat that holds the single layers between two blocks."""

    name: str
    repeats: tuple[tuple[Unit, ...], ...]

    @property
    def is_run(self) -> bool:
        return len(self.repeats) > 1

    @property
    def is_blocks(self) -> bool:
        return any(unit.is_block for unit in self.repeats[0])


def find_segments(tree: Tree) -> list[Segment]:
    """Segments in execution order; every module with parameters or operators, except weightless glue, is in exactly one unit."""
    units = [_unit(tree, path) for path in _unit_paths(tree, "") if not _is_alias_only(tree, path)]
    last = max((op.call for op in tree.ops), default=0) + 1
    units.sort(key=lambda u: tree.first_call_below.get(u.path, last))
    segments: list[Segment] = []
    loose: list[Unit] = []
    total_flops = max(tree.forward_flops_below.get("", 0.0), 1.0)
    i = 0
    while i < len(units):
        period, repeats = _run_length(units, i)
        heavy = tree.forward_flops_below.get(units[i].path, 0.0) > _HEAVY_SHARE * total_flops
        if loose and (repeats > 1 or units[i].is_block or (heavy and _any_heavy(tree, loose, total_flops))):
            segments.append(_loose_segment(tree, loose))
            loose = []
        if repeats > 1 or units[i].is_block:
            run = units[i : i + period * repeats]
            segments.append(_run_segment(tree, [tuple(run[j : j + period]) for j in range(0, len(run), period)]))
        else:
            loose.append(units[i])
        i += period * repeats
    return [*segments, _loose_segment(tree, loose)] if loose else segments


def _is_alias_only(tree: Tree, path: str) -> bool:
    """Never called, and all it owns is used under another name (the shared table of an encoder-decoder)."""
    return path not in tree.first_call_below and all(p.aliases for p in tree.params_below[path])


def _any_heavy(tree: Tree, units: list[Unit], total_flops: float) -> bool:
    return any(tree.forward_flops_below.get(u.path, 0.0) > _HEAVY_SHARE * total_flops for u in units)


def _unit_paths(tree: Tree, path: str) -> list[str]:
    """Units below a module, itself if it is one; none for modules that neither own parameters nor hold one that does."""
    if path not in tree.weighted:
        return []
    kids = [kid for kid in tree.children[path] if kid in tree.weighted]
    if not kids:
        return [path]
    if path and not _is_opened(tree, path):
        return [path]
    if _has_equal_blocks(tree, path):
        return [unit for kid in kids for unit in ([kid] if _is_block(tree, kid) else _unit_paths(tree, kid))]
    return [unit for kid in kids for unit in _unit_paths(tree, kid)]


def _is_opened(tree: Tree, path: str) -> bool:
    module = tree.modules[path]
    if module.num_calls == 0 or module.class_name in LIST_CLASSES:
        return True
    return any(_has_equal_blocks(tree, p) for p in _descendants(tree, path))


def _descendants(tree: Tree, path: str) -> list[str]:
    found = [path]
    for p in found:
        found.extend(tree.children[p])
    return found


def _has_equal_blocks(tree: Tree, path: str) -> bool:
    """Whether two numbered children of a module are equal blocks."""
    seen: set[UnitKey] = set()
    for kid in tree.children[path]:
        if not kid[-1].isdigit() or not _is_block(tree, kid):
            continue
        key = _unit(tree, kid).key
        if key in seen:
            return True
        seen.add(key)
    return False


def _is_block(tree: Tree, path: str) -> bool:
    """Called itself, at least two weights inside, and no mere list of further blocks."""
    module = tree.modules[path]
    if module.num_calls == 0 or len([p for p in tree.params_below[path] if len(p.shape) > 1]) < 2:
        return False
    if module.class_name not in LIST_CLASSES:
        return bool(tree.children[path])
    return all(not tree.children[kid] for kid in tree.children[path])


def _unit(tree: Tree, path: str) -> Unit:
    module, params = tree.modules[path], tree.params_below[path]
    floor = _SMALL_SHARE * sum(p.num_elements for p in params)
    shapes = tuple(sorted(p.shape for p in params if p.num_elements >= floor))
    flops = tree.forward_flops_below.get(path, 0.0)
    rounded = float(f"{flops:.1e}")
    key = (_pattern(path), module.class_name, module.num_calls, shapes, module.output_shape, rounded)
    return Unit(path=path, is_block=bool(path) and _is_block(tree, path), key=key)


def _pattern(path: str) -> str:
    """The path with every number replaced: equal for entries of one list."""
    return re.sub(r"\d+(?=\.|$)", "*", path)


def _run_length(units: list[Unit], start: int) -> tuple[int, int]:
    """(units per repeat, repeats) of the longest run of equal repeats that begins here; (1, 1) for none."""
    best = (1, 1)
    for period in range(1, min(_MAX_PERIOD, (len(units) - start) // 2) + 1):
        first = [u.key for u in units[start : start + period]]
        if not all("*" in key[0] for key in first):
            continue
        repeats = 1
        while _follows(units[start + period * (repeats - 1) : start + period * (repeats + 1)], first):
            repeats += 1
        if repeats > 1 and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best


def _follows(units: list[Unit], keys: list[UnitKey]) -> bool:
    """Whether two equal repeats follow each other, no list entry ("up.4" of "up.4.0" and "up.4.1") being torn between them."""
    period = len(keys)
    if [u.key for u in units[period:]] != keys:
        return False
    entries: tuple[set[str], set[str]] = (set(), set())
    for u, v in zip(units[:period], units[period:], strict=True):
        parts = (u.path.split("."), v.path.split("."))
        at = next(i for i, (a, b) in enumerate(zip(*parts, strict=True)) if a != b)
        for found, path in zip(entries, parts, strict=True):
            if len(path) > at + 1:
                found.add(".".join(path[: at + 1]))
    return not entries[0] & entries[1]


def _run_segment(tree: Tree, repeats: list[tuple[Unit, ...]]) -> Segment:
    parts = [_common_name(tree, [repeat[i].path for repeat in repeats]) for i in range(len(repeats[0]))]
    return Segment(name=" + ".join(dict.fromkeys(parts)), repeats=tuple(repeats))


def _common_name(tree: Tree, paths: list[str]) -> str:
    """Paths of equal depth as one: "layers.*" for the whole of a list, "layers.1-5" for a part of it."""
    columns = list(zip(*(path.split(".") for path in paths), strict=True))
    varying = [i for i, parts in enumerate(columns) if len(set(parts)) > 1]
    names = [parts[0] if i not in varying else re.sub(r"\d+$", "", parts[0]) + "*" for i, parts in enumerate(columns)]
    if len(varying) == 1:
        at, above = varying[0], ".".join(columns[i][0] for i in range(varying[0]))
        siblings = [kid for kid in tree.children[above] if _pattern(kid) == _pattern(".".join(paths[0].split(".")[: at + 1]))]
        if len(siblings) > len(paths):
            names[at] = columns[at][0] + "-" + re.sub(r"^\D*", "", columns[at][-1])
    return ".".join(names)


def _loose_segment(tree: Tree, units: list[Unit]) -> Segment:
    paths = [u.path or "(model)" for u in units]
    above = parent(paths[0])
    if len(units) > 1 and above and set(paths) == {kid for kid in tree.children[above] if kid in tree.weighted}:
        paths = [above]
    name = " + ".join(paths) if len(paths) <= 3 else f"{paths[0]} .. {paths[-1]}"
    return Segment(name=name, repeats=(tuple(units),))


def unit_of_modules(tree: Tree, segments: list[Segment]) -> dict[str, tuple[int, int, str]]:
    """(segment, repeat, unit path) of every module that lies in a unit; modules around and between units are absent."""
    homes = {u.path: (s, r, u.path) for s, segment in enumerate(segments) for r, repeat in enumerate(segment.repeats) for u in repeat}
    found: dict[str, tuple[int, int, str]] = {}
    for path in tree.modules:
        for above in ancestors(path):
            if above in homes:
                found[path] = homes[above]
                break
    return found
