import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.report import figures
from advisor.report.report import PlanEntry, Report

ALL = [figures.memory_against_speed, figures.time_by_class, figures.time_by_plan, figures.memory_by_plan, figures.roofline, figures.scaling]


def entry(rank: int, rate: float, peak: float) -> PlanEntry:
    return PlanEntry(rank=rank, label=str(rank), plan={}, estimate={"samples_per_s": rate, "peak_memory_bytes": peak}, reasons=())


POINTS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=15)


@given(POINTS)
def test_no_plan_beats_one_on_the_pareto_front(points: list[tuple[int, int]]) -> None:
    plans = [entry(i, rate, peak) for i, (rate, peak) in enumerate(points)]
    front = {(p.estimate["samples_per_s"], p.estimate["peak_memory_bytes"]) for p in figures.pareto_front(plans)}
    for point in points:
        beaten = any(other != point and other[0] >= point[0] and other[1] <= point[1] for other in points)
        assert (point in front) != beaten


@pytest.mark.parametrize("draw", ALL)
def test_nothing_to_draw_is_none(bare: Report, draw) -> None:
    assert draw(bare) is None


@pytest.mark.parametrize("draw", ALL)
def test_every_figure_has_a_title_and_named_axes(sample: Report, draw) -> None:
    layout = draw(sample).layout
    assert layout.title.text
    assert layout.xaxis.title.text


@pytest.mark.parametrize(
    ("draw", "field", "scale"), [(figures.time_by_plan, "step_time_s", 1.0), (figures.memory_by_plan, "peak_memory_bytes", 2**30)]
)
def test_bars_stack_up_to_the_whole(sample: Report, draw, field: str, scale: float) -> None:
    traces = [trace for trace in draw(sample).data if trace.type == "bar"]
    for i, plan in enumerate(sample.plans):
        assert sum(trace.x[i] for trace in traces) == pytest.approx(plan.estimate[field] / scale)


def test_parts_differ_in_colour_or_pattern(sample: Report) -> None:
    looks = [(trace.marker.color, trace.marker.pattern.shape) for trace in figures.memory_by_plan(sample).data if trace.type == "bar"]
    assert len(looks) == len(set(looks))


def test_each_bound_of_the_hotspots_is_one_colour_and_the_largest_is_on_top(sample: Report) -> None:
    drawn = figures.time_by_class(sample)
    assert all(isinstance(trace.marker.color, str) for trace in drawn.data)  # plotly derives the pattern's colour from one colour only
    names = [name for trace in drawn.data for name in trace.y]
    assert sorted(names) == sorted(drawn.layout.yaxis.categoryarray)
    assert drawn.layout.yaxis.categoryarray[0] == max(sample.hotspots, key=lambda h: h.time_share).op_class


def test_hotspots_lie_under_the_roof(sample: Report) -> None:
    drawn = figures.roofline(sample)
    peak = max(drawn.data[0].y)
    assert peak == 312e12
    assert all(rate <= peak for trace in drawn.data[1:] for rate in trace.y)


def test_no_roof_is_invented_for_another_precision(sample: Report) -> None:
    assert figures.roofline(dataclasses.replace(sample, model={**sample.model, "precision": "fp8"})) is None


def test_scaling_shows_intervals_and_what_does_not_fit(sample: Report) -> None:
    drawn = figures.scaling(sample)
    best = next(trace for trace in drawn.data if trace.name.startswith("best plan"))
    points = [p for p in sample.scaling if p.step_time_s]
    assert [y + up for y, up in zip(best.y, best.error_y.array, strict=True)] == pytest.approx([p.high_s for p in points])
    assert [y - down for y, down in zip(best.y, best.error_y.arrayminus, strict=True)] == pytest.approx([p.low_s for p in points])
    assert next(trace for trace in drawn.data if trace.name == "does not fit").x == (4,)


def test_labels_of_the_user_are_no_markup(hostile: Report) -> None:
    assert "<script>" not in str(figures.memory_by_plan(hostile).data[0].y)


def test_plans_that_lie_on_each_other_share_a_label(bare: Report) -> None:
    plans = (entry(1, 100.0, 8e9), entry(2, 100.1, 8e9), entry(3, 50.0, 8e9))
    marks = {
        trace.name: list(trace.text) for trace in figures.memory_against_speed(dataclasses.replace(bare, plans=plans)).data if trace.text
    }
    assert marks == {"recommended": ["1, 2"], "other plans": ["", "3"]}


@pytest.mark.parametrize(("available", "num_lines"), [(10e9, 1), (80e9, 0)])
def test_a_far_limit_does_not_squeeze_the_marks(bare: Report, available: float, num_lines: int) -> None:
    plan = dataclasses.replace(
        entry(1, 100.0, 8e9), estimate={"samples_per_s": 1.0, "peak_memory_bytes": 8e9, "available_bytes": available}
    )
    drawn = figures.memory_against_speed(dataclasses.replace(bare, plans=(plan,)))
    assert len(drawn.layout.shapes) == num_lines
    assert "usable" in drawn.layout.yaxis.title.text
