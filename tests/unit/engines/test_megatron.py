"""Megatron-LM's arguments: what they say for each kind of plan, and that no mistake in them goes unseen."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest
from engine_plans import REPOSITORY, gpt2, llama
from framework_cases import GPT2_SMALL, LLAMA_8B, another, with_model, written

from advisor.engines import megatron as engine
from cost_models.types import Plan

GPT2 = GPT2_SMALL | {"optimizer": "adamw"}
CASES = {
    "ddp": with_model(gpt2(Plan(dp_replicate_degree=8, micro_batch=4, num_microbatches=2), precision="fp16"), GPT2),
    "three-dimensions": with_model(
        llama(Plan(tp_degree=4, pp_degree=2, dp_shard_degree=2, zero_stage=1, num_microbatches=8, schedule="interleaved", virtual_stages=4,
                   sequence_parallel=True, recompute="full", offload=True)), LLAMA_8B),
    "zero2": with_model(llama(Plan(dp_shard_degree=8, micro_batch=2, zero_stage=2, recompute="selective")), LLAMA_8B),
    "torch-fsdp": with_model(llama(Plan(dp_shard_degree=16, zero_stage=3, runtime="fsdp2")), LLAMA_8B),
    "hsdp": with_model(llama(Plan(dp_replicate_degree=2, dp_shard_degree=4, zero_stage=3, runtime="megatron-core")), LLAMA_8B),
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize("case", CASES)
def test_files_are_as_committed(case: str, check_golden, tmp_path: Path) -> None:
    inp = CASES[case]
    texts = written(engine, inp)
    check_golden(f"engines/megatron-{case}/pretrain.sh", texts["pretrain.sh"])
    assert engine.supports(inp.plan, inp.model) == ""
    assert engine.validate(texts, inp) == []
    script = tmp_path / "pretrain.sh"
    script.write_text(texts["pretrain.sh"])
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True)


def mistakes() -> list[tuple[str, str, str, str]]:
    """Each argument misspelt, with another value and with another type, as a change of the text."""
    found = []
    for case, inp in CASES.items():
        for key, value in engine.arguments(inp).items():
            if isinstance(value, bool):
                right, changes = f"--{key}", [f"--{key}x", f"--{key} 7", ""]
            else:
                right, changes = f"--{key} {value}", [f"--{key}x {value}", f"--{key} {another(value)}", f"--{key} such", f"--{key}"]
            found += [(case, f"  {right}\n", f"  {changed}\n", key) for changed in changes]
    return found


@pytest.mark.parametrize(("case", "right", "wrong", "key"), mistakes())
def test_no_mistake_goes_unseen(case: str, right: str, wrong: str, key: str) -> None:
    files = written(engine, CASES[case])
    assert right in files["pretrain.sh"]
    problems = engine.validate({"pretrain.sh": files["pretrain.sh"].replace(right, wrong)}, CASES[case])
    assert key in "; ".join(problems)


@pytest.mark.parametrize(
    ("case", "right", "wrong", "problem"),
    [
        ("three-dimensions", "tensor-model-parallel-size 4", "tensor-model-parallel-size 3", "16 ranks aren't a multiple of 3 x 2 x 1"),
        ("three-dimensions", "tensor-model-parallel-size 4", "tensor-model-parallel-size 16", "aren't multiples of tensor-model-parallel-size 16"),
        ("three-dimensions", "num-layers 32", "num-layers 31", "num-layers 31 is no multiple"),
        ("three-dimensions", "virtual-pipeline-stage 4", "virtual-pipeline-stage 3", "16 layers a rank make no virtual stages of 3"),
        ("ddp", "global-batch-size 64", "global-batch-size 63", "63 is no multiple of 4 x 8 data ranks"),
        ("three-dimensions", "  --use-distributed-optimizer\n", "", "overlap-param-gather needs use-distributed-optimizer"),
        ("three-dimensions", "  --use-precision-aware-optimizer\n", "", "optimizer-cpu-offload needs"),
    ],
)  # fmt: skip
def test_sizes_must_divide_as_megatron_wants(case: str, right: str, wrong: str, problem: str) -> None:
    text = written(engine, CASES[case])["pretrain.sh"]
    assert right in text
    assert problem in "; ".join(engine.validate({"pretrain.sh": text.replace(right, wrong)}, CASES[case]))


def test_a_missing_file_is_said() -> None:
    assert engine.validate({}, CASES["ddp"]) == ["pretrain.sh is missing"]


@pytest.mark.parametrize(
    ("plan", "model", "reason"),
    [
        (Plan(), {}, "no equal layers"),
        (Plan(), LLAMA_8B | {"causal_attention": False, "class": "BertModel"}, "no decoder"),
        (Plan(), LLAMA_8B | {"optimizer": "adafactor"}, "no adafactor optimizer"),
        (Plan(ep_degree=2, dp_shard_degree=2), LLAMA_8B, "no experts"),
        (Plan(tp_degree=16), LLAMA_8B, "can't be shared out over 16 ranks"),
        (
            Plan(tp_degree=5, sequence_parallel=True),
            LLAMA_8B | {"num_heads": 5, "num_kv_heads": 5, "hidden_size": 5},
            "experts, adapters",
        ),
        (Plan(cp_degree=3), LLAMA_8B, "no 6 equal pieces"),
        (Plan(pp_degree=3, num_microbatches=3, schedule="1f1b"), LLAMA_8B, "no 3 equal stages"),
        (Plan(pp_degree=2, num_microbatches=3, schedule="gpipe"), LLAMA_8B, "1F1B"),
        (Plan(pp_degree=2, num_microbatches=3, schedule="interleaved", virtual_stages=2), LLAMA_8B, "a multiple of 2 micro-batches"),
        (Plan(dp_shard_degree=2, zero_stage=3, offload=True), LLAMA_8B, "ZeRO-1"),
        (Plan(dp_replicate_degree=2, dp_shard_degree=2, zero_stage=3, runtime="fsdp2"), LLAMA_8B, "over all data ranks"),
    ],
)
def test_what_it_cannot_express_has_a_reason(plan: Plan, model: dict, reason: str) -> None:
    assert reason in engine.supports(plan, {"block_paths": [f"layers.{i}" for i in range(32)], **model})


def test_tied_models_are_left_to_megatrons_own_sharding() -> None:
    """Its use of FSDP2 wants an untied head."""
    inp = CASES["torch-fsdp"]
    assert engine.arguments(inp)["use-torch-fsdp2"]
    tied = dataclasses.replace(inp, model={**inp.model, "tied": [["a", "b"]]})
    assert engine.arguments(tied)["use-megatron-fsdp"]


def test_one_connection_where_megatron_asks_for_it() -> None:
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in written(engine, CASES["three-dimensions"])["pretrain.sh"]
    for case in ("ddp", "torch-fsdp", "hsdp"):
        assert "CUDA_DEVICE_MAX_CONNECTIONS" not in written(engine, CASES[case])["pretrain.sh"]


def test_it_does_not_start_the_users_own_training() -> None:
    assert engine.start_line(CASES["ddp"], "megatron") == ""
