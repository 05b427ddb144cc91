"""ColossalAI's plugin: what it says for each kind of plan, and that no mistake in it goes unseen."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_plans import REPOSITORY, gpt2, llama, resnet
from framework_cases import BOTTLENECKS, GPT2_SMALL, LLAMA_8B, another, python_problems, with_model, written

from advisor.engines import colossalai as engine
from cost_models.types import Plan

CASES = {
    "ddp": with_model(resnet(Plan(dp_replicate_degree=8, micro_batch=32), precision="bf16"),
                      BOTTLENECKS | {"unused_parameters": ["classifier.bias"]}),
    "zero2": with_model(gpt2(Plan(dp_replicate_degree=2, dp_shard_degree=4, micro_batch=8, num_microbatches=4, zero_stage=2, offload=True)),
                        GPT2_SMALL),
    "gemini": with_model(llama(Plan(dp_shard_degree=16, zero_stage=3, num_microbatches=2, recompute="full", offload=True)), LLAMA_8B),
    "hybrid": with_model(
        llama(Plan(tp_degree=4, pp_degree=2, dp_shard_degree=2, zero_stage=1, num_microbatches=8, schedule="interleaved", virtual_stages=2,
                   sequence_parallel=True)), LLAMA_8B),
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize("case", CASES)
def test_files_are_as_committed(case: str, check_golden, tmp_path: Path) -> None:
    inp = CASES[case]
    texts = written(engine, inp)
    check_golden(f"engines/colossalai-{case}/plugin.py", texts["plugin.py"])
    assert engine.supports(inp.plan, inp.model) == ""
    assert engine.validate(texts, inp) == []
    assert python_problems(texts, tmp_path) == ""
    assert engine.start_line(inp, "colossalai") == ""


def mistakes() -> list[tuple[str, str, str, str]]:
    """Each argument misspelt, with another value and with another type, as a change of the text."""
    found = []
    for case, inp in CASES.items():
        for key, value in engine.arguments(inp).items():
            shown = f'"{value}"' if isinstance(value, str) else str(value)
            changes = (f"{key}x={shown}", f"{key}={another(value)!r}", f"{key}=[1, 2]")
            found += [(case, f"{key}={shown},", f"{changed},", key) for changed in changes]
    return found


@pytest.mark.parametrize(("case", "right", "wrong", "key"), mistakes())
def test_no_mistake_goes_unseen(case: str, right: str, wrong: str, key: str) -> None:
    text = written(engine, CASES[case])["plugin.py"]
    assert right in text
    assert key in "; ".join(engine.validate({"plugin.py": text.replace(right, wrong)}, CASES[case]))


def test_other_faults_are_said() -> None:
    inp = CASES["gemini"]
    assert engine.validate({}, inp) == ["plugin.py is missing"]
    assert engine.validate({"plugin.py": "x = 1\n"}, inp) == ["plugin.py calls no GeminiPlugin"]
    assert "plugin.py line 1" in engine.validate({"plugin.py": "def plugin(:\n"}, inp)[0]


@pytest.mark.parametrize(
    ("plan", "model", "reason"),
    [
        (Plan(cp_degree=2), LLAMA_8B, "not written"),
        (Plan(tp_degree=2), GPT2_SMALL, "not of GPT2"),
        (Plan(tp_degree=2, dp_shard_degree=2, zero_stage=3), LLAMA_8B, "no ZeRO-3"),
        (Plan(pp_degree=2, num_microbatches=2, schedule="1f1b", dp_shard_degree=2, zero_stage=2), LLAMA_8B, "no ZeRO-2"),
        (Plan(tp_degree=2, dp_replicate_degree=2, dp_shard_degree=2, zero_stage=1), LLAMA_8B, "over all data ranks"),
        (Plan(pp_degree=2, num_microbatches=2, schedule="gpipe"), LLAMA_8B, "1F1B"),
        (Plan(offload=True), LLAMA_8B, "sharded states alone"),
        (Plan(dp_shard_degree=2, zero_stage=3), LLAMA_8B | {"precision": "tf32"}, "16 bits"),
        (Plan(tp_degree=2, dp_shard_degree=2, zero_stage=1), LLAMA_8B | {"precision": "fp32"}, "16 bits"),
        (Plan(recompute="selective"), LLAMA_8B, "whole layers or none"),
        (Plan(recompute="full"), GPT2_SMALL, "leaves recomputation"),
    ],
)
def test_what_it_cannot_express_has_a_reason(plan: Plan, model: dict, reason: str) -> None:
    assert reason in engine.supports(plan, model)
