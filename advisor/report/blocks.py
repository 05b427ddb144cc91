"""The report's content as blocks, in the order people ask: terminal and HTML draw these and add nothing of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from advisor.report.breakdowns import memory_block, scaling_block, slower_than, time_block
from advisor.report.format import gib, gib_with_unit, interval, per_second, percent, seconds
from advisor.report.report import FindingEntry, PlanEntry, RejectedEntry, Report
from advisor.report.text import Block, Column, Command, Line, Number, Piece, Table, joined
from advisor.words import counted

#: Rows of a table that the terminal shows; the files hold all.
MOST_ROWS = 8
_GOALS = {
    "throughput": "the simplest of the fastest plans that fit",
    "memory": "the plan with the lowest peak",
    "gpus": "the plan on the fewest GPUs",
}


def blocks(report: Report, most_rows: int | None = None) -> tuple[Block, ...]:
    """All blocks below the header.

    Args:
        report: what to show.
        most_rows: plans and rejected plans shown of each, with their first reason; None shows all of them with all reasons.
    """
    return (
        use_this(report), the_others(report, most_rows), time_block(report), memory_block(report), scaling_block(report), watch_out(report),
    )  # fmt: skip


def use_this(report: Report) -> Block:
    """The recommended plan: what it is, what it takes and gives, and the lines to paste."""
    goal = _GOALS.get(str(report.inputs.get("objective")), "the first choice")
    how = f"{goal}; paste the launch line" if report.plans and report.plans[0].launch else goal
    if not report.plans:
        return Block(key="use-this", title="USE THIS", how_to_read=how, headline="No plan fits this cluster.", lines=_closest(report))
    best = report.plans[0]
    written = bool(report.files)  # a line to paste is of use only when its files are there
    commands = _commands(report) if written else []
    sentences = [reason for reason in best.reasons if reason.endswith(".")]
    phrases = [reason for reason in best.reasons if reason not in sentences]
    reasons: list[Line] = [("; ".join(phrases),)] if phrases else []
    reasons += [(sentence,) for sentence in sentences]
    return Block(key="use-this", title="USE THIS", how_to_read=how, headline=f"{best.label}{_batches(best)}",
                 lines=(joined(estimate_items(best)), *reasons), commands=tuple(commands))  # fmt: skip


def _commands(report: Report) -> list[Command]:
    """Lines to paste: what starts the plan, and where nothing does what starts the next plan that can be started."""
    best = report.plans[0]
    commands = [Command(text=best.launch)] if best.launch else []
    if best.launch_plain:
        commands.append(
            Command(text=best.launch_plain, label=f"with PyTorch alone (the line above needs `pip install {best.launch_needs}`)")
        )
    if best.check:
        commands.append(Command(text=best.check, label="check it first"))
    other = next((p for p in report.plans if p.launch), None)
    if other and not best.launch:
        slower = slower_than(other, best)
        commands.append(Command(text=other.launch, label=f"plan {other.rank}{f', {slower}' if slower else ''}, starts as it is"))
    return commands


def _batches(entry: PlanEntry) -> str:
    micro, num = entry.plan.get("micro_batch"), entry.plan.get("num_microbatches")
    total = f" · global batch {entry.plan['global_batch']:,}" if entry.plan.get("global_batch") else ""
    return f" · micro-batch {micro:,} × {num:,}{total}" if micro and num else ""


def _closest(report: Report) -> tuple[Line, ...]:
    known = [r for r in report.rejected if r.needed_bytes is not None]
    if not known:
        return ()
    least = min(known, key=lambda r: r.needed_bytes or 0.0)
    return (("closest: ", least.label, " needs ", Number(gib_with_unit(least.needed_bytes)), f", has {gib(least.available_bytes)}"),)


def estimate_items(entry: PlanEntry) -> list[Line]:
    """The figures of a plan, one short line each."""
    e = entry.estimate
    items: list[Line] = [(Number(seconds(e.get("step_time_s"))), " a step", *_interval(e))]
    rate, unit = throughput(entry)
    items.append((Number(per_second(rate)), f" {unit}"))
    if e.get("mfu") is not None:
        items.append(("MFU ", Number(percent(e["mfu"]))))
    items.append(_peak(e))
    if e.get("communication_share") is not None:
        items.append(("communication ", Number(percent(e["communication_share"])), " of the step"))
    return items


def _interval(estimate: Mapping[str, Any]) -> Line:
    low, high = estimate.get("low_s"), estimate.get("high_s")
    if low is None or high is None:
        return ()
    low_text, high_text = interval(low, high)
    return (" (", Number(low_text), " to ", Number(high_text), ")")


def _peak(estimate: Mapping[str, Any]) -> Line:
    peak, available = estimate.get("peak_memory_bytes"), estimate.get("available_bytes")
    if peak is None:
        return ()
    line: Line = ("peak ", Number(gib_with_unit(peak)))
    if available is not None:
        line = (*line, f" of {gib(available)} (", Number(gib(available - peak)), " free)")
    return line


def throughput(entry: PlanEntry) -> tuple[float | None, str]:
    """Tokens a second where the samples are token sequences, else samples a second, with its unit."""
    tokens_per_s = entry.estimate.get("tokens_per_s")
    return (tokens_per_s, "tokens/s") if tokens_per_s is not None else (entry.estimate.get("samples_per_s"), "samples/s")


def the_others(report: Report, most_rows: int | None) -> Block:
    """The ranking below the first plan, and what can't be had."""
    unit = throughput(report.plans[0])[1] if report.plans else "samples/s"
    others, rejected = report.plans[1:], report.rejected
    shown, refused = others[:most_rows], rejected[:most_rows]
    num_reasons = 1 if most_rows else None
    rows = [_plan_row(entry, report.plans[0], num_reasons) for entry in shown] + [_rejected_row(entry) for entry in refused]
    columns = (
        Column(title="#"), Column(title="strategy", stretches=True), Column(title="step", numeric=True), Column(title=unit, numeric=True),
        Column(title="peak GiB", numeric=True, explains="of the fullest GPU"), Column(title="why not first", stretches=True),
    )  # fmt: skip
    num_more = len(others) + len(rejected) - len(rows)
    return Block(
        key="others", title="THE OTHERS, AND WHY NOT", how_to_read="ranked; the last column is what holds a plan back; ✗ can't be had",
        table=Table(columns=columns, rows=tuple(rows), num_more=num_more) if rows else None,
        lines=() if rows else (("there is no other plan to compare with",),),
    )  # fmt: skip


def _plan_row(entry: PlanEntry, best: PlanEntry, num_reasons: int | None) -> tuple[Line, ...]:
    reason = "; ".join(entry.reasons[:num_reasons])
    if not re.match(r"[+-]?\d", reason):
        reason = ": ".join(part for part in (slower_than(entry, best), reason) if part)
    e = entry.estimate
    return (
        (str(entry.rank),), (entry.label,), (Number(seconds(e.get("step_time_s"))),), (Number(per_second(throughput(entry)[0])),),
        (Number(gib(e.get("peak_memory_bytes"))),), (reason,),
    )  # fmt: skip


def _rejected_row(entry: RejectedEntry) -> tuple[Line, ...]:
    why: Line = (entry.reason,)
    if entry.needed_bytes is not None and entry.available_bytes is not None and "needs" not in entry.reason:
        why = (
            "needs ",
            Number(gib_with_unit(entry.needed_bytes)),
            f", has {gib(entry.available_bytes)}: {entry.reason.removeprefix('does not fit: ')}",
        )
    return (("✗",), (entry.label,), ("-",), ("-",), (Number(gib(entry.needed_bytes)),), why)


def fired(report: Report) -> list[FindingEntry]:
    """Findings that fired, warnings first."""
    return sorted((f for f in report.findings if f.status == "fired"), key=lambda f: f.severity != "warning")


def watch_out(report: Report) -> Block:
    """Warnings of the capture, then the rules that fired, each with its evidence and what to do."""
    lines: list[Line] = [("! ", warning) for warning in report.warnings]
    lines += [_finding_line(finding) for finding in fired(report)]
    if not lines:
        lines = [("no rule fired",)]
    silent = sum(f.status in ("silent", "not-applicable") for f in report.findings)
    unknown = sum(f.status == "not-evaluated" for f in report.findings)
    if silent or unknown:
        unseen = f", {unknown} could not be evaluated" if unknown else ""
        lines.append((f"{counted(silent, 'more rule')} stayed silent{unseen}; all are in report.json",))
    return Block(key="watch-out", title="WATCH OUT", how_to_read="! warning, · note; `advise explain RULE` gives reason and source",
                 lines=tuple(lines))  # fmt: skip


def _finding_line(finding: FindingEntry) -> Line:
    pieces: list[Piece] = ["! " if finding.severity == "warning" else "· ", finding.message]
    if finding.action:
        pieces.append(f" → {finding.action}")
    return (*pieces, f"  [{finding.rule}]")


def footer(report: Report) -> tuple[Line, ...]:
    """What was assumed and what was written."""
    lines: list[Line] = []
    if report.assumptions:
        lines.append(("assumed: ", "; ".join(report.assumptions)))
    if report.files:
        folder = str(report.inputs.get("out") or "").rstrip("/")
        plans = sorted({name.split("/", 1)[0] for name in report.files if "/" in name}, key=lambda name: (len(name), name))
        single = [name for name in report.files if "/" not in name]
        lines.append((f"wrote {folder + '/: ' if folder else ''}", " ".join([*single, *(f"{name}/" for name in plans)])))
    return tuple(lines)


__all__ = ["blocks", "estimate_items", "fired", "footer", "throughput"]
