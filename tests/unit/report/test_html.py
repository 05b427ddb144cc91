import dataclasses
import html.parser
import json
import re
from importlib import resources

import jinja2
import pytest

from advisor.report.blocks import blocks
from advisor.report.html import environment, render_html
from advisor.report.report import Report

VOID = {"meta", "br", "link", "img", "input", "hr"}


def skeleton(page: str) -> str:
    """The page without plotly's source, style and the figures' numbers, which other tests look at."""
    page = re.sub(r"<script>(?=.{100000}).*?</script>(?=\n<script type)", "<script>plotly</script>", page, flags=re.DOTALL)
    page = re.sub(r"<style>.*?</style>", "<style>css</style>", page, flags=re.DOTALL)
    page = re.sub(r'(<script type="application/json" data-figure="\w+">).*?(</script>)', r"\1figure\2", page)
    return re.sub(r"<script>\n\(function.*?</script>", "<script>draw</script>", page, flags=re.DOTALL)


class Outline(html.parser.HTMLParser):
    """Open elements, ids and attributes of a page; complains about elements that don't close."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.attributes.append((tag, found))
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_golden(sample: Report, check_golden) -> None:
    check_golden("report/report.html", skeleton(render_html(sample)))


@pytest.mark.parametrize("which", ["sample", "bare", "hostile"])
def test_elements_close_and_ids_are_unique(which: str, request: pytest.FixtureRequest) -> None:
    outline = Outline(skeleton(render_html(request.getfixturevalue(which))))
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))


def test_it_needs_nothing_from_elsewhere(sample: Report) -> None:
    for tag, attributes in Outline(skeleton(render_html(sample))).attributes:
        assert "src" not in attributes
        assert tag not in {"link", "img", "iframe", "object"}
        assert str(attributes.get("href") or "#").startswith("#")
    css = resources.files("advisor.report").joinpath("templates/report.css").read_text()
    assert "url(" not in css
    assert "@import" not in css


def test_links_lead_somewhere(sample: Report) -> None:
    outline = Outline(skeleton(render_html(sample)))
    targets = {str(a["href"]).removeprefix("#") for tag, a in outline.attributes if tag == "a"}
    assert targets <= set(outline.ids)
    assert targets >= {block.key for block in blocks(sample)}


def test_plotly_is_there_once_and_only_with_figures(sample: Report, bare: Report) -> None:
    page = render_html(sample)
    assert page.count("<script>/**") == 1
    assert len(page) > 1_000_000
    assert len(render_html(bare)) < 50_000


def test_text_of_the_user_is_escaped(hostile: Report) -> None:
    page = render_html(hostile)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "{{ 7 * 7 }}" in page


def test_every_section_says_how_to_read_it(sample: Report) -> None:
    page = skeleton(render_html(sample))
    for section in re.findall(r"<section.*?</section>", page, flags=re.DOTALL):
        assert '<p class="how">' in section


def test_each_figure_has_words_and_a_place(sample: Report) -> None:
    page = render_html(sample)
    figures = re.findall(r'<script type="application/json" data-figure="(\w+)">(.*?)</script>', page)
    assert [name for name, _ in figures] == [
        "memory_against_speed",
        "time_by_class",
        "roofline",
        "time_by_plan",
        "memory_by_plan",
        "scaling",
    ]
    outline = Outline(skeleton(page))
    described = {a["id"]: a["aria-label"] for _, a in outline.attributes if a.get("role") == "img"}
    for name, text in figures:
        assert json.loads(text)["data"]
        assert len(described[f"figure-{name}"] or "") > 40


def test_words_of_the_terminal_are_all_in_the_page(sample: Report) -> None:
    words = re.sub(r"<[^>]*>", "", skeleton(render_html(sample)))
    for label in (
        "FSDP 32, recompute selective",
        "~158 GiB",
        "hybrid-shard-on-slow-links",
        "~12.3 GiB",
        "torchrun --nnodes 4",
        "flash attention",
    ):
        assert label in words


def test_all_rules_are_in_the_page_with_their_status(sample: Report) -> None:
    page = render_html(sample)
    for finding in sample.findings:
        assert finding.rule in page
    for status in ("silent", "not-applicable", "not-evaluated"):
        assert f"<td>{status}</td>" in page


@pytest.mark.parametrize("missing", ["plans", "rejected", "scaling", "findings", "hotspots", "memory", "cluster", "model", "accuracy"])
def test_any_part_may_be_missing(sample: Report, missing: str) -> None:
    empty = () if isinstance(getattr(sample, missing), tuple) else {}
    page = skeleton(render_html(dataclasses.replace(sample, **{missing: empty})))
    assert ">None<" not in page
    assert Outline(page).open == []


def test_a_name_the_template_does_not_know_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        environment().from_string("{{ no_such_name }}").render()


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["text", "soft", "accent", "measured", "modelled", "assumed"])
@pytest.mark.parametrize("ground", ["card", "page"])
def test_text_has_enough_contrast(theme: int, name: str, ground: str) -> None:
    css = resources.files("advisor.report").joinpath("templates/report.css").read_text()
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", re.findall(r":root \{(.*?)\}", css, flags=re.DOTALL)[theme]))
    light, dark = sorted((_luminance(colours[name]), _luminance(colours[ground])), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2.2, level AA
