"""accelerate.yaml: what it says for each kind of plan, that Accelerate reads it so, and that no mistake in it goes unseen."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import yaml
from engine_plans import REPOSITORY, gpt2, llama, resnet
from framework_cases import BOTTLENECKS, GPT2_SMALL, LLAMA_8B, mistakes, python_problems, tool, with_model, written

from advisor.engines import accelerate as engine
from advisor.engines.schema import table
from cost_models.types import Plan

HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None
CASES = {
    "ddp": with_model(resnet(Plan(dp_replicate_degree=8, micro_batch=32, num_microbatches=2, runtime="torch-ddp"), precision="tf32"),
                      BOTTLENECKS | {"unused_parameters": ["classifier.bias"]}),
    "fsdp": with_model(llama(Plan(dp_shard_degree=16, zero_stage=3, recompute="full", runtime="fsdp2")), LLAMA_8B),
    "fsdp-functions": with_model(
        resnet(Plan(dp_shard_degree=4, zero_stage=2, micro_batch=32, recompute="full", runtime="fsdp2"), precision="bf16"), BOTTLENECKS),
    "hsdp": with_model(llama(Plan(dp_replicate_degree=2, dp_shard_degree=8, num_microbatches=2, zero_stage=3, runtime="fsdp2")), LLAMA_8B),
    "zero1": with_model(gpt2(Plan(dp_shard_degree=8, micro_batch=8, zero_stage=1, offload=True, runtime="deepspeed-zero")), GPT2_SMALL),
    "zero3-functions": with_model(
        resnet(Plan(dp_shard_degree=16, zero_stage=3, micro_batch=16, num_microbatches=2, runtime="deepspeed-zero"), precision="bf16"),
        BOTTLENECKS),
    "megatron": with_model(llama(Plan(tp_degree=4, pp_degree=2, dp_shard_degree=2, zero_stage=1, num_microbatches=8, schedule="1f1b",
                                      sequence_parallel=True, recompute="full")), LLAMA_8B),
}  # fmt: skip
MISTAKES = [(case, name, made) for case in CASES for name, made in mistakes(engine.config(CASES[case]))]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize("case", CASES)
def test_files_are_as_committed(case: str, check_golden, tmp_path: Path) -> None:
    inp = CASES[case]
    texts = written(engine, inp)
    for name, text in texts.items():
        check_golden(f"engines/accelerate-{case}/{name}", text)
    assert set(texts) == {p.name for p in (REPOSITORY / f"tests/golden/engines/accelerate-{case}").iterdir()}
    assert engine.supports(inp.plan, inp.model) == ""
    assert engine.validate(texts, inp) == []
    assert python_problems(texts, tmp_path) == ""


@pytest.mark.parametrize(("case", "mistake", "made"), MISTAKES, ids=[f"{case}: {name}" for case, name, _ in MISTAKES])
def test_no_mistake_goes_unseen(case: str, mistake: str, made: dict) -> None:
    inp = CASES[case]
    problems = engine.validate(written(engine, inp) | {"accelerate.yaml": yaml.safe_dump(made)}, inp)
    assert mistake.split(" ")[0].rpartition(".")[2] in "; ".join(problems)


@pytest.mark.parametrize(("text", "problem"), [("a: [", "not YAML"), ("- a", "not a YAML mapping")])
def test_what_is_no_mapping_is_said(text: str, problem: str) -> None:
    files = written(engine, CASES["fsdp"])
    assert problem in "; ".join(engine.validate(files | {"accelerate.yaml": text}, CASES["fsdp"]))
    del files["accelerate.yaml"]
    assert engine.validate(files, CASES["fsdp"]) == ["accelerate.yaml is missing"]


@pytest.mark.skipif(not HAS_ACCELERATE, reason="accelerate is not installed")
def test_table_is_that_of_the_installed_version() -> None:
    recorded, installed = table("accelerate"), tool("record_accelerate").recorded()
    if recorded["version"].split(".")[:2] == installed["version"].split(".")[:2]:
        assert recorded["top"] == installed["top"]
        assert recorded["sections"] == installed["sections"]
    else:  # another version than the recorded one must still know every key that is written
        assert set(recorded["top"]) <= set(installed["top"])


EXPECTED = {
    "ddp": {"ACCELERATE_MIXED_PRECISION": "no"},
    "fsdp": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_ACTIVATION_CHECKPOINTING": "true",
             "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"},
    "fsdp-functions": {"FSDP_RESHARD_AFTER_FORWARD": "false", "FSDP_ACTIVATION_CHECKPOINTING": "false", "ACCELERATE_MIXED_PRECISION": "bf16"},
    "hsdp": {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "8", "FSDP_VERSION": "2"},
    "zero1": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1", "ACCELERATE_GRADIENT_CLIPPING": "0.0",
              "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none"},
    "zero3-functions": {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2", "ACCELERATE_MIXED_PRECISION": "bf16"},
    "megatron": {"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_TP_DEGREE": "4", "MEGATRON_LM_PP_DEGREE": "2",
                 "MEGATRON_LM_NUM_MICRO_BATCHES": "8", "MEGATRON_LM_SEQUENCE_PARALLELISM": "True",
                 "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER": "True", "MEGATRON_LM_RECOMPUTE_GRANULARITY": "full"},
}  # fmt: skip


@pytest.mark.skipif(not HAS_ACCELERATE, reason="accelerate is not installed")
@pytest.mark.parametrize("case", CASES)
def test_accelerate_reads_the_file_as_meant(case: str, tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(written(engine, CASES[case])["accelerate.yaml"])
    found = tool("accelerate_environment").environment_of(path)
    assert {key: found.get(key) for key in EXPECTED[case]} == EXPECTED[case]


@pytest.mark.parametrize(
    ("plan", "model", "reason"),
    [
        (Plan(cp_degree=2), LLAMA_8B, "neither sequences nor experts"),
        (Plan(tp_degree=2), GPT2_SMALL, "not GPT2"),
        (Plan(tp_degree=2), {}, "not this model"),
        (Plan(tp_degree=2, dp_shard_degree=2, zero_stage=3), LLAMA_8B, "optimizer states alone"),
        (Plan(pp_degree=2, num_microbatches=4, schedule="interleaved", virtual_stages=2), LLAMA_8B, "no virtual stages"),
        (Plan(pp_degree=2, num_microbatches=4, schedule="gpipe"), LLAMA_8B, "1F1B"),
        (Plan(tp_degree=2, offload=True), LLAMA_8B, "offload"),
        (Plan(dp_replicate_degree=2, dp_shard_degree=2, zero_stage=1), LLAMA_8B, "over all data ranks"),
        (Plan(dp_replicate_degree=2, recompute="full"), {}, "no repeated layers"),
    ],
)
def test_what_it_cannot_express_has_a_reason(plan: Plan, model: dict, reason: str) -> None:
    assert reason in engine.supports(plan, model)


def test_layers_that_have_no_class_of_their_own_are_one_unit() -> None:
    for classes in ([], ["Sequential"]):
        assert engine.config(with_model(CASES["fsdp"], {"block_classes": classes}))["fsdp_config"]["fsdp_auto_wrap_policy"] == "NO_WRAP"


def test_several_nodes_meet_at_the_first() -> None:
    line = engine.start_line(CASES["zero3-functions"], "advice/plan-1/accelerate")
    assert line == ("accelerate launch --config_file advice/plan-1/accelerate/accelerate.yaml --main_process_ip $HEAD_NODE "
                    "advice/plan-1/accelerate/train_accelerate.py")  # fmt: skip


def test_a_script_that_uses_accelerate_is_launched_itself(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("from accelerate import Accelerator\naccelerator = Accelerator()\n")
    inp = dataclasses.replace(CASES["zero1"], script=str(script), script_args=("--lr", "1e-3"))
    assert engine.start_line(inp, "accelerate") == f"accelerate launch --config_file accelerate/accelerate.yaml {script} --lr 1e-3"
    assert "train_accelerate.py" not in engine.files(inp, str(script))
    assert engine.start_line(CASES["zero1"], "accelerate") == ""
