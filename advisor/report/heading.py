"""The report's first lines: who was looked at, on what cluster, and what the prices rest on."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

from advisor.report.format import count, percent, seconds, with_prefix
from advisor.report.report import Report
from advisor.report.text import TIE, Line, Number, joined, provenance
from advisor.words import counted


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
    return joined([step, _accuracy(accuracy, str(report.inputs.get("created") or ""))])


def _accuracy(accuracy: Mapping[str, Any], created: str) -> Line:
    """What the prices rest on, and the error that a user should expect of them."""
    runs, when = accuracy.get("num_runs"), _when(accuracy.get("fitted_on"), created)
    fitted = f"fitted on {counted(runs, 'measured run')}{when}, " if runs else ""
    return (f"prices: {_refit(accuracy, created)}{fitted}{_unseen_error(accuracy)}",)


def _when(day: object, created: str) -> str:
    """The day of a fit and its age when the report was made: " on 2026-11-30 (12 days before)"; empty where the day isn't known."""
    if not day:
        return ""
    try:
        age = (date.fromisoformat(created[:10]) - date.fromisoformat(str(day))).days
    except ValueError:
        age = 0
    return f" on {day}" + (f" ({counted(age, 'day')} before)" if age > 0 else "")


def _refit(accuracy: Mapping[str, Any], created: str) -> str:
    """The user's own calibration, which starts from the shipped one."""
    if not accuracy.get("file"):
        return ""
    own_runs, when = accuracy.get("num_own_runs"), _when(accuracy.get("refitted_on"), created)
    runs = f", refitted on {counted(own_runs, 'run')} of yours{when}" if own_runs else when
    own = accuracy.get("own_runs_median_share")
    error = f" (left out in turn: median error {percent(own)})" if own is not None else ""
    return f"{str(accuracy['file']).rsplit('/', 1)[-1]}{runs}{error}; before that "


def _unseen_error(accuracy: Mapping[str, Any]) -> str:
    """The error on runs of a source the fit had not seen; on unseen models where only that is known."""
    if accuracy.get("unseen_source_median_share") is not None:
        return f"median error {percent(accuracy['unseen_source_median_share'])} on sources not fitted on (mean of their medians)"
    if accuracy.get("unseen_model_median_share") is None:
        return "error not known"
    most = accuracy.get("unseen_model_p90_share")
    spread = f", 90% within {percent(most)}" if most is not None else ""
    return f"median error {percent(accuracy['unseen_model_median_share'])} on unseen models{spread}"
