"""The blocks that take a step apart: where the time goes, where the memory goes, how it scales."""

from __future__ import annotations

from collections.abc import Mapping

from advisor.report.format import GIB_BYTES, change, count, gib, gib_with_unit, interval, percent, seconds, significant, with_prefix
from advisor.report.report import Hotspot, PlanEntry, Report, ScalingPoint
from advisor.report.text import TIE, Block, Column, Line, Number, Table, joined
from advisor.search.reasons import MANY_TIMES
from advisor.words import counted

#: Parts of a step and of memory whose name isn't plain English once its underscores are spaces.
_PART_NAMES = {
    "tp_communication": "TP communication", "dp_communication": "DP communication", "fsdp_communication": "FSDP communication",
    "pipeline_p2p": "pipeline send/receive", "logits": "logits + loss", "gathered": "gathered parameters", "reserve": "runtime reserve",
    "recomputed": "recomputed activations", "host_overhead": "host overhead", "fixed": "fixed overhead",
}  # fmt: skip
#: Classes below this share are summed up in the short lines.
_SMALL_SHARE = 0.01
#: Steps that differ by less take the same time for all we know.
_TIE_SHARE = 0.005


def part_name(key: str) -> str:
    """A part's name for people: "pipeline_bubble" is "pipeline bubble"."""
    return _PART_NAMES.get(key, key.removesuffix("_bytes").removesuffix("_s").replace("_", " "))


def nonzero_parts(parts: Mapping[str, float] | None) -> list[tuple[str, float]]:
    """Parts above zero, the largest first."""
    return sorted(((key, value) for key, value in (parts or {}).items() if value and value > 0), key=lambda part: -part[1])


def largest_first(hotspots: tuple[Hotspot, ...]) -> list[Hotspot]:
    """Hotspots by their share of the time."""
    return sorted(hotspots, key=lambda h: -(h.time_share or 0.0))


def time_block(report: Report) -> Block:
    """Where the time goes: classes of operators on one GPU, then the parts of the recommended plan's step."""
    source = report.hotspots[0].source if report.hotspots else "modelled"
    lines: list[Line] = []
    if report.hotspots:
        lines.append(_hotspots_line(report))
    if report.plans:
        lines.append(_step_line(report.plans[0]))
    details = [table for table in (_hotspots_table(report), _step_table(report)) if table.rows]
    how = f"one micro-batch on one GPU by class, {source}; then plan 1's step"
    return Block(key="time", title="WHERE THE TIME GOES", how_to_read=how, lines=tuple(lines) or (("nothing was recorded",),),
                 details=tuple(details))  # fmt: skip


def _hotspots_line(report: Report) -> Line:
    shown = [h for h in largest_first(report.hotspots) if h.time_share >= _SMALL_SHARE]
    items: list[Line] = []
    for h in shown:
        bound = f" {h.bound_by}-bound" if h.bound_by and h.op_class != "idle" else ""
        items.append((f"{h.op_class} ", Number(percent(h.time_share), h.source), bound))
    rest = sum(h.time_share for h in report.hotspots if h.time_share < _SMALL_SHARE)
    if rest > 0:
        items.append(("others ", Number(percent(rest), report.hotspots[0].source)))
    return joined(items)


def _step_line(entry: PlanEntry) -> Line:
    step_s = entry.estimate.get("step_time_s")
    shares = [(key, value / step_s) for key, value in nonzero_parts(entry.estimate.get("breakdown_s"))] if step_s else []
    items = [(f"{part_name(key)} ", Number(percent(share))) for key, share in shares if share >= _SMALL_SHARE]
    return ("plan 1's step: ", *joined(items)) if items else ()


def _hotspots_table(report: Report) -> Table:
    columns = (
        Column(title="class"), Column(title="share", numeric=True), Column(title="time", numeric=True),
        Column(title="calls", numeric=True), Column(title="work", numeric=True, explains="floating-point operations, multiply-add is 2"),
        Column(title="moved", numeric=True, explains="bytes read and written"),
        Column(title="achieved", numeric=True, explains="operations a second"),
        Column(title="of roofline", numeric=True, explains="achieved over what compute and memory rates allow"), Column(title="bound by"),
    )  # fmt: skip
    rows = tuple(_hotspot_row(h) for h in largest_first(report.hotspots))
    return Table(columns=columns, rows=rows, caption="One micro-batch on one GPU; backward counts with its forward operator's class")


def _hotspot_row(h: Hotspot) -> tuple[Line, ...]:
    return (
        (h.op_class,), (Number(percent(h.time_share), h.source),), (Number(seconds(h.time_s), h.source),), (count(h.num_calls),),
        (Number(with_prefix(h.flops or None, "FLOP"), "traced"),), (Number(gib_with_unit(h.bytes or None), "traced"),),
        (Number(with_prefix(h.achieved_flops_per_s or None, "FLOP/s"), h.source),),
        (Number(percent(h.roofline_share or None), h.source),), (h.bound_by or "-",),
    )  # fmt: skip


def _parts_table(plans: tuple[PlanEntry, ...], field: str, total: str, caption: str, shown: str) -> Table:
    """One row per part, one column per plan (the first five), the sum at the foot."""
    plans = tuple(p for p in plans if p.estimate.get(field))[:5]
    keys = list(dict.fromkeys(key for p in plans for key, _ in nonzero_parts(p.estimate[field])))
    columns = (Column(title="part"), *(Column(title=f"plan {p.rank}", numeric=True, explains=p.label) for p in plans))
    write = gib if shown == "gib" else seconds
    rows: list[tuple[Line, ...]] = [
        ((part_name(key),), *((Number(write(p.estimate[field].get(key) or None)),) for p in plans)) for key in keys
    ]  # fmt: skip
    if rows:
        rows.append((("sum",), *((Number(write(p.estimate.get(total))),) for p in plans)))
    return Table(columns=columns, rows=tuple(rows), caption=caption, has_total=True)


def _step_table(report: Report) -> Table:
    return _parts_table(report.plans, "breakdown_s", "step_time_s", "One optimizer step, seconds on the critical path", "seconds")


def memory_block(report: Report) -> Block:
    """Where the memory goes: the recommended plan's peak by part, the three moments, and the script on one GPU."""
    lines: list[Line] = []
    if report.plans:
        lines += [_plan_memory_line(report.plans[0]), _moments_line(report.plans[0])]
    if report.memory:
        lines += [_single_gpu_line(report), _measured_line(report)]
    table = _parts_table(report.plans, "breakdown_bytes", "peak_memory_bytes", "Peak of the fullest GPU, GiB", "gib")
    return Block(key="memory", title="WHERE THE MEMORY GOES", how_to_read="GiB per GPU, largest part first; at load, in the step, at save",
                 lines=tuple(line for line in lines if line) or (("nothing was estimated",),), details=(table,) if table.rows else ())  # fmt: skip


def _parts_line(parts: Mapping[str, float] | None) -> Line:
    known = nonzero_parts(parts)
    small_bytes = _SMALL_SHARE * sum(value for _, value in known)
    items: list[Line] = [(f"{part_name(key)} ", Number(gib(value))) for key, value in known if value >= small_bytes]
    rest = sum(value for _, value in known if value < small_bytes)
    return joined([*items, ("others ", Number(gib(rest)))] if rest >= GIB_BYTES / 1000 else items)


def _plan_memory_line(entry: PlanEntry) -> Line:
    parts = _parts_line(entry.estimate.get("breakdown_bytes"))
    return ("plan 1: ", *parts, " = ", Number(gib_with_unit(entry.estimate.get("peak_memory_bytes")))) if parts else ()


def _moments_line(entry: PlanEntry) -> Line:
    moments = [("at load", "load_memory_bytes"), ("in the step", "peak_memory_bytes"), ("at save", "save_memory_bytes")]
    known = [(f"{name} ", Number(gib(entry.estimate.get(key)))) for name, key in moments if entry.estimate.get(key) is not None]
    return (*joined(known), " GiB") if len(known) > 1 else ()


def single_gpu_parts(report: Report) -> dict[str, float]:
    """Memory of the script on one GPU by part, bytes."""
    parts = report.memory.get("breakdown_bytes")
    if parts:
        return dict(parts)
    totals = ("peak", "total", "high", "load", "save", "device", "available", "measured", "allocated")
    return {k: v for k, v in report.memory.items() if k.endswith("_bytes") and not k.startswith(totals) and isinstance(v, (int, float))}


def _single_gpu_line(report: Report) -> Line:
    parts = single_gpu_parts(report)
    if not parts:
        return ()
    total = report.memory.get("peak_memory_bytes") or sum(parts.values())
    return ("one GPU alone, not split: ", *_parts_line(parts), " = ", Number(gib_with_unit(total)))


def _measured_line(report: Report) -> Line:
    measured = report.profile.get("peak_memory_bytes")
    where = report.profile.get("device") or "this machine"
    return ("measured peak of the script as it is: ", Number(gib_with_unit(measured), "measured"), f" on {where}") if measured else ()


def scaling_block(report: Report) -> Block:
    """How it scales: the best plan at other cluster sizes, and the fewest GPUs that hold the model."""
    points = sorted(report.scaling, key=lambda p: p.num_gpus)
    lines: list[Line] = [joined([_point(p) for p in points]), _smallest_line(report, points)]
    table = _scaling_table(points)
    return Block(key="scaling", title="HOW IT SCALES", how_to_read="time a step with other numbers of GPUs, same global batch",
                 lines=tuple(line for line in lines if line) or (("no other cluster size was priced",),),
                 details=(table,) if table.rows else ())  # fmt: skip


def _point(point: ScalingPoint) -> Line:
    head = f"{counted(point.num_gpus, 'GPU').replace(' ', TIE)}: "
    if point.step_time_s is None:
        over: Line = (" (", Number(gib_with_unit(point.short_by_bytes)), " over)") if point.short_by_bytes is not None else ()
        return (head, "does not fit", *over)
    return (head, Number(seconds(point.step_time_s)))


def _smallest_line(report: Report, points: list[ScalingPoint]) -> Line:
    if report.smallest_num_gpus:
        known = [_smallest(name, n) for name, n in report.smallest_num_gpus.items() if not _is_offload_idle(name, report.smallest_num_gpus)]
        return ("fewest GPUs that hold it: ", *joined(known))
    fitting = [p for p in points if p.step_time_s is not None]
    return (f"fewest of these sizes that fit: {fitting[0].num_gpus:,} ({fitting[0].label})",) if fitting else ()


def _smallest(name: str, num_gpus: int | None) -> Line:
    if num_gpus == 1:
        return (name,)
    return (f"{name} ", Number(f"{num_gpus:,}") if num_gpus else "at no size tried")


def _is_offload_idle(name: str, smallest: Mapping[str, int | None]) -> bool:
    """Whether offloading brings a strategy onto no fewer GPUs than it needs without."""
    plain = name.removesuffix(" + offload")
    without, with_it = smallest.get(plain), smallest[name]
    return plain != name and without is not None and (with_it is None or without <= with_it)


def _scaling_table(points: list[ScalingPoint]) -> Table:
    columns = (
        Column(title="GPUs", numeric=True), Column(title="best plan", stretches=True), Column(title="step", numeric=True),
        Column(title="80% interval", numeric=True), Column(title="samples/s", numeric=True),
        Column(title="efficiency", numeric=True, explains="speed-up over the smallest size that fits, divided by the growth in GPUs"),
        Column(title="peak GiB", numeric=True),
    )  # fmt: skip
    base = next((p for p in points if p.samples_per_s), None)
    return Table(columns=columns, rows=tuple(_scaling_row(p, base) for p in points), caption="The best plan of each size")


def _scaling_row(point: ScalingPoint, base: ScalingPoint | None) -> tuple[Line, ...]:
    size, peak = (f"{point.num_gpus:,}",), (Number(gib(point.peak_memory_bytes)),)
    if point.step_time_s is None:
        text = f"does not fit: {point.label}" if point.label else "does not fit"
        return (size, (text,), ("-",), ("-",), ("-",), ("-",), peak)
    return (
        size, (point.label,), (Number(seconds(point.step_time_s)),), (Number(" to ".join(interval(point.low_s, point.high_s))),),
        (Number(significant(point.samples_per_s)),), (Number(percent(efficiency(point, base))),), peak,
    )  # fmt: skip


def efficiency(point: ScalingPoint, base: ScalingPoint | None) -> float | None:
    """Speed-up over the base size divided by the growth in GPUs; 1 is ideal."""
    if base is None or not base.samples_per_s or not point.samples_per_s:
        return None
    return point.samples_per_s / base.samples_per_s * base.num_gpus / point.num_gpus


def slower_than(entry: PlanEntry, best: PlanEntry) -> str:
    """How much longer a plan's step takes than the recommended one's: "+12.3%", "24 times the time"; nothing below half a percent."""
    mine, its = entry.estimate.get("step_time_s"), best.estimate.get("step_time_s")
    if not mine or not its or abs(mine / its - 1) < _TIE_SHARE:
        return ""
    return change(mine / its - 1) if mine / its < MANY_TIMES else f"{mine / its:,.0f} times the time"
