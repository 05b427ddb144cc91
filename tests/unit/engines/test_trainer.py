"""training_arguments.json: what it says for each kind of plan, that transformers takes it, and that no mistake in it goes unseen."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
from engine_plans import REPOSITORY, llama
from framework_cases import GPT2_SMALL, LLAMA_8B, mistakes, python_problems, tool, with_model, written

from advisor.engines import trainer as engine
from advisor.engines.schema import table
from cost_models.types import Plan

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None and importlib.util.find_spec("accelerate") is not None
SCRIPT = "tests/engines/models/llama_gqa.py"


def functions(plan: Plan, **more):
    """The same model from a file that declares the functions; weights in fp32."""
    inp = with_model(llama(plan), LLAMA_8B, script=SCRIPT, form="functions", **more)
    return dataclasses.replace(inp, meta=dataclasses.replace(inp.meta, param_dtype="fp32", clips_gradients=False))


CASES = {
    "ddp": functions(Plan(dp_replicate_degree=8, num_microbatches=2, recompute="full", runtime="torch-ddp"), precision="tf32"),
    "fsdp": functions(Plan(dp_shard_degree=8, micro_batch=2, zero_stage=3, offload=True, runtime="fsdp2")),
    "deepspeed": functions(Plan(dp_shard_degree=8, num_microbatches=4, zero_stage=3, runtime="deepspeed-zero")),
    "script": with_model(llama(Plan(dp_shard_degree=16, zero_stage=2, recompute="full", runtime="fsdp2")), LLAMA_8B),
}
MISTAKES = [(case, name, made) for case in CASES for name, made in mistakes(engine.arguments(CASES[case]))]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize("case", CASES)
def test_files_are_as_committed(case: str, check_golden, tmp_path: Path) -> None:
    inp = CASES[case]
    texts = written(engine, inp)
    for name, text in texts.items():
        check_golden(f"engines/trainer-{case}/{name}", text)
    assert set(texts) == {p.name for p in (REPOSITORY / f"tests/golden/engines/trainer-{case}").iterdir()}
    assert engine.supports(inp.plan, inp.model) == ""
    assert engine.validate(texts, inp) == []
    assert python_problems(texts, tmp_path) == ""


@pytest.mark.parametrize(("case", "mistake", "made"), MISTAKES, ids=[f"{case}: {name}" for case, name, _ in MISTAKES])
def test_no_mistake_goes_unseen(case: str, mistake: str, made: dict) -> None:
    inp = CASES[case]
    problems = "; ".join(engine.validate(written(engine, inp) | {"training_arguments.json": json.dumps(made)}, inp))
    key = mistake.split(" ")[0].rpartition(".")[2]
    assert key in problems or "train_batch_size 32 is not" in problems  # the product names the three batch keys together


@pytest.mark.parametrize(("text", "problem"), [("{", "not JSON"), ("[]", "not a JSON object")])
def test_what_is_no_object_is_said(text: str, problem: str) -> None:
    files = written(engine, CASES["fsdp"])
    assert problem in "; ".join(engine.validate(files | {"training_arguments.json": text}, CASES["fsdp"]))
    del files["training_arguments.json"]
    assert engine.validate(files, CASES["fsdp"]) == ["training_arguments.json is missing"]


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers and accelerate are not installed")
def test_table_is_that_of_the_installed_version() -> None:
    recorded, installed = table("transformers"), tool("record_transformers").recorded()
    if recorded["version"] == installed["version"]:
        assert recorded == installed
    else:  # another version than the recorded one must still take every argument that is written
        assert {key for case in CASES.values() for key in engine.arguments(case)} <= set(installed["arguments"])


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers and accelerate are not installed")
@pytest.mark.parametrize("case", CASES)
def test_transformers_builds_its_arguments_from_the_file(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TrainingArguments

    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # TrainingArguments writes it
    inp = CASES[case]
    plan = json.loads(written(engine, inp)["training_arguments.json"])
    if plan.get("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    if plan.get("deepspeed"):
        del plan["deepspeed"]["train_batch_size"]  # this test is one process alone
    plan.pop("tf32", None)  # refused without a GPU
    made = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **plan)
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (inp.plan.micro_batch, inp.plan.num_microbatches)
    if plan.get("fsdp"):
        wanted = {
            "fsdp_version": 2,
            "reshard_after_forward": inp.plan.zero_stage == 3,
            "transformer_cls_names_to_wrap": "LlamaDecoderLayer",
        }
        assert {key: made.fsdp_plugin_args[key] for key in wanted} == wanted
        assert made.fsdp_plugin_args.get("cpu_offload", False) == inp.plan.offload


@pytest.mark.parametrize(
    ("plan", "model", "reason"),
    [
        (Plan(), GPT2_SMALL, "GPT2 seems to be none"),
        (Plan(), {}, "this model seems to be none"),
        (Plan(pp_degree=2, num_microbatches=2, schedule="1f1b"), LLAMA_8B, "no pipeline"),
        (Plan(tp_degree=2), LLAMA_8B, 'tp_plan="auto"'),
        (Plan(cp_degree=2), LLAMA_8B, "neither sequences nor experts"),
        (Plan(dp_replicate_degree=2, dp_shard_degree=2, zero_stage=3), LLAMA_8B, "no groups of ranks"),
        (Plan(recompute="selective"), LLAMA_8B, "whole layers or none"),
    ],
)
def test_what_it_cannot_express_has_a_reason(plan: Plan, model: dict, reason: str) -> None:
    assert reason in engine.supports(plan, model)


def test_clips_as_the_script_does() -> None:
    assert engine.arguments(CASES["script"])["max_grad_norm"] == 1.0
    assert engine.arguments(CASES["fsdp"])["max_grad_norm"] == 0.0
    assert engine.arguments(CASES["deepspeed"])["deepspeed"]["gradient_clipping"] == 0.0


def test_starts_by_torchrun_where_there_is_a_train_file() -> None:
    assert engine.start_line(CASES["fsdp"], "trainer") == "torchrun --standalone --nproc-per-node 8 trainer/train_trainer.py"
    assert engine.start_line(CASES["script"], "trainer") == ""
