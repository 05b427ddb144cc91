"""Draws verdicts: one table per plan, a row per check of each engine."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from advisor.verify.verdicts import FAILED, MEASURED, NOT_HERE, PASSED, PlanVerdict
from advisor.words import counted

_STYLES = {PASSED: "green", FAILED: "bold red", NOT_HERE: "yellow", MEASURED: "cyan"}


def print_verdicts(verdicts: Sequence[PlanVerdict], console: Console) -> None:
    """Print all of them, and one line of summary."""
    for verdict in verdicts:
        console.print(f"\n[bold]{escape(verdict.folder)}[/bold]: {escape(verdict.label)}")
        if verdict.shrunk_label:
            console.print(
                f"run as {escape(verdict.shrunk_label)} on {counted(verdict.num_processes, 'process')} over {verdict.backend}, "
                f"{counted(verdict.num_steps, 'step')}" + (f" ({escape('; '.join(verdict.changes))})" if verdict.changes else "")
            )
        console.print(_table(verdict) if verdict.engines else escape(verdict.reason))
    statuses = [check.status for v in verdicts for engine in v.engines for check in engine.checks]
    console.print(", ".join(f"{statuses.count(status)} {status}" for status in _STYLES if status in statuses) or "nothing to verify")


def _table(verdict: PlanVerdict) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("engine", "check", "result", "seen"):
        table.add_column(title, overflow="fold")
    for engine in verdict.engines:
        for i, check in enumerate(engine.checks):
            style = _STYLES[check.status]
            table.add_row(escape(engine.title) if i == 0 else "", check.name, f"[{style}]{check.status}[/{style}]", escape(check.detail))
    return table
