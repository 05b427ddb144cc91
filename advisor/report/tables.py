"""The tables that stand behind the report: layers, cluster, all rules, inputs. HTML shows them; the terminal does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from advisor.report.format import count, gib_with_unit, percent, significant, with_prefix
from advisor.report.report import Report
from advisor.report.text import Column, Line, Number, Table, provenance

_STATUS_ORDER = ("fired", "not-evaluated", "silent", "not-applicable")


def layers_table(report: Report) -> Table:
    """Layer groups with their parameters."""
    total = report.model.get("num_params") or 0
    columns = (Column(title="layer group", stretches=True), Column(title="repeats", numeric=True), Column(title="parameters each", numeric=True),
               Column(title="of the model", numeric=True))  # fmt: skip
    rows = tuple(_layer_row(group, total) for group in report.model.get("layer_groups") or ())
    return Table(columns=columns, rows=rows, caption="The model's layers, in order; repeats are equal")


def _layer_row(group: Mapping[str, Any], total: float) -> tuple[Line, ...]:
    repeats, params = group.get("num_repeats", 1), group.get("num_params", 0)
    return ((str(group.get("name", "")),), (f"{repeats:,}",), (f"{params:,.0f}",), (percent(repeats * params / total if total else None),))


def cluster_table(report: Report) -> Table:
    """Every figure of the cluster with its source."""
    columns = (
        Column(title="figure"),
        Column(title="value", numeric=True),
        Column(title="source"),
        Column(title="reference", stretches=True),
    )
    rows: list[tuple[Line, ...]] = []
    for name, figure in report.cluster.items():
        told = figure if isinstance(figure, Mapping) else {"value": figure}
        source = str(told.get("source") or "")
        rows.append(
            ((_words(name),), (Number(_value(name, told), provenance(source)),), (source or "-",), (str(told.get("reference") or "-"),))
        )
    return Table(columns=columns, rows=tuple(rows), caption="The cluster, with where each figure comes from")


def _words(name: str) -> str:
    """A figure's name for people: "inter_bytes_per_s" is "inter-node bandwidth"."""
    for unit, noun in (("_bytes_per_s", " bandwidth"), ("_flops_per_s", " rate"), ("_bytes", ""), ("_s", "")):
        if name.endswith(unit):
            name = name.removesuffix(unit) + noun
            break
    words = name.removeprefix("num_").replace("_", " ").replace("gpus", "GPUs")
    return words.replace("intra ", "intra-node ").replace("inter ", "inter-node ")


def _value(name: str, figure: Mapping[str, Any]) -> str:
    value = figure.get("value")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    if name.endswith("_bytes_per_s"):
        return with_prefix(value, "B/s")
    if name.endswith("_flops_per_s"):
        return with_prefix(value, "FLOP/s")
    if name.endswith("_bytes"):
        return gib_with_unit(value)
    if name.endswith("_s"):
        return f"{significant(value * 1e6)} µs"
    return f"{value:,}" if isinstance(value, int) else count(value)


def findings_table(report: Report) -> Table:
    """Every rule, whether it fired or not."""
    columns = (Column(title="rule"), Column(title="status"), Column(title="what it says", stretches=True), Column(title="confidence"),
               Column(title="source", stretches=True))  # fmt: skip
    found = sorted(
        report.findings, key=lambda f: (_STATUS_ORDER.index(f.status) if f.status in _STATUS_ORDER else len(_STATUS_ORDER), f.rule)
    )
    rows = tuple(((f.rule,), (f.status,), (f.message or f.title,), (f.confidence or "-",), (f.source or "-",)) for f in found)
    return Table(columns=columns, rows=rows, caption="All rules")


def inputs_table(report: Report) -> Table:
    """What was asked, and of which versions."""
    rows: list[tuple[Line, ...]] = []
    for name, value in report.inputs.items():
        shown = ", ".join(f"{k} {_listed(v)}" for k, v in value.items() if v not in (None, "", ())) if isinstance(value, Mapping) else value
        if shown not in (None, "", ()):
            rows.append(((name.replace("_", " "),), (_listed(shown),)))
    return Table(columns=(Column(title="input"), Column(title="value", stretches=True)), rows=tuple(rows), caption="What was asked")


def _listed(value: Any) -> str:
    return " ".join(str(v) for v in value) if isinstance(value, tuple) else str(value)
