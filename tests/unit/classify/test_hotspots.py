"""Hotspots partition a step: shares sum to one, copies are told apart, measured seconds are used only for the device they are of."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.classify.hotspots import frame, hotspots, step_verdict
from advisor.classify.work import op_flops
from advisor.profiling.schema import MODULE_COLUMNS, OPERATOR_COLUMNS, PARAMETER_COLUMNS, ProfileMeta, StepProfile
from advisor.profiling.schema import frame as table
from cost_models import op_seconds
from cost_models.types import (
    BATCH_DIMS,
    OP_CLASSES,
    PHASES,
    PRICING_KINDS,
    Cluster,
    Device,
    LayerGroup,
    Link,
    OpTable,
    OptimizerSpec,
    Workload,
)

GPU = Device(
    name="h100-sxm-80gb", memory_bytes=80e9, memory_bytes_per_s=3.35e12, peak_flops_per_s={"fp32": 67e12, "tf32": 495e12, "bf16": 989e12}
)
CPU = Device(name="cpu", memory_bytes=24e9, memory_bytes_per_s=20e9, peak_flops_per_s={"fp32": 1e11}, family="cpu")


def cluster(device: Device = GPU) -> Cluster:
    return Cluster(
        device=device, gpus_per_node=8, num_nodes=1, host_bytes_per_s=25e9,
        intra=Link(name="nvlink-4", bytes_per_s=450e9, latency_s=2e-6), inter=Link(name="ib-ndr", bytes_per_s=50e9, latency_s=5e-6),
    )  # fmt: skip


def ops(rows: list[dict[str, object]]) -> OpTable:
    """An OpTable from short rows: class, kind, phase, m, n, k, and the rest with defaults."""
    full = [{"phase": "forward", "batch_dim": "m", "m": 1.0, "n": 1.0, "k": 1.0, "batch": 1.0, "work_share": 1.0, "bytes_per_sample": 0.0,
             "bytes_fixed": 0.0, "num_kernels": 1.0, **row} for row in rows]  # fmt: skip

    def codes(name: str, known: tuple[str, ...]) -> np.ndarray:
        return np.array([known.index(str(row[name])) for row in full], dtype=np.int64)

    numbers = {n: np.array([row[n] for row in full], dtype=float) for n in
               ("m", "n", "k", "batch", "work_share", "bytes_per_sample", "bytes_fixed", "num_kernels")}  # fmt: skip
    return OpTable(op_class=codes("op_class", OP_CLASSES), kind=codes("kind", PRICING_KINDS), phase=codes("phase", PHASES),
                   batch_dim=codes("batch_dim", BATCH_DIMS), tp_split=np.zeros(len(full), dtype=np.int64), **numbers)  # fmt: skip


MATMUL = {"op_class": "matmul", "kind": "gemm", "m": 1024.0, "n": 4096.0, "k": 4096.0}
NORM = {"op_class": "normalization", "kind": "memory", "bytes_per_sample": 64e6}


def workload(table_: OpTable, *, repeats: int = 4, batch: int = 8, **fields: object) -> Workload:
    group = LayerGroup(name="layers.*", num_repeats=repeats, ops=table_, num_params=1e6, num_trainable_params=1e6)
    optimizer = OptimizerSpec(name="adamw", state_bytes_per_param=8.0, num_kernels=10)
    return Workload(name="net", groups=(group,), num_params=1e6 * repeats, num_trainable_params=1e6 * repeats, optimizer=optimizer,
                    traced_batch=batch, **fields)  # type: ignore[arg-type] # fmt: skip


def profile(rows: list[dict[str, object]] | None = None, **meta: object) -> StepProfile:
    """A profile with these operator rows; columns not given are empty."""
    empty = {"call": 0, "module": "", "phase": "forward", "operator": "", "op_class": "other", "input_shapes": [], "output_shapes": [],
             "dtype": "fp32", "weight": "", "flops": 0.0, "read_bytes": 0, "written_bytes": 0, "saved_bytes": 0, "causal": 0,
             "num_kernels": 1, "device": "cuda:0", "copy_from": "", "copy_to": "", "measured_s": math.nan}  # fmt: skip
    operators = table([{**empty, **row, "call": i} for i, row in enumerate(rows or [])], OPERATOR_COLUMNS)
    return StepProfile(meta=ProfileMeta(script="train.py", **meta), operators=operators,  # type: ignore[arg-type]
                       modules=table([], MODULE_COLUMNS), parameters=table([], PARAMETER_COLUMNS))  # fmt: skip


MEASURED_ROWS = [
    {"op_class": "matmul", "flops": 4e12, "measured_s": 8e-3, "dtype": "bf16", "read_bytes": 1e8, "written_bytes": 1e8},
    {"op_class": "matmul", "flops": 4e12, "measured_s": 8e-3, "dtype": "bf16", "phase": "backward"},
    {"op_class": "normalization", "measured_s": 2e-3, "read_bytes": 2e9, "written_bytes": 2e9},
    {"op_class": "copy-host-to-device", "measured_s": 1e-3, "written_bytes": 2e7, "copy_from": "cpu", "copy_to": "cuda:0", "phase": "data"},
    {"op_class": "copy-device-to-device", "measured_s": 1e-3, "written_bytes": 2e7, "copy_from": "cuda:0", "copy_to": "cuda:1"},
    {"op_class": "optimizer", "measured_s": 4e-3, "read_bytes": 1e9, "written_bytes": 1e9, "phase": "optimizer"},
]


def by_class(spots: tuple) -> dict:
    return {spot.op_class: spot for spot in spots}


def test_modelled_shares_sum_to_one_exactly_and_come_largest_first():
    spots = hotspots(profile(), workload(ops([MATMUL, {**MATMUL, "phase": "backward"}, NORM])), cluster())
    assert sum(s.time_share for s in spots) == 1.0
    assert [s.time_s for s in spots] == sorted((s.time_s for s in spots), reverse=True)
    assert {s.source for s in spots} == {"modelled"}
    assert len({s.op_class for s in spots}) == len(spots)


def test_modelled_class_is_the_sum_of_its_operators_times_the_repeats():
    shapes = ops([MATMUL, NORM])
    spots = by_class(hotspots(profile(), workload(shapes, repeats=3, batch=2), cluster()))
    wanted_s = 3 * op_seconds(shapes, GPU, micro_batch=2, compute_dtype="bf16")[0]
    assert spots["matmul"].time_s == pytest.approx(wanted_s)
    assert spots["matmul"].flops == pytest.approx(3 * 2 * 2 * 1024 * 4096 * 4096)
    assert spots["matmul"].num_calls == 3
    assert spots["normalization"].bytes == pytest.approx(3 * 2 * 64e6)


def test_attention_counts_two_products_forward_and_five_backward():
    attention = {
        "op_class": "attention",
        "kind": "attention",
        "m": 128.0,
        "n": 128.0,
        "k": 64.0,
        "batch": 8.0,
        "batch_dim": "batch",
        "work_share": 0.5,
    }
    forward, backward = op_flops(ops([attention, {**attention, "phase": "backward"}]), 2.0)
    assert forward == 2 * 2 * 128 * 128 * 64 * 8 * 2 * 0.5
    assert backward == 2.5 * forward


def test_compute_memory_and_latency_bound_classes_are_told_apart():
    tiny = {"op_class": "elementwise", "kind": "memory", "bytes_per_sample": 1e3, "num_kernels": 5.0}
    spots = by_class(hotspots(profile(), workload(ops([MATMUL, NORM, tiny])), cluster()))
    assert spots["matmul"].bound_by == "compute"
    assert spots["normalization"].bound_by == "memory"
    assert spots["elementwise"].bound_by == "latency"


def test_thin_matmul_is_memory_bound():
    thin = {**MATMUL, "m": 1.0, "batch_dim": "m", "bytes_fixed": 2 * 4096.0 * 4096.0}
    spots = by_class(hotspots(profile(), workload(ops([{**thin, "n": 40960.0, "bytes_fixed": 2 * 4096.0 * 40960.0}]), batch=1), cluster()))
    assert spots["matmul"].bound_by == "memory"


def test_input_copy_is_charged_once_whether_or_not_the_script_showed_it():
    net = workload(ops([MATMUL]), batch=8, input_bytes=1e6)
    shown = profile([{"op_class": "copy-host-to-device", "written_bytes": 8e6, "copy_from": "cpu", "copy_to": "cuda:0"}])
    hidden = by_class(hotspots(profile(), net, cluster()))["copy-host-to-device"]
    seen = by_class(hotspots(shown, net, cluster()))["copy-host-to-device"]
    assert hidden.time_s == seen.time_s == pytest.approx(8e6 / 25e9)
    assert hidden.bound_by == "host"


def test_copies_between_devices_are_priced_over_the_link_between_them():
    rows = [{"op_class": "copy-device-to-device", "written_bytes": 45e6, "copy_from": "cuda:0", "copy_to": "cuda:1"}] * 2
    spot = by_class(hotspots(profile(rows), workload(ops([MATMUL])), cluster()))["copy-device-to-device"]
    assert spot.time_s == pytest.approx(2 * (45e6 / 450e9 + 2e-6))
    assert (spot.bound_by, spot.num_calls) == ("communication", 2)


def test_optimizer_is_shared_by_the_micro_batches_of_a_step():
    net = workload(ops([MATMUL]))
    alone = by_class(hotspots(profile(), net, cluster()))["optimizer"]
    shared = by_class(hotspots(profile(accumulation=4), net, cluster()))["optimizer"]
    assert alone.bytes > 4e6 * (2 + 2 * 8 + 2 * 4 + 2)  # gradient read, states and master copy read and written, weight written
    assert shared.time_s == pytest.approx(alone.time_s / 4)


def test_optimizer_that_moves_more_than_a_fused_one_is_priced_by_what_it_moves():
    row = {"op_class": "optimizer", "operator": "aten._foreach_mul_", "phase": "optimizer", "read_bytes": 3e8, "written_bytes": 1e8}
    spot = by_class(hotspots(profile([row]), workload(ops([MATMUL])), cluster()))["optimizer"]
    assert spot.bytes == 4e8


def test_small_kernels_leave_the_gpu_idle_and_large_ones_do_not():
    small = by_class(hotspots(profile(), workload(ops([{**NORM, "bytes_per_sample": 1e3, "num_kernels": 100.0}])), cluster()))
    large = by_class(hotspots(profile(), workload(ops([{**NORM, "bytes_per_sample": 1e9}])), cluster()))
    assert small["idle"].time_share > 0.9
    assert "idle" not in large or large["idle"].time_share < 0.01


def test_measured_seconds_are_used_on_the_device_they_were_measured_on():
    seen = profile(MEASURED_ROWS, source="measured", device="NVIDIA H100 80GB HBM3", idle_s=2e-3)
    spots = hotspots(seen, workload(ops([MATMUL])), cluster())
    mine = by_class(spots)
    assert {s.source for s in spots} == {"measured"}
    assert mine["matmul"].time_s == pytest.approx(16e-3)
    assert mine["idle"].time_s == pytest.approx(2e-3)
    assert mine["idle"].bound_by == "host"
    assert sum(s.time_share for s in spots) == 1.0
    assert mine["copy-host-to-device"].bytes == 2e7
    assert mine["copy-device-to-device"].bound_by == "communication"
    assert mine["matmul"].achieved_flops_per_s == pytest.approx(8e12 / 16e-3)
    assert mine["matmul"].roofline_share == pytest.approx(8e12 / 989e12 / 16e-3, rel=1e-3)


def test_seconds_of_another_gpu_or_of_the_cpu_are_not_used():
    other = profile(MEASURED_ROWS, source="measured", device="NVIDIA A100-SXM4-80GB")
    assert hotspots(other, workload(ops([MATMUL])), cluster())[0].source == "modelled"
    on_cpu = profile([{**row, "device": "cpu"} for row in MEASURED_ROWS[:3]], source="measured", device="cpu")
    assert hotspots(on_cpu, workload(ops([MATMUL])), cluster())[0].source == "modelled"
    assert hotspots(on_cpu, workload(ops([MATMUL]), compute_dtype="fp32"), cluster(CPU))[0].source == "measured"


def test_seconds_of_a_gpu_that_nobody_named_count_as_the_clusters():
    for name in ("", "NVIDIA A100-PG509-200"):
        seen = profile(MEASURED_ROWS, source="imported", device=name)
        assert hotspots(seen, workload(ops([MATMUL])), cluster())[0].source == "measured"


def test_a_trace_without_shapes_keeps_its_own_seconds_whatever_is_planned():
    bare = [{**row, "flops": 0.0} for row in MEASURED_ROWS]
    shaped = [{**row, "input_shapes": [[8, 8]]} for row in bare]
    name = "NVIDIA A100-SXM4-80GB"
    assert hotspots(profile(bare, source="imported", device=name), workload(ops([MATMUL])), cluster())[0].source == "measured"
    assert hotspots(profile(shaped, source="imported", device=name), workload(ops([MATMUL])), cluster())[0].source == "modelled"


def test_cpu_has_no_input_copy_and_no_launch_gaps():
    spots = by_class(hotspots(profile(), workload(ops([MATMUL, NORM]), compute_dtype="fp32", input_bytes=1e6), cluster(CPU)))
    assert set(spots) == {"matmul", "normalization", "optimizer"}


def test_time_that_no_operator_takes_is_idle_when_only_the_step_was_timed():
    seen = profile(MEASURED_ROWS, source="measured", device="NVIDIA H100 80GB HBM3", step_time_s=40e-3)
    assert by_class(hotspots(seen, workload(ops([MATMUL])), cluster()))["idle"].time_s == pytest.approx(16e-3)


def test_a_step_without_operators_has_no_hotspots():
    nothing = Workload(name="none", groups=(LayerGroup(name="all", num_repeats=1, ops=ops([]), num_params=0, num_trainable_params=0),),
                       num_params=0, num_trainable_params=0, optimizer=OptimizerSpec(name="sgd", state_bytes_per_param=0))  # fmt: skip
    assert hotspots(profile(), nothing, cluster()) == ()
    assert step_verdict(()) == ""


def test_frame_has_one_row_per_class():
    spots = hotspots(profile(), workload(ops([MATMUL, NORM])), cluster())
    data = frame(spots)
    assert list(data["op_class"]) == [s.op_class for s in spots]
    assert data["time_share"].sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("rows", "idle_s", "verdict"),
    [
        ([("matmul", 70e-3, 1), ("collective", 30e-3, 1)], 0.0, "communication"),
        ([("matmul", 70e-3, 1), ("collective", 20e-3, 1)], 5e-3, "compute"),
        ([("matmul", 60e-3, 1)], 40e-3, "host"),
        ([("matmul", 5e-3, 1), ("elementwise", 10e-3, 5000)], 40e-3, "latency"),
        ([("matmul", 30e-3, 1), ("normalization", 60e-3, 1)], 0.0, "memory"),
    ],
)
def test_step_verdict(rows: list[tuple[str, float, int]], idle_s: float, verdict: str):
    full = [{"op_class": name, "measured_s": seconds, "num_kernels": kernels, "flops": 1e13 * (name == "matmul"), "dtype": "bf16",
             "read_bytes": 1e6} for name, seconds, kernels in rows]  # fmt: skip
    seen = profile(full, source="measured", device="NVIDIA H100", idle_s=idle_s)
    assert step_verdict(hotspots(seen, workload(ops([MATMUL])), cluster())) == verdict


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OP_CLASSES[:-2]), st.floats(1e-7, 1.0)), min_size=1, max_size=40), st.floats(0, 1))
def test_any_measured_step_is_partitioned(rows: list[tuple[str, float]], idle_s: float):
    seen = profile([{"op_class": c, "measured_s": s} for c, s in rows], source="measured", device="NVIDIA H100", idle_s=idle_s)
    spots = hotspots(seen, workload(ops([MATMUL])), cluster())
    assert sum(s.time_share for s in spots) == 1.0
    assert sum(s.time_s for s in spots) == pytest.approx(sum(s for _, s in rows) + idle_s)
