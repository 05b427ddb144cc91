"""A recorded trace becomes one step: kernels find the operator that launched them, copies their direction, collectives their bytes."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from advisor.errors import AdvisorError
from advisor.profiling import imported_events
from advisor.profiling.imported import import_trace
from advisor.profiling.schema import OPERATOR_COLUMNS, StepProfile, load_profile, save_profile

TRACE = Path(__file__).parents[2] / "traces" / "cuda_ddp_conv.json"
Data = dict[str, Any]


def changed(tmp_path: Path, change: Callable[[Data], object]) -> StepProfile:
    """The trace after a change, imported."""
    data = json.loads(TRACE.read_text(encoding="utf8"))
    change(data)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(data), encoding="utf8")
    return import_trace(path)


def seconds(profile: StepProfile) -> dict[str, float]:
    """Measured seconds by class."""
    return {str(c): float(s) for c, s in profile.operators.groupby("op_class")["measured_s"].sum().items()}


@pytest.fixture(scope="module")
def profile() -> StepProfile:
    return import_trace(TRACE)


def test_one_whole_step_is_taken(profile: StepProfile):
    assert profile.meta.step_time_s == pytest.approx(10e-3)
    assert profile.meta.source == "imported"
    assert profile.meta.device == "NVIDIA A100-SXM4-80GB"
    assert (profile.meta.optimizer, profile.meta.batch_size) == ("sgd", 8)
    assert list(profile.operators.columns) == list(OPERATOR_COLUMNS)
    assert sum(profile.operators["op_class"] == "optimizer") == 1


def test_every_kernel_of_the_step_is_counted_once(profile: StepProfile):
    assert seconds(profile) == pytest.approx(
        {"copy-host-to-device": 20e-6, "convolution": 270e-6, "normalization": 180e-6, "matmul": 110e-6, "reduction": 5e-6,
         "collective": 400e-6, "copy-same-device": 4e-6, "optimizer": 50e-6, "copy-device-to-host": 2e-6}
    )  # fmt: skip


def test_idle_time_is_the_step_without_the_union_of_kernels(profile: StepProfile):
    # 20 + 120 + 60 + 40 + 5 + 30 + 30 + 10 in forward and backward, then 700-820 | 830-980 beside 950-1350 and 1000-1004, 50, 2
    busy_us = 20 + 10 + 100 + 10 + 60 + 40 + 5 + 30 + 30 + 10 + 120 + 120 + 400 + 50 + 2
    assert profile.meta.idle_s == pytest.approx(10e-3 - busy_us * 1e-6, abs=1e-9)


def test_a_gemm_inside_a_convolution_is_convolution(profile: StepProfile):
    row = profile.operators[profile.operators["operator"] == "aten.cudnn_convolution"].iloc[0]
    assert (row["op_class"], row["num_kernels"], row["phase"]) == ("convolution", 2, "forward")
    assert row["flops"] == 2 * 8 * 32 * 32 * 16 * 3 * 3 * 3
    bias = profile.operators[profile.operators["operator"] == "aten.add_"].iloc[0]
    assert bias["op_class"] == "convolution"


def test_backward_carries_the_class_of_its_forward(profile: StepProfile):
    bias_gradient = profile.operators[profile.operators["operator"] == "aten.sum"].iloc[0]
    assert (bias_gradient["op_class"], bias_gradient["phase"]) == ("matmul", "backward")
    backward = profile.operators[profile.operators["phase"] == "backward"]
    assert set(backward["op_class"]) == {"matmul", "normalization", "convolution", "collective", "copy-same-device"}


def test_adding_up_gradients_is_no_part_of_the_node_before_it(tmp_path: Path):
    def residual(data: Data) -> None:
        node = next(e for e in data["traceEvents"] if e["name"].endswith("evaluate_function: ConvolutionBackward0"))
        add = {**node, "name": "aten::add", "ts": node["ts"] + 76, "dur": 3, "args": {"External id": 9999}}
        launch = {**add, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": node["ts"] + 77, "dur": 1, "args": {"correlation": 9999}}
        kernel = {**launch, "cat": "kernel", "name": "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "dur": 7,
                  "ts": node["ts"] + 2000, "tid": 7, "pid": 0}  # fmt: skip
        for step in (0, 10_000):
            for event in (add, launch, kernel):
                moved = copy.deepcopy(event)
                moved["ts"] += step
                if "correlation" in moved["args"]:
                    moved["args"]["correlation"] += step
                data["traceEvents"].append(moved)

    found = changed(tmp_path, residual)
    assert seconds(found)["elementwise"] == pytest.approx(7e-6)
    assert seconds(found)["convolution"] == pytest.approx(270e-6)


def test_copies_have_direction_devices_and_bytes(profile: StepProfile):
    copies = profile.operators[profile.operators["copy_to"] != ""]
    found = {(r.op_class, r.copy_from, r.copy_to, r.written_bytes) for r in copies.itertuples()}
    assert found == {
        ("copy-host-to-device", "cpu", "cuda:0", 98304),
        ("copy-same-device", "cuda:0", "cuda:0", 655400),
        ("copy-device-to-host", "cuda:0", "cpu", 4),
    }


def test_peer_copies_are_between_devices(tmp_path: Path):
    def peer(data: Data) -> None:
        for event in data["traceEvents"]:
            if event["name"].startswith("Memcpy DtoD"):
                event["name"] = "Memcpy PtoP (Device -> Device)"
                event["args"] |= {"fromDevice": 0, "inDevice": 0, "toDevice": 1, "outDevice": 1}

    rows = changed(tmp_path, peer).operators
    row = rows[rows["op_class"] == "copy-device-to-device"].iloc[0]
    assert (row["copy_from"], row["copy_to"], row["written_bytes"]) == ("cuda:0", "cuda:1", 655400)


def test_collective_has_its_message(profile: StepProfile):
    row = profile.operators[profile.operators["op_class"] == "collective"].iloc[0]
    assert (row["operator"], row["read_bytes"], row["written_bytes"], row["phase"]) == ("c10d.allreduce_", 657192, 657192, "backward")


def test_collective_bytes_come_from_the_operator_when_the_kernel_has_none(tmp_path: Path):
    def older(data: Data) -> None:
        for event in data["traceEvents"]:
            if event["name"].startswith("ncclDevKernel") or event["name"] == "record_param_comms":
                for key in ("Collective name", "In msg nelems", "Out msg nelems"):
                    del event["args"][key]
            if event["name"] == "nccl:all_reduce":
                event["args"] |= {"Input Dims": [[1000]], "Input type": ["c10::Half"]}

    rows = changed(tmp_path, older).operators
    row = rows[rows["op_class"] == "collective"].iloc[0]
    assert (row["operator"], row["read_bytes"]) == ("c10d.allreduce_", 2000)


def test_old_category_names_give_the_same_step(tmp_path: Path, profile: StepProfile):
    def old(data: Data) -> None:
        names = {"cpu_op": "Operator", "user_annotation": "Operator", "kernel": "Kernel", "gpu_memcpy": "Memcpy", "cuda_runtime": "Runtime"}
        for event in data["traceEvents"]:
            event["cat"] = names[event["cat"]]
            args = event["args"]
            event["args"] = {{"External id": "external id", "Input Dims": "Input dims"}.get(k, k): v for k, v in args.items()}

    assert seconds(changed(tmp_path, old)) == pytest.approx(seconds(profile))


def test_rocm_runtime_and_kernels_are_understood(tmp_path: Path):
    def rocm(data: Data) -> None:
        for event in data["traceEvents"]:
            if event["cat"] == "cuda_runtime":
                event["name"] = "hipMemcpyWithStream" if "Memcpy" in event["name"] else "hipLaunchKernel"
                event["args"]["size"] = "98304"
            if event["cat"] == "gpu_memcpy":
                del event["args"]["bytes"]
            if "sgemm" in event["name"]:
                event["name"] = "Cijk_Ailk_Bjlk_SB_MT64x16x16_MI16x16x1"

    rows = changed(tmp_path, rocm).operators
    assert rows[rows["op_class"] == "copy-host-to-device"].iloc[0]["written_bytes"] == 98304
    assert rows[rows["op_class"] == "matmul"]["measured_s"].sum() == pytest.approx(110e-6)


def test_kernels_without_operators_are_judged_by_their_names(tmp_path: Path):
    def kernels_only(data: Data) -> None:
        data["traceEvents"] = [e for e in data["traceEvents"] if e["cat"] in ("kernel", "gpu_memcpy")]

    found = changed(tmp_path, kernels_only)
    assert "marks no steps" in found.meta.warnings[0]
    assert seconds(found)["matmul"] == pytest.approx(2 * (100 + 40 + 30 + 30) * 1e-6)
    assert seconds(found)["optimizer"] == pytest.approx(2 * 50e-6)


def test_steps_without_profiler_marks_are_found_by_optimizer_steps(tmp_path: Path):
    def unmarked(data: Data) -> None:
        events = [e for e in data["traceEvents"] if not e["name"].startswith("ProfilerStep")]
        later = copy.deepcopy([e for e in events if e["ts"] < 1_010_000])
        for event in later:
            event["ts"] += 40_000
            if "correlation" in event["args"]:
                event["args"]["correlation"] += 10_000
        data["traceEvents"] = [e for e in events if e["ts"] < 1_020_000] + later

    found = changed(tmp_path, unmarked)
    assert sum(found.operators["op_class"] == "optimizer") == 1
    assert not any("marks no steps" in w for w in found.meta.warnings)


def test_a_cpu_trace_counts_each_operators_own_time(tmp_path: Path):
    def cpu(data: Data) -> None:
        data["traceEvents"] = [e for e in data["traceEvents"] if e["cat"] in ("cpu_op", "user_annotation")]

    found = changed(tmp_path, cpu)
    rows = found.operators
    assert found.meta.device == "cpu"
    assert set(rows["device"]) == {"cpu"}
    assert rows["measured_s"].sum() <= found.meta.step_time_s
    convolution = rows[(rows["op_class"] == "convolution") & (rows["phase"] == "forward")]
    assert convolution["measured_s"].sum() == pytest.approx(90e-6)  # all of conv2d, however deep
    assert convolution["flops"].sum() == 2 * 8 * 32 * 32 * 16 * 3 * 3 * 3  # once, though conv2d, convolution and cudnn_convolution nest


def test_gloo_collectives_of_a_cpu_trace_carry_their_bytes(tmp_path: Path):
    event = {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "pid": 1, "tid": 9, "ts": 5.0, "dur": 100.0,
             "args": {"Input Dims": [[1000]], "Input type": ["float"]}}  # fmt: skip
    path = tmp_path / "gloo.json"
    path.write_text(json.dumps({"traceEvents": [event]}), encoding="utf8")
    row = import_trace(path).operators.iloc[0]
    assert (row["op_class"], row["read_bytes"], row["measured_s"]) == ("collective", 4000, pytest.approx(100e-6))


def test_recomputed_forwards_are_told_from_backward(tmp_path: Path):
    def checkpointed(data: Data) -> None:
        for event in data["traceEvents"]:
            event["name"] = event["name"].replace(
                "evaluate_function: CudnnBatchNormBackward0", "evaluate_function: CheckpointFunctionBackward"
            )

    rows = changed(tmp_path, checkpointed).operators
    assert set(rows[rows["phase"] == "recompute"]["operator"]) == {"aten.cudnn_batch_norm_backward"}


def test_without_shapes_flops_are_zero_and_said_to_be_unknown(tmp_path: Path):
    def bare(data: Data) -> None:
        for event in data["traceEvents"]:
            event["args"].pop("Input Dims", None)

    found = changed(tmp_path, bare)
    assert found.operators["flops"].sum() == 0
    assert any("record_shapes=True" in w for w in found.meta.warnings)


def test_packed_traces_and_bare_event_lists_are_read(tmp_path: Path, profile: StepProfile):
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(TRACE.read_bytes()))
    assert seconds(import_trace(packed)) == seconds(profile)
    events = tmp_path / "events.json"
    events.write_text(json.dumps(json.loads(TRACE.read_text())["traceEvents"]), encoding="utf8")
    assert seconds(import_trace(events)) == seconds(profile)


def test_an_imported_profile_can_be_saved_and_loaded(tmp_path: Path, profile: StepProfile):
    save_profile(profile, tmp_path / "run")
    again = load_profile(tmp_path / "run")
    assert again.meta == profile.meta
    assert seconds(again) == seconds(profile)


WHOLE = TRACE.read_bytes()
DAMAGED = {
    "cut off": WHOLE[: len(WHOLE) // 2],
    "packed and cut off": gzip.compress(WHOLE)[:2000],
    "damaged inside": gzip.compress(WHOLE)[:500] + b"\0" * 500 + gzip.compress(WHOLE)[1000:],
    "empty": b"",
    "text": b"hello",
    "no trace": b'{"a": 1}',
    "a number": b"7",
    "no list": b'{"traceEvents": 3}',
    "no events": b'{"traceEvents": []}',
    "odd events": b'{"traceEvents": [1, null, {}, {"ph": "X"}, {"ph": "X", "cat": "cpu_op", "ts": "x"}, {"ph": "X", "cat": 3, "ts": 1}]}',
    "only allocations": b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::empty", "ts": 1, "dur": 1}]}',
    "binary": bytes(range(256)) * 10,
    "not finite": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": NaN, "dur": 1}]}',
    "very deep": b'{"traceEvents":' + b"[" * 200_000,
}  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, content: bytes):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(AdvisorError) as caught:
        import_trace(path)
    assert "bad.json" in caught.value.message
    assert "\n" not in str(caught.value)


def test_missing_files_and_folders_are_refused(tmp_path: Path):
    with pytest.raises(AdvisorError, match="no trace"):
        import_trace(tmp_path / "none.json")
    with pytest.raises(AdvisorError, match="can't be read"):
        import_trace(tmp_path)


def test_huge_traces_are_refused_before_they_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(imported_events, "MAX_JSON_BYTES", 1000)
    with pytest.raises(AdvisorError, match="more than"):
        import_trace(TRACE)
