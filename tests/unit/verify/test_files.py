"""verify.json in an advice folder, the fitted link, and refusals for want of memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cost_models
from advisor.engines import EngineInput
from advisor.errors import OutputError
from advisor.measure.microbench import CollectiveRate
from advisor.profiling.schema import ProfileMeta
from advisor.report.output import MARKER, add_file, check_output
from advisor.verify import memory
from advisor.verify.predict import fitted_link
from cost_models.types import Plan


@pytest.fixture
def advice(tmp_path: Path) -> Path:
    folder = tmp_path / "advice"
    (folder / "plan-1").mkdir(parents=True)
    (folder / MARKER).write_text(json.dumps({"written_by": "parallel-advisor", "files": {}}))
    return folder


def test_a_verified_advice_can_be_replaced(advice: Path) -> None:
    add_file(advice, "plan-1/verify.json", "{}\n")
    add_file(advice, "plan-1/verify.json", "{} \n")
    check_output(advice)
    assert [p.name for p in (advice / "plan-1").iterdir()] == ["verify.json"]


def test_an_edited_result_is_the_user_s(advice: Path) -> None:
    add_file(advice, "plan-1/verify.json", "{}\n")
    (advice / "plan-1" / "verify.json").write_text("mine")
    with pytest.raises(OutputError, match=r"plan-1/verify\.json"):
        check_output(advice)


def test_a_damaged_marker_is_said(advice: Path) -> None:
    (advice / MARKER).write_text("{")
    with pytest.raises(OutputError, match="damaged"):
        add_file(advice, "plan-1/verify.json", "{}\n")


def test_the_link_gives_back_the_smallest_and_the_largest_all_reduce() -> None:
    def rate(num_bytes: int) -> CollectiveRate:
        seconds = 300e-6 + num_bytes / 1e9
        return CollectiveRate(
            operation="all_reduce", backend="gloo", num_ranks=4, message_bytes=num_bytes, seconds=seconds, bus_bytes_per_s=1.0
        )

    link, constants = fitted_link([rate(64 * 2**20), rate(2**20), rate(4096)]), cost_models.load_calibration()
    for num_bytes in (4096, 64 * 2**20):
        s_per_byte = 3 / 4 / (link.bytes_per_s * constants.value("intra_rate_share", family="cpu"))
        priced = 2 * (link.latency_s + 2 * constants.value("intra_latency_s", family="cpu") + num_bytes * s_per_byte)
        assert priced == pytest.approx(300e-6 + num_bytes / 1e9, rel=1e-3)


def test_too_large_a_model_is_refused_with_figures_and_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 10 * 2**30)
    meta = ProfileMeta(script="train.py", num_params=8_000_000_000, param_dtype="bf16")
    inp = EngineInput(plan=Plan(), script="train.py", meta=meta)
    why = memory.why_too_large(inp, 2, trained=True)
    assert why.startswith("2 processes with 8 billion parameters each would take about 268 GiB of memory, of which 10 are free")
    assert "arguments that make it smaller after --" in why
    small = EngineInput(plan=Plan(), script="train.py", meta=ProfileMeta(script="train.py", num_params=1_000_000))
    assert memory.why_too_large(small, 2, trained=True) == ""
