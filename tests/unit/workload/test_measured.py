"""Measured seconds reach the workload where plans can be anchored on them, and only there."""

import dataclasses

import pytest

from advisor.profiling.schema import StepProfile
from advisor.workload import model_summary, shape


def with_meta(profile, **meta):
    return StepProfile(
        meta=dataclasses.replace(profile.meta, **meta), operators=profile.operators, modules=profile.modules, parameters=profile.parameters
    )


def test_a_step_measured_on_a_gpu_anchors_the_prices(make_decoder):
    profile = with_meta(make_decoder(), source="measured", device="NVIDIA H200", step_time_s=0.4, idle_s=0.0, accumulation=4)
    workload = shape(profile)
    assert workload.measured_step_s == pytest.approx(0.1)
    assert workload.measured_device.startswith("h200")
    assert workload.measured_host_s_per_kernel is None


def test_an_idle_device_tells_the_host_time_per_kernel(make_decoder):
    profile = with_meta(make_decoder(), source="measured", device="NVIDIA H200", step_time_s=0.4, idle_s=0.2)
    assert shape(profile).measured_host_s_per_kernel == pytest.approx(0.4 / len(profile.operators))


@pytest.mark.parametrize("meta", [{"source": "traced"}, {"source": "measured", "device": "cpu"}])
def test_nothing_is_anchored_on_a_cpu_or_on_a_trace(make_decoder, meta):
    workload = shape(with_meta(make_decoder(), step_time_s=0.4, **meta))
    assert workload.measured_step_s is None
    assert workload.measured_device == ""


def test_another_precision_than_the_measured_one_is_not_anchored(make_decoder):
    profile = with_meta(make_decoder(), source="measured", device="NVIDIA H200", step_time_s=0.4)
    assert shape(profile, precision="bf16").measured_step_s is None


def test_the_summary_holds_plain_values_for_the_report_and_the_engines(make_decoder):
    profile = make_decoder(tied=True)
    summary = model_summary(profile, shape(profile))
    assert summary["num_params"] == 43600
    assert summary["tied"] == [["embed.weight", "head.weight"]]
    assert summary["block_paths"] == [f"layers.{i}" for i in range(4)]
    assert [(g["name"], g["num_repeats"], g["num_params"]) for g in summary["layer_groups"]][1] == ("layers.*", 4, 2704)
    assert summary["unused_parameters"] == []


def test_blocks_that_share_a_parameter_outside_are_not_wrapped_alone(draft):
    d = draft()
    d.module("", "Model")
    for i in range(3):
        d.module(f"blocks.{i}", "Block", x=(2, 4, 8), y=(2, 4, 8))
        d.linear(f"blocks.{i}.up", 8, 32, 4)
        d.linear(f"blocks.{i}.down", 32, 8, 4)
    d.params[0]["aliases"] = ["head.weight"]
    profile = d.profile()
    summary = model_summary(profile, shape(profile))
    assert summary["block_paths"] == ["blocks.1", "blocks.2"]
    assert [p["linear"] for p in summary["tp_pairs"]] == [True]
