"""Figures of a report, as plotly draws them: in report.html and in notebooks. Each is None where there is nothing to draw.

Colours are Okabe and Ito's, which colour-blind people tell apart; symbols, patterns and labels say the same again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from advisor.report.blocks import throughput
from advisor.report.breakdowns import largest_first, nonzero_parts, part_name, single_gpu_parts
from advisor.report.format import GIB_BYTES, gib_with_unit, per_second, percent, seconds, significant, with_prefix
from advisor.report.heading import cluster_figure
from advisor.report.report import PlanEntry, Report

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b3a52a", "#8c8c8c")
_PATTERNS = ("", "/", ".", "x")
_SYMBOLS = {"compute": "circle", "memory": "square", "latency": "diamond", "communication": "triangle-up", "host": "x"}
_GREY = "#8c8c8c"
#: Plans in the bars; more make them unreadable.
_MOST_BARS = 8
#: Classes below this share get no bar.
_SMALLEST_SHARE = 1e-3
#: Marks closer than this share of the axis share a label.
_NEAR_SHARE = 0.02
#: A limit further off than this many times the highest mark is told in words, not drawn: it would squeeze the marks.
_MOST_HEADROOM = 2.5


def _layout(figure: go.Figure, title: str, height: int = 400, **settings: Any) -> go.Figure:
    """The common look; the page or the notebook brings the colour of text and paper."""
    figure.update_layout(
        title={"text": title, "x": 0, "xref": "container", "xanchor": "left"}, margin={"l": 64, "r": 16, "t": 48, "b": 48}, height=height,
        font={"family": "system-ui, sans-serif", "size": 13}, plot_bgcolor="rgba(0,0,0,0)", paper_bgcolor="rgba(0,0,0,0)", template="none",
        hoverlabel={"align": "left"}, legend={"orientation": "h", "y": 1, "yanchor": "bottom", "traceorder": "normal"}, **settings,
    )  # fmt: skip
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(gridcolor="rgba(128,128,128,0.25)", zeroline=False, automargin=True, title={"font": {"size": 13}, "standoff": 8})
    return figure


def memory_against_speed(report: Report) -> go.Figure | None:
    """Every ranked plan by throughput and peak memory, with the Pareto front and the limit."""
    plans = [p for p in report.plans if throughput(p)[0] and p.estimate.get("peak_memory_bytes")]
    if not plans:
        return None
    figure = go.Figure()
    front = pareto_front(plans)
    figure.add_scatter(x=[throughput(p)[0] for p in front], y=[_peak_gib(p) for p in front], mode="lines", name="Pareto front",
                       line={"color": _GREY, "dash": "dot", "shape": "vh"}, hoverinfo="skip")  # fmt: skip
    _add_plans(figure, plans[1:], "other plans", _rank_labels(plans), {"size": 10, "symbol": "circle", "color": COLOURS[1]})
    _add_plans(figure, plans[:1], "recommended", _rank_labels(plans), {"size": 15, "symbol": "star", "color": COLOURS[0]})
    available, top = (plans[0].estimate.get("available_bytes") or 0.0) / GIB_BYTES, max(_peak_gib(p) for p in plans)
    if 0 < available < _MOST_HEADROOM * top:
        figure.add_hline(
            y=available, line={"color": COLOURS[5], "dash": "dash"}, showlegend=True, name=f"usable, {significant(available)} GiB"
        )
        top = max(top, available)
    limit = f" ({significant(available)} usable)" if available else ""
    return _layout(figure, "Memory against speed", xaxis={"title": throughput(plans[0])[1]},
                   yaxis={"title": f"peak GiB per GPU{limit}", "range": [0, 1.15 * top]})  # fmt: skip


def _add_plans(figure: go.Figure, plans: Sequence[PlanEntry], name: str, labels: Mapping[int, str], marker: dict[str, Any]) -> None:
    if plans:
        figure.add_scatter(
            x=[throughput(p)[0] for p in plans], y=[_peak_gib(p) for p in plans], mode="markers+text", name=name, marker=marker,
            text=[labels[p.rank] for p in plans], textposition="top center", hovertext=[_plan_hover(p) for p in plans], hoverinfo="text",
        )  # fmt: skip


def _rank_labels(plans: Sequence[PlanEntry]) -> dict[int, str]:
    """Rank -> label. Plans that lie on each other share the label of the first, "1, 2"; the others' are empty."""
    rates, peaks = [throughput(p)[0] or 0.0 for p in plans], [_peak_gib(p) for p in plans]
    near_x, near_y = _NEAR_SHARE * (max(rates) - min(rates)), _NEAR_SHARE * 2 * max(peaks)
    labels: dict[int, str] = {}
    heads: list[tuple[int, float, float]] = []
    for p, rate, peak in zip(plans, rates, peaks, strict=True):
        head = next((rank for rank, x, y in heads if abs(x - rate) <= near_x and abs(y - peak) <= near_y), None)
        if head is None:
            heads.append((p.rank, rate, peak))
            labels[p.rank] = str(p.rank)
        else:
            labels[head] += f", {p.rank}"
            labels[p.rank] = ""
    return labels


def _peak_gib(entry: PlanEntry) -> float:
    return float(entry.estimate["peak_memory_bytes"]) / GIB_BYTES


def _plan_hover(entry: PlanEntry) -> str:
    e, unit = entry.estimate, throughput(entry)[1]
    return (f"{entry.rank}. {_escaped(entry.label)}<br>{seconds(e.get('step_time_s'))} a step<br>{per_second(throughput(entry)[0])} {unit}"
            f"<br>peak {gib_with_unit(e.get('peak_memory_bytes'))}")  # fmt: skip


def pareto_front(plans: Sequence[PlanEntry]) -> list[PlanEntry]:
    """Plans than which none is both faster and smaller, from the smallest to the fastest."""
    front: list[PlanEntry] = []
    best_rate = 0.0
    for p in sorted(plans, key=lambda p: (p.estimate["peak_memory_bytes"], -(throughput(p)[0] or 0.0))):
        rate = throughput(p)[0] or 0.0
        if rate > best_rate:
            front.append(p)
            best_rate = rate
    return front


def time_by_class(report: Report) -> go.Figure | None:
    """Share of the time by operator class, with what bounds each."""
    spots = [h for h in largest_first(report.hotspots) if h.time_share and h.time_share >= _SMALLEST_SHARE]
    if not spots:
        return None
    bounds, figure = list(_SYMBOLS), go.Figure()
    for bound in dict.fromkeys(h.bound_by for h in spots):
        shown = [h for h in spots if h.bound_by == bound]
        i = bounds.index(bound) if bound in bounds else None
        figure.add_bar(
            x=[h.time_share * 100 for h in shown], y=[h.op_class for h in shown], orientation="h", textposition="auto", cliponaxis=False,
            text=[f"{percent(h.time_share)} {f'{bound}-bound' if h.op_class != 'idle' else ''}" for h in shown], hoverinfo="text+y", showlegend=False,
            marker={"color": _GREY if i is None else COLOURS[i], "pattern": {"shape": _PATTERNS[(i or 0) % len(_PATTERNS)], "fillmode": "overlay"}},
        )  # fmt: skip
    most = max(h.time_share for h in spots) * 100
    return _layout(figure, f"Time by class, {spots[0].source}", xaxis={"title": "% of one micro-batch on one GPU", "range": [0, most * 1.5]},
                   yaxis={"autorange": "reversed", "categoryorder": "array", "categoryarray": [h.op_class for h in spots]}, barmode="overlay")  # fmt: skip


def time_by_plan(report: Report) -> go.Figure | None:
    """The parts of one optimizer step, a bar per plan."""
    plans = [p for p in report.plans if p.estimate.get("breakdown_s")][:_MOST_BARS]
    if not plans:
        return None
    figure = _bars([p.estimate["breakdown_s"] for p in plans], _bar_names(plans))
    return _stacked(figure, "Step by plan", "seconds a step", len(plans))


def memory_by_plan(report: Report) -> go.Figure | None:
    """The parts of peak memory, a bar per plan, and the script alone on one GPU."""
    plans = [p for p in report.plans if p.estimate.get("breakdown_bytes")][:_MOST_BARS]
    stacks, names = [p.estimate["breakdown_bytes"] for p in plans], _bar_names(plans)
    alone = single_gpu_parts(report)
    if alone:
        stacks, names = [*stacks, alone], [*names, "one GPU, not split"]
    if not stacks:
        return None
    figure = _bars([{key: value / GIB_BYTES for key, value in stack.items()} for stack in stacks], names)
    device = cluster_figure(report, "memory_bytes")
    if device:
        figure.add_vline(x=device / GIB_BYTES, line={"color": COLOURS[5], "dash": "dash"}, showlegend=True,
                         name=f"memory of the GPU, {gib_with_unit(device)}")  # fmt: skip
    return _stacked(figure, "Peak memory by plan", "GiB per GPU", len(stacks))


def _bar_names(plans: Sequence[PlanEntry]) -> list[str]:
    return [f"{p.rank}. {_escaped(p.label)}" for p in plans]


def _bars(stacks: Sequence[Mapping[str, float]], names: Sequence[str]) -> go.Figure:
    keys = list(dict.fromkeys(key for stack in stacks for key, _ in nonzero_parts(stack)))
    figure = go.Figure()
    for i, key in enumerate(keys):
        pattern = {"shape": _PATTERNS[i // len(COLOURS) % len(_PATTERNS)], "fillmode": "overlay"}
        figure.add_bar(
            x=[stack.get(key) or 0.0 for stack in stacks], y=names, orientation="h", name=part_name(key),
            hovertemplate="%{y}<br>" + part_name(key) + " %{x:.3g}<extra></extra>", marker={"color": COLOURS[i % len(COLOURS)], "pattern": pattern},
        )  # fmt: skip
    return figure


def _stacked(figure: go.Figure, title: str, axis: str, num_bars: int) -> go.Figure:
    return _layout(figure, title, height=170 + 42 * num_bars, barmode="stack", xaxis={"title": axis}, yaxis={"autorange": "reversed"})


def roofline(report: Report) -> go.Figure | None:
    """Hotspots under the roof of the chosen GPU: achieved rate against arithmetic intensity, both logarithmic."""
    peak, memory_rate = (
        cluster_figure(report, f"peak_{report.model.get('precision')}_flops_per_s"),
        cluster_figure(report, "memory_bytes_per_s"),
    )
    spots = [h for h in report.hotspots if h.flops and h.bytes and h.achieved_flops_per_s]
    if not spots or not peak or not memory_rate:
        return None
    ridge = peak / memory_rate
    intensities = [h.flops / h.bytes for h in spots]
    rates = [h.achieved_flops_per_s for h in spots]
    steps = (1,) if max(peak, *rates) > 100 * min(rates) else (1, 2, 5)
    low, high = min(*intensities, ridge) / 10, max(*intensities, ridge) * 20
    figure = go.Figure(go.Scatter(x=[low, ridge, high], y=[low * memory_rate, peak, peak], mode="lines", line={"color": _GREY}, name="roof",
                                  hoverinfo="skip"))  # fmt: skip
    order = sorted(spots, key=lambda h: h.flops / h.bytes)
    for i, bound in enumerate(_SYMBOLS):
        shown = [h for h in order if h.bound_by == bound]
        if shown:
            figure.add_scatter(
                x=[h.flops / h.bytes for h in shown], y=[h.achieved_flops_per_s for h in shown], mode="markers+text", name=f"{bound}-bound",
                text=[h.op_class for h in shown], textposition=["bottom right" if order.index(h) % 2 else "top left" for h in shown],
                hovertext=[f"{h.op_class}: {with_prefix(h.achieved_flops_per_s, 'FLOP/s')}, {percent(h.roofline_share)} of the roof" for h in shown],
                hoverinfo="text", cliponaxis=False,
                marker={"symbol": _SYMBOLS[bound], "color": COLOURS[i], "size": [8 + 24 * (h.time_share or 0.0) ** 0.5 for h in shown]},
            )  # fmt: skip
    return _layout(figure, "Roofline of the chosen GPU", xaxis={"title": "FLOP per byte", "type": "log", **_ticks(low, high, significant, (1,))},
                   yaxis={"title": "FLOP/s", "type": "log", **_ticks(min(*rates, low * memory_rate), peak, lambda rate: with_prefix(rate, ""), steps)})  # fmt: skip


def scaling(report: Report) -> go.Figure | None:
    """Step time of the best plan against the number of GPUs, with its interval and the ideal line."""
    points = sorted((p for p in report.scaling if p.step_time_s), key=lambda p: p.num_gpus)
    if not points:
        return None
    sizes, times = [p.num_gpus for p in points], [p.step_time_s or 0.0 for p in points]
    figure = go.Figure(go.Scatter(x=sizes, y=[times[0] * sizes[0] / n for n in sizes], mode="lines", line={"dash": "dot", "color": _GREY},
                                  name="ideal from the smallest", hoverinfo="skip"))  # fmt: skip
    above = [(p.high_s or t) - t for p, t in zip(points, times, strict=True)]
    below = [t - (p.low_s or t) for p, t in zip(points, times, strict=True)]
    figure.add_scatter(
        x=sizes, y=times, mode="lines+markers", name="best plan, 80% interval", line={"color": COLOURS[0]}, marker={"size": 9}, hoverinfo="text",
        error_y={"type": "data", "array": above, "arrayminus": below, "color": COLOURS[0]},
        hovertext=[f"{p.num_gpus} GPUs: {seconds(p.step_time_s)}<br>{_escaped(p.label)}" for p in points],
    )  # fmt: skip
    short = [p.num_gpus for p in report.scaling if p.step_time_s is None]
    if short:
        figure.add_scatter(x=short, y=[max(times)] * len(short), mode="markers+text", name="does not fit", text=["does not fit"] * len(short),
                           textposition="bottom center", marker={"symbol": "x", "size": 11, "color": COLOURS[5]}, hoverinfo="skip")  # fmt: skip
    ticks = sorted({p.num_gpus for p in report.scaling})
    return _layout(figure, "Scaling", xaxis={"title": "GPUs", "type": "log", "tickvals": ticks, "ticktext": [str(n) for n in ticks]},
                   yaxis={"title": "a step", "type": "log", **_ticks(min(times), max(times), seconds)})  # fmt: skip


def _ticks(low: float, high: float, written: Callable[[float], str], steps: Sequence[int] = (1, 2, 5)) -> dict[str, list[Any]]:
    """Ticks of a logarithmic axis at these steps of each decade, from half the lowest to twice the highest value."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    values = [step * 10.0**decade for decade in decades for step in steps]
    shown = [value for value in values if low / 2 <= value <= high * 2]
    return {"tickvals": shown, "ticktext": [written(value) for value in shown]}


def _escaped(words: str) -> str:
    """Words inside plotly's own markup."""
    return words.replace("&", "&amp;").replace("<", "&lt;")
