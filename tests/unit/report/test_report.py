import copy
import dataclasses
import json
import pickle
from pathlib import PurePosixPath

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.errors import AdvisorError
from advisor.report.report import Hotspot, PlanEntry, Report

NUMBERS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.floats(width=32).map(np.float32), st.integers(-(2**31), 2**31).map(np.int64),
    st.booleans().map(np.bool_),
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(NUMBERS, st.text(), st.lists(st.floats(), max_size=3).map(np.array)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)
MAPPINGS = st.dictionaries(st.text(), VALUES, max_size=4)


def report(**values) -> Report:
    empty = {
        "inputs": {},
        "model": {},
        "profile": {},
        "hotspots": (),
        "memory": {},
        "cluster": {},
        "plans": (),
        "rejected": (),
        "findings": (),
    }
    return Report(**(empty | values))


def plan(**values) -> PlanEntry:
    return PlanEntry(**({"rank": 1, "label": "DDP 8", "plan": {"tp_degree": 1}, "estimate": {"step_time_s": 1.0}, "reasons": ()} | values))


@given(MAPPINGS, MAPPINGS, st.lists(st.text(), max_size=3))
def test_json_round_trip_gives_the_same_report(model, estimate, warnings) -> None:
    before = report(model=model, plans=(plan(estimate=estimate),), warnings=tuple(warnings))
    text = json.dumps(before.to_json(), allow_nan=False)
    assert Report.from_json(json.loads(text)) == before


def test_sample_round_trips_and_hashes_alike(sample: Report) -> None:
    again = Report.from_json(json.loads(json.dumps(sample.to_json())))
    assert again == sample
    assert hash(again) == hash(sample)
    assert len({again, sample}) == 1


def test_numbers_json_has_no_word_for_become_null() -> None:
    data = report(memory={"nan_bytes": float("nan"), "list": [np.inf, np.float64(1.5)], "path": PurePosixPath("a/b")}).to_json()
    assert data["memory"] == {"nan_bytes": None, "list": [None, 1.5], "path": "a/b"}


def test_what_json_cannot_hold_is_named() -> None:
    with pytest.raises(TypeError, match=r"Report\.model\.made\.by is a object"):
        report(model={"made": {"by": object()}})


def test_operator_class_is_called_class_in_json(sample: Report) -> None:
    row = sample.to_json()["hotspots"][0]
    assert row["class"] == "matmul"
    assert "op_class" not in row


def test_schema_version_leads(sample: Report) -> None:
    assert next(iter(sample.to_json().items())) == ("schema_version", 1)


@pytest.mark.parametrize("change", [
    lambda r: r.model.__setitem__("num_params", 1), lambda r: r.plans[0].plan.update(tp_degree=8), lambda r: r.model.pop("class"),
    lambda r: r.plans[0].estimate["breakdown_s"].clear(),
])  # fmt: skip
def test_nothing_in_a_report_changes(sample: Report, change) -> None:
    before = sample.to_json()
    with pytest.raises(TypeError, match="frozen"):
        change(sample)
    assert sample.to_json() == before


def test_a_report_does_not_follow_the_dict_it_was_made_from() -> None:
    model = {"tied": [["a", "b"]]}
    made = report(model=model)
    model["tied"].append(["c"])
    assert made.to_json()["model"] == {"tied": [["a", "b"]]}


def test_to_json_hands_out_copies(sample: Report) -> None:
    sample.to_json()["model"]["num_params"] = 0
    assert sample.model["num_params"] == 8_030_261_248


def test_reports_can_be_copied_and_pickled(sample: Report) -> None:
    assert copy.deepcopy(sample) == sample
    assert pickle.loads(pickle.dumps(sample)) == sample


@pytest.mark.parametrize("data", [{}, {"schema_version": 2}, {"schema_version": 1}, {"schema_version": 1, "hotspots": 3}, []])
def test_other_json_is_refused_with_a_hint(data) -> None:
    with pytest.raises(AdvisorError) as caught:
        Report.from_json(data)
    assert caught.value.hint


def test_fields_of_later_versions_are_left_out(sample: Report) -> None:
    data = sample.to_json()
    data["mood"] = "good"
    data["plans"][0]["colour"] = "blue"
    assert Report.from_json(data) == sample


def test_entries_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="plans must hold PlanEntry"):
        report(plans=({"rank": 1},))


def test_plans_frame_has_a_row_per_plan(sample: Report) -> None:
    frame = sample.plans_frame()
    assert list(frame["rank"]) == [1, 2, 3, 4]
    assert frame.loc[1, "tp_degree"] == 2
    parts = frame[[c for c in frame if c.endswith("_s") and c.removesuffix("_s") in sample.plans[0].estimate["breakdown_s"]]]
    assert parts.loc[0].sum() == pytest.approx(frame.loc[0, "step_time_s"])


def test_memory_frame_sums_to_the_peak(sample: Report) -> None:
    peaks = [p.estimate["peak_memory_bytes"] for p in sample.plans]
    assert list(sample.memory_frame().sum(axis=1)) == pytest.approx(peaks)


def test_hotspots_frame_is_sorted_and_has_intensities(sample: Report) -> None:
    frame = sample.hotspots_frame()
    assert frame["time_share"].is_monotonic_decreasing
    assert frame["time_share"].sum() == pytest.approx(1.0)
    first = frame.loc[0]
    assert first["flops_per_byte"] == pytest.approx(first["flops"] / first["bytes"])
    assert frame.set_index("op_class").loc["idle", "flops_per_byte"] != frame.loc[0, "flops_per_byte"]


def test_operators_frame_is_a_copy(sample: Report) -> None:
    made = dataclasses.replace(sample, operators=pd.DataFrame({"operator": ["aten.mm"]}))
    frame = made.operators_frame()
    frame.loc[0, "operator"] = "changed"
    assert made.operators_frame().loc[0, "operator"] == "aten.mm"
    assert "operators" not in made.to_json()


def test_frames_of_an_empty_report_are_empty(bare: Report) -> None:
    for frame in (bare.plans_frame(), bare.hotspots_frame(), bare.memory_frame(), bare.operators_frame()):
        assert frame.empty


def test_notebook_form_escapes_and_is_small(hostile: Report, bare: Report) -> None:
    page = hostile._repr_html_()
    assert "<script>" not in page
    assert len(page) < 20_000
    assert "No plan fits" in bare._repr_html_()


def test_hotspot_numbers_are_made_finite() -> None:
    spot = Hotspot(op_class="matmul", time_share=np.float32(0.5), time_s=1.0, flops=1.0, bytes=0.0, achieved_flops_per_s=float("inf"),
                   roofline_share=float("nan"), bound_by="compute", num_calls=np.int64(3), source="modelled")  # fmt: skip
    assert (spot.time_share, spot.achieved_flops_per_s, spot.roofline_share, spot.num_calls) == (0.5, None, None, 3)
