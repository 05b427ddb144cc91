"""From a profiler's events to seconds per operator: on hand-made events of a CPU and of a GPU run, and once for real."""

import dataclasses
import math

import pandas as pd
import pytest

from advisor.profiling.events import Event, MeasuredCall, busy_s, calls_of
from advisor.profiling.merge import merge
from advisor.profiling.schema import MODULE_COLUMNS, OPERATOR_COLUMNS, PARAMETER_COLUMNS, ProfileMeta, StepProfile, frame

NET = "# with Net\n"  # see conftest.py
PATHS = {"11": "", "12": "layers.0"}
OPERATORS = ["aten.addmm", "aten.mm", "aten._foreach_add_", "aten._scaled_dot_product_flash_attention_for_cpu"]


def events_of(*spans):
    """(name, start, end, sequence, kernel microseconds) in one thread, or a thread as sixth."""
    return [
        Event(id=i, name=s[0], start_us=s[1], end_us=s[2], sequence=s[3] if len(s) > 3 else -1, device_us=s[4] if len(s) > 4 else 0.0,
              num_kernels=int(len(s) > 4 and s[4] > 0), thread=s[5] if len(s) > 5 else 1, is_device=False)
        for i, s in enumerate(spans)
    ]  # fmt: skip


STEP = events_of(
    ("advisor:module:11", 0, 100),
    ("advisor:module:12", 10, 60),
    ("aten::linear", 12, 58),
    ("aten::t", 13, 15, 5),
    ("aten::addmm", 16, 56, 6, 30.0),
    ("aten::copy_", 17, 20, -1, 4.0),
    ("autograd::engine::evaluate_function: AddmmBackward0", 110, 160, 6, 0.0, 2),
    ("aten::mm", 115, 150, -1, 60.0, 2),
    ("aten::sum", 151, 155, -1, 5.0, 2),
    ("Optimizer.step#SGD.step", 170, 200),
    ("aten::_foreach_add_", 175, 190, -1, 8.0),
    ("aten::item", 210, 220, -1, 1.0),
)


def test_calls_get_module_phase_and_all_time_inside_them():
    calls = calls_of(STEP, PATHS, OPERATORS, on_device=False)
    named = {(c.module, c.phase, c.operator): c.seconds for c in calls if c.operator}
    assert named == {
        ("layers.0", "forward", "aten.addmm"): pytest.approx(40e-6),
        ("layers.0", "backward", "aten.mm"): pytest.approx(35e-6),
        ("", "optimizer", "aten._foreach_add_"): pytest.approx(15e-6),
    }


def test_on_a_gpu_seconds_and_launches_are_those_of_the_kernels():
    calls = calls_of(STEP, PATHS, OPERATORS, on_device=True)
    named = {c.operator: (c.seconds, c.num_kernels) for c in calls if c.operator}
    assert named["aten.addmm"] == (pytest.approx(34e-6), 2)
    assert sum(c.seconds for c in calls) == pytest.approx((30 + 4 + 60 + 5 + 8 + 1) * 1e-6)


def test_another_fused_attention_kernel_counts_as_the_attention_of_the_trace():
    events = events_of(("aten::scaled_dot_product_attention", 0, 50), ("aten::_scaled_dot_product_cudnn_attention", 5, 45, 3, 40.0))
    calls = calls_of(events, {}, OPERATORS, on_device=True)
    assert [c.operator for c in calls] == ["aten._scaled_dot_product_flash_attention_for_cpu"]


def test_a_forward_inside_backward_is_recomputation():
    events = events_of(("autograd::engine::evaluate_function: CheckpointFunctionBackward", 0, 100, 4), ("advisor:module:12", 10, 60),
                       ("aten::addmm", 20, 40, 9))  # fmt: skip
    assert [(c.phase, c.operator) for c in calls_of(events, PATHS, OPERATORS, on_device=False) if c.operator] == [
        ("recompute", "aten.addmm")
    ]


def test_busy_time_counts_overlapping_kernels_once():
    kernels = [dataclasses.replace(e, is_device=True) for e in events_of(("gemm", 0, 10), ("copy", 5, 12), ("gemm", 20, 25))]
    assert busy_s(kernels) == pytest.approx(17e-6)
    assert busy_s(STEP) == pytest.approx((58 - 12 + 155 - 151 + 150 - 115 + 15 + 10) * 1e-6)


def test_events_survive_being_written_down():
    assert [Event.from_list(e.as_list()) for e in STEP] == STEP


@pytest.fixture
def traced():
    def row(call, module, phase, operator, num_bytes):
        return dict.fromkeys(OPERATOR_COLUMNS, 0) | {
            "call": call, "module": module, "phase": phase, "operator": operator, "read_bytes": num_bytes, "measured_s": math.nan, "num_kernels": 1, "copy_from": "",
        }  # fmt: skip

    rows = [
        row(0, "a", "forward", "aten.mm", 10), row(1, "a", "forward", "aten.mm", 10), row(2, "a", "forward", "aten.relu", 30),
        row(3, "a", "forward", "aten.add", 10), row(4, "", "optimizer", "aten._foreach_add_", 10), row(5, "b", "backward", "aten.mm", 10),
    ]  # fmt: skip
    return StepProfile(meta=ProfileMeta(script="model.py", accumulation=2), operators=frame(rows, OPERATOR_COLUMNS),
                       modules=pd.DataFrame(columns=list(MODULE_COLUMNS)), parameters=pd.DataFrame(columns=list(PARAMETER_COLUMNS)))  # fmt: skip


def call(module, phase, operator, seconds):
    return MeasuredCall(module=module, phase=phase, operator=operator, seconds=seconds)


def merged(profile, calls):
    return merge(profile, calls, device="GPU", step_time_s=1.0, idle_s=0.1, peak_memory_bytes=5, counts_kernels=False)


def test_matching_calls_get_their_mean_over_the_micro_batches(traced):
    calls = [call("a", "forward", "aten.mm", s) for s in (1.0, 2.0, 3.0, 4.0)] + [call("", "optimizer", "aten._foreach_add_", 7.0)]
    assert merged(traced, calls).operators["measured_s"].tolist() == pytest.approx([2.0, 3.0, 0, 0, 7.0, 0])


def test_seconds_without_a_row_stay_in_their_module_and_the_total_is_kept(traced):
    calls = [
        call("a", "forward", "aten.mm", 1.0),
        call("a", "forward", "", 8.0),
        call("c", "backward", "aten.gelu", 4.0),
        call("", "", "", 2.0),
    ]
    profile = merged(traced, calls)
    seconds, times = profile.operators["measured_s"], profile.operators["phase"].map({"optimizer": 1}).fillna(2)
    assert (seconds * times).sum() == pytest.approx(15.0)
    assert seconds[2] > 2 * seconds[3] > 0
    assert seconds[5] >= 2.0
    assert (profile.meta.source, profile.meta.device, profile.meta.step_time_s, profile.meta.idle_s) == ("measured", "GPU", 1.0, 0.1)


SCRIPT = (
    NET
    + """
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Net(256).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    for _ in range(2):
        F.cross_entropy(model(torch.randn(512, 256, device=device)), torch.randint(10, (512,), device=device)).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(model.state_dict(), "model.pt")
"""
)
LARGE = SCRIPT.replace("Net(256)", "Net(8192, 16)").replace("256", "8192").replace("512", "65536")
SHORT = SCRIPT.replace("range(6)", "range(2)")


@pytest.fixture(scope="module")
def live(capture_all):
    return capture_all(
        {"small": SCRIPT, "large": LARGE, "short": SHORT}, small={"capture": "auto"}, large={"capture": "auto"}, short={"capture": "live"}
    )


def test_a_small_step_is_measured_on_this_machine(live):
    profile = live[0]["small"]
    seconds, times = profile.operators["measured_s"], profile.operators["phase"].map({"optimizer": 1}).fillna(profile.meta.accumulation)
    assert profile.meta.source == "measured"
    assert profile.meta.device
    assert profile.meta.accumulation == 2
    assert seconds.notna().all()
    assert 0 < profile.meta.step_time_s < 60
    products = profile.operators["flops"] > 0
    assert (seconds[products] > 0).all()
    assert (seconds * times).sum() > 0
    assert not (live[1] / "model.pt").exists()


def test_a_step_too_long_for_this_machine_is_traced_and_says_why(live):
    meta = live[0]["large"].meta
    if meta.source == "traced":
        assert meta.warnings[-1].startswith("Nothing was measured: ")
        assert "GB" in meta.warnings[-1] or " s, and " in meta.warnings[-1]
    else:
        assert "cpu" not in meta.device.lower()


def test_a_script_of_two_steps_is_measured_with_one_of_them(live):
    assert live[0]["short"].meta.source == "measured"
