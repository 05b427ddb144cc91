"""The four examples, from script to report: parameters exactly, what dominates, what repeats, what is recommended and what is warned of."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import advisor
from advisor.profiling.schema import StepProfile, save_profile
from advisor.report.report import Report

EXAMPLES = Path(__file__).parents[2] / "examples"

OPTIONS = {
    "gpt2": {"gpu": "a100-sxm-80gb"},
    "resnet50": {"gpu": "a100-sxm-80gb", "global_batch": 2048},
    "llama3_8b": {"gpu": "h100-sxm-80gb", "nodes": 2, "inter": "ib-ndr-8x"},
    "two_device_copy": {"gpu": "rtx-4090", "gpus_per_node": 2},
}


@pytest.fixture(scope="module")
def examples() -> dict[str, StepProfile]:
    """The four examples at full size, traced."""
    return {name: advisor.profile(EXAMPLES / f"{name}.py", capture="traced") for name in OPTIONS}


@pytest.fixture(scope="module")
def reports(examples) -> dict[str, Report]:
    return {name: advisor.plan(profile, **OPTIONS[name]) for name, profile in examples.items()}


@pytest.mark.parametrize(
    ("name", "num_params"),
    [("gpt2", 124_439_808), ("resnet50", 25_557_032), ("llama3_8b", 8_030_261_248), ("two_device_copy", 267_107_584)],
)
def test_parameters_are_exact(reports, name, num_params):
    assert reports[name].model["num_params"] == num_params
    held = sum(g["num_params"] * g["num_repeats"] for g in reports[name].model["layer_groups"])
    assert held == num_params


@pytest.mark.parametrize(
    ("name", "op_class"), [("gpt2", "matmul"), ("resnet50", "convolution"), ("llama3_8b", "matmul"), ("two_device_copy", "matmul")]
)
def test_the_dominant_class_is_found(reports, name, op_class):
    assert reports[name].hotspots[0].op_class == op_class


@pytest.mark.parametrize("name", OPTIONS)
def test_shares_sum_to_one_and_are_marked_as_modelled(reports, name):
    spots = reports[name].hotspots
    assert math.isclose(sum(h.time_share for h in spots), 1, rel_tol=1e-9)
    assert {h.source for h in spots} == {"modelled"}


@pytest.mark.parametrize(("name", "repeats"), [("gpt2", {12}), ("llama3_8b", {32}), ("two_device_copy", {8})])
def test_repeated_blocks_are_found(reports, name, repeats):
    assert repeats <= {g["num_repeats"] for g in reports[name].model["layer_groups"]}


def test_tied_weights_are_named_and_counted_once(reports):
    assert [list(group) for group in reports["gpt2"].model["tied"]] == [["tokens.weight", "head.weight"]]


def test_only_llama_is_too_big_for_copies_on_every_gpu(reports):
    first = {name: report.plans[0].plan for name, report in reports.items()}
    assert first["llama3_8b"]["zero_stage"] >= 1 or first["llama3_8b"]["tp_degree"] * first["llama3_8b"]["pp_degree"] > 1
    assert first["gpt2"]["zero_stage"] == first["resnet50"]["zero_stage"] == 0
    ddp = [r for r in reports["llama3_8b"].rejected if r.label.startswith("DDP")]
    assert ddp[0].needed_bytes > ddp[0].available_bytes


def test_convolutions_are_not_offered_tensor_parallelism(reports):
    assert all(p.plan["tp_degree"] == 1 for p in reports["resnet50"].plans)
    assert any("TP" in r.label and "not possible" in r.reason for r in reports["resnet50"].rejected)


def test_copies_between_devices_are_told_from_copies_to_the_device(reports):
    classes = {h.op_class for h in reports["two_device_copy"].hotspots}
    assert "copy-device-to-device" in classes
    assert "copy-device-to-device" not in {h.op_class for h in reports["gpt2"].hotspots}
    fired = {f.rule for f in reports["two_device_copy"].findings if f.status == "fired"}
    assert "two-device-split" in fired


@pytest.mark.parametrize("name", OPTIONS)
def test_reports_are_json_and_parts_sum_to_the_whole(reports, name):
    data = json.loads(json.dumps(reports[name].to_json(), allow_nan=False))
    assert data["schema_version"] == 1
    for plan in data["plans"]:
        price = plan["estimate"]
        assert sum(price["breakdown_s"].values()) == pytest.approx(price["step_time_s"], rel=1e-6)
        assert sum(price["breakdown_bytes"].values()) == pytest.approx(price["peak_memory_bytes"], rel=1e-6)
        assert price["low_s"] <= price["step_time_s"] <= price["high_s"]
        assert 0 < price["mfu"] < 1
        assert plan["plan"]["global_batch"] == data["inputs"]["global_batch"]
        assert plan["reasons"]


def test_nothing_fits_says_by_how_much_and_what_would(advise, examples, tmp_path):
    save_profile(examples["llama3_8b"], tmp_path / "profile")
    code, _, err = advise("plan", tmp_path / "profile", "--gpu", "rtx-3090", "--gpus-per-node", "1", "--out", tmp_path / "advice")
    assert code == 2
    assert "GiB" in err
    assert "would do" in err or "more memory" in err
    assert not (tmp_path / "advice").exists()
