"""The report as one HTML file that needs nothing else: no network, no other files."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from advisor.report.blocks import blocks, estimate_items, footer
from advisor.report.format import MISSING
from advisor.report.heading import header
from advisor.report.report import Report
from advisor.report.tables import cluster_table, findings_table, inputs_table, layers_table
from advisor.report.text import PROVENANCES, Number, pasteable

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    """A figure with its place and its words."""

    name: str  # function in advisor.report.figures
    block: str  # key of the block it belongs to
    how_to_read: str
    wide: bool = False  # takes the whole width


_PICTURES = (
    _Picture(name="memory_against_speed", block="others", how_to_read=(
        "Right is faster, down is leaner. Plans on the dotted line are beaten by none on both counts. Numbers are ranks.")),
    _Picture(name="time_by_class", block="time", how_to_read="The longest bar is where a faster kernel or another shape pays most."),
    _Picture(name="roofline", block="time", how_to_read=(
        "A mark near the roof is as fast as the GPU allows. Left of the bend memory is the limit, right of it arithmetic. Size is time.")),
    _Picture(name="time_by_plan", block="time", wide=True, how_to_read="Each bar is one optimizer step. What isn't compute is the price of that plan."),
    _Picture(name="memory_by_plan", block="memory", wide=True, how_to_read="A bar that reaches past the dashed line does not fit."),
    _Picture(name="scaling", block="scaling", how_to_read=(
        "Below the dotted line scales better than ideal, above it worse. Whiskers hold 80% of measured runs. Both axes are logarithmic.")),
)  # fmt: skip


@functools.cache
def environment() -> jinja2.Environment:
    """The one template environment of the reports."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("advisor.report", "templates"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    made.globals["provenances"], made.globals["missing"] = PROVENANCES, MISSING
    made.filters["pasteable"] = lambda command: "\n".join(pasteable(command, 104))
    made.tests["number"] = lambda piece: isinstance(piece, Number)
    return made


def render_html(report: Report) -> str:
    """The report as a page.

    Args:
        report: what to show.

    Returns:
        HTML that opens offline, in light and dark, and prints.
    """
    pictures = _pictures(report)
    return environment().get_template("report.html.j2").render(
        report=report, header=header(report), blocks=blocks(report), figures=_estimate(report), footer=footer(report), pictures=pictures,
        plotly=_plotly() if pictures else "",
        background=[t for t in (layers_table(report), cluster_table(report), findings_table(report), inputs_table(report)) if t.rows],
    )  # fmt: skip


def render_compact(report: Report) -> str:
    """A short form for notebooks: the recommendation, the ranking, where the time goes."""
    shown = {block.key: block for block in blocks(report, 5)}
    return environment().get_template("compact.html.j2").render(
        header=header(report), best=shown["use-this"], others=shown["others"], time=shown["time"]
    )  # fmt: skip


def _estimate(report: Report) -> list[Any]:
    return [item for item in estimate_items(report.plans[0]) if item] if report.plans else []


def _pictures(report: Report) -> list[dict[str, Any]]:
    """Figures that have something to show, as plotly's own JSON."""
    from advisor.report import figures

    shown: list[dict[str, Any]] = []
    for picture in _PICTURES:
        draw: Callable[[Report], go.Figure | None] = getattr(figures, picture.name)
        figure = draw(report)
        if figure is not None:
            drawn = json.loads(figure.to_json())
            title = drawn["layout"].pop("title")["text"]
            drawn["layout"].pop("template", None)
            drawn["layout"]["margin"]["t"] = 12
            shown.append(
                {
                    "name": picture.name,
                    "block": picture.block,
                    "how_to_read": picture.how_to_read,
                    "wide": picture.wide,
                    "title": title,
                    "figure": drawn,
                }
            )
    return shown


def _plotly() -> Markup:
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())  # noqa: S704 - the library's own source, not user input
