"""The report's content as blocks, in the order people ask: terminal and HTML draw these and add nothing of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from advisor.report.breakdowns import memory_block, scaling_block, slower_than, time_block
from advisor.report.format import count, gib, gib_with_unit, interval, per_second, percent, seconds, with_prefix
from advisor.report.report import FindingEntry, PlanEntry, RejectedEntry, Report
from advisor.report.text import TIE, Block, Column, Command, Line, Number, Piece, Table, joined, provenance
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


def header(report: Report) -> tuple[Line, ...]:
    """Who was looked at, on what cluster, and where the numbers come from."""
    return tuple(line for line in (_model_line(report), _cluster_line(report), _sources_line(report)) if line)


def _model_line(report: Report) -> Line:
    model = report.model
    return joined([
        (str(report.inputs.get("script", "")).rsplit("/", 1)[-1],), (str(model.get("class") or model.get("name") or ""),), _params(model),
        (", ".join(str(model[k]) for k in ("optimizer", "precision") if model.get(k)),), _batch(model),
    ])  # fmt: skip


def _params(model: Mapping[str, Any]) -> Line:
    total, trainable, tied = model.get("num_params"), model.get("num_trainable_params"), model.get("tied")
    if total is None:
        return ()
    ties = f"{len(tied)} tied" if tied else "none tied"
    trained = "all trainable" if trainable == total else f"{count(trainable)} trainable"
    return (Number(count(total), "traced"), f" parameters ({trained}, {ties})")


def _batch(model: Mapping[str, Any]) -> Line:
    batch, seq_len = model.get("batch_size"), model.get("seq_len")
    if not batch:
        return ()
    return (f"{batch:,}{TIE}×{TIE}{int(seq_len):,} tokens a micro-batch" if seq_len else f"{counted(batch, 'sample')} a micro-batch",)


def cluster_figure(report: Report, name: str) -> Any:
    """The value of a figure of the cluster; None if it isn't told."""
    figure = report.cluster.get(name)
    return figure.get("value") if isinstance(figure, Mapping) else figure


def _cluster_line(report: Report) -> Line:
    nodes, per_node = cluster_figure(report, "num_nodes"), cluster_figure(report, "gpus_per_node")
    device = cluster_figure(report, "device")
    if not device:
        return ()
    size: Line = (f"{counted(nodes, 'node')} of {per_node}", *_how(report, "gpus_per_node"), " × ") if nodes and per_node else ()
    links = [_link(report, "intra", "a GPU in the node")] if per_node != 1 else []
    links += [_link(report, "inter", "a node between nodes")] if nodes and nodes > 1 else []
    return ("cluster: ", *joined([(*size, str(device), *_how(report, "device")), *links]))


def _link(report: Report, which: str, where: str) -> Line:
    name, rate = cluster_figure(report, f"{which}_link"), cluster_figure(report, f"{which}_bytes_per_s")
    if not name and not rate:
        return ()
    source = _source(report, f"{which}_bytes_per_s")
    rate_text: Line = (" ", Number(with_prefix(rate, "B/s"), source)) if rate else ()
    return (f"{name or 'link'}", *rate_text, f" {where}")


def _source(report: Report, name: str) -> str:
    figure = report.cluster.get(name)
    return provenance(figure.get("source") if isinstance(figure, Mapping) else None)


def _how(report: Report, name: str) -> Line:
    return (" (assumed)",) if _source(report, name) == "assumed" else ()


def _sources_line(report: Report) -> Line:
    profile, accuracy = report.profile, report.accuracy
    device = profile.get("device")
    how = str(profile.get("source") or "unknown") + (f" on {device}" if device else ", no device used")
    step: Line = ("step: ", how)
    if profile.get("step_time_s"):
        step = (*step, ", ", Number(seconds(profile["step_time_s"]), "measured"))
    return joined([step, _accuracy(accuracy)])


def _accuracy(accuracy: Mapping[str, Any]) -> Line:
    """What the prices rest on, and the error that a user should expect of them."""
    fitted = f"fitted on {counted(accuracy['num_runs'], 'measured run')}, " if accuracy.get("num_runs") else ""
    return (f"prices: {_refit(accuracy)}{fitted}{_unseen_error(accuracy)}",)


def _refit(accuracy: Mapping[str, Any]) -> str:
    """The user's own calibration, which starts from the shipped one."""
    if not accuracy.get("file"):
        return ""
    runs = f", refitted on {counted(accuracy['num_own_runs'], 'run')} of yours" if accuracy.get("num_own_runs") else ""
    own = accuracy.get("own_runs_median_share")
    error = f" (left out in turn: median error {percent(own)})" if own is not None else ""
    return f"{str(accuracy['file']).rsplit('/', 1)[-1]}{runs}{error}; before that "


def _unseen_error(accuracy: Mapping[str, Any]) -> str:
    """The error on runs of a source the fit had not seen; on unseen models where only that is known."""
    if accuracy.get("unseen_source_median_share") is not None:
        return f"error on an unseen source {percent(accuracy['unseen_source_median_share'])} (mean of the sources' medians)"
    if accuracy.get("unseen_model_median_share") is None:
        return "error not known"
    most = accuracy.get("unseen_model_p90_share")
    spread = f", 90% within {percent(most)}" if most is not None else ""
    return f"median error {percent(accuracy['unseen_model_median_share'])} on unseen models{spread}"


def use_this(report: Report) -> Block:
    """The recommended plan: what it is, what it takes and gives, and the lines to paste."""
    goal = _GOALS.get(str(report.inputs.get("objective")), "the first choice")
    how = f"{goal}; paste the launch line"
    if not report.plans:
        return Block(key="use-this", title="USE THIS", how_to_read=how, headline="No plan fits this cluster.", lines=_closest(report))
    best = report.plans[0]
    written = bool(report.files)  # a line to paste is of use only when its files are there
    commands = [Command(text=best.launch)] if written and best.launch else []
    commands += [Command(text=best.check, label="check it first")] if written and best.check else []
    sentences = [reason for reason in best.reasons if reason.endswith(".")]
    phrases = [reason for reason in best.reasons if reason not in sentences]
    reasons: list[Line] = [("; ".join(phrases),)] if phrases else []
    reasons += [(sentence,) for sentence in sentences]
    return Block(key="use-this", title="USE THIS", how_to_read=how, headline=f"{best.label}{_batches(best)}",
                 lines=(joined(estimate_items(best)), *reasons), commands=tuple(commands))  # fmt: skip


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
    if not re.match(r"[+-]\d", reason):
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


__all__ = ["blocks", "cluster_figure", "estimate_items", "fired", "footer", "header", "throughput"]
