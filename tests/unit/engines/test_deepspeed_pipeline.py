"""DeepSpeed's pipeline: what is written and refused, and a validator that lets no other cut through."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from engine_plans import REPOSITORY, gpt2, llama

from advisor.engines import EngineInput, deepspeed, engines_for, pipeline, plan_files, why_no_files
from advisor.profiling.schema import ProfileMeta
from cost_models.types import Plan

FOLDER = Path("advice/plan-1")
META = ProfileMeta(script="tests/engines/models/gpt2.py", form="functions", num_params=54_464, num_trainable_params=54_464, optimizer="adamw",
                   batch_size=4, param_dtype="fp32")  # fmt: skip
MODEL = {
    "block_paths": [f"h.{i}" for i in range(4)], "can_pipeline": True, "tied": [["wte.weight", "lm_head.weight"]],
    "stages": [["wte", "wpe", "h.0", "h.1"], ["h.2", "h.3", "ln_f", "lm_head"]],
}  # fmt: skip


def pipe(pp_degree: int = 2, **more) -> Plan:
    return Plan(pp_degree=pp_degree, runtime="torch-tp", **{"schedule": "1f1b", "num_microbatches": 4, **more})


def small(plan: Plan, precision: str = "fp32", **more) -> EngineInput:
    return EngineInput(plan=plan, script=META.script, form="functions", meta=dataclasses.replace(META, **more), model=MODEL, precision=precision,
                       gpus_per_node=plan.world_size, folder=str(FOLDER), engines=("deepspeed",))  # fmt: skip


ALONE = pipe(micro_batch=2)
REPLICAS = pipe(micro_batch=2, dp_replicate_degree=2)
SHARDED = pipe(micro_batch=2, dp_shard_degree=2, zero_stage=1, recompute="selective")
CASES = {"deepspeed-pipeline": small(SHARDED, "bf16"), "deepspeed-pipeline-replicas": small(REPLICAS)}
GOLDEN_FILES = (deepspeed.CONFIG_FILE, "deepspeed_pipeline.py", "deepspeed_stages.py", deepspeed.TRAIN_FILE)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def files(inp: EngineInput) -> dict[str, str]:
    return deepspeed.files(inp, f"../../{inp.script}")


@pytest.mark.parametrize("case", CASES)
def test_files_are_as_committed(case: str, check_golden) -> None:
    texts = {name: text for name, text in files(CASES[case]).items() if name in GOLDEN_FILES}
    for name, text in texts.items():
        check_golden(f"engines/{case}/{name}", text)
    assert set(texts) == set(GOLDEN_FILES)


@pytest.mark.parametrize("case", CASES)
def test_python_is_clean(case: str, tmp_path: Path) -> None:
    for name, text in files(CASES[case]).items():
        if name.endswith(".py"):
            (tmp_path / name).write_text(text)
    settings = ["--config", str(REPOSITORY / "pyproject.toml")]
    check = [sys.executable, "-m", "ruff", "check", *settings, "--ignore", "D,S,T20", "."]
    shape = [sys.executable, "-m", "ruff", "format", "--diff", *settings, "."]
    for command in (check, shape):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_stages_run_by_the_same_text_as_pytorchs_pipelines() -> None:
    """Both engines write stages.py, into one folder where both have files."""
    inp = dataclasses.replace(CASES["deepspeed-pipeline-replicas"], engines=())
    assert files(inp)["stages.py"] == pipeline.files(inp, "x.py")["stages.py"]
    texts = plan_files(inp, FOLDER)
    assert {"train.py", "train_deepspeed.py", "run_stages.py", "deepspeed_stages.py"} <= set(texts)
    assert "- `deepspeed_pipeline.py`: " in texts["README.md"]


def test_accumulation_steps_are_the_micro_batches() -> None:
    made = json.loads(files(small(REPLICAS))[deepspeed.CONFIG_FILE])
    batch = [made[key] for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    assert batch == [16, 2, 4]


def test_layers_that_the_plan_recomputes_do_so_one_by_one() -> None:
    text = files(CASES["deepspeed-pipeline"])["deepspeed_pipeline.py"]
    assert "layer.forward = functools.partial(checkpoint, layer.forward" in text
    assert json.loads(files(CASES["deepspeed-pipeline"])[deepspeed.CONFIG_FILE])["pipeline"] == {"activation_checkpoint_interval": 0}
    assert "checkpoint" not in files(small(SHARDED, uses_checkpointing=True))["deepspeed_pipeline.py"]


def test_a_script_without_a_loss_function_gets_the_cut_but_no_train_file() -> None:
    inp = gpt2(ALONE, model=MODEL, engines=("deepspeed",))
    assert set(files(inp)) == {deepspeed.CONFIG_FILE, "deepspeed_pipeline.py", "deepspeed_stages.py", "stages.py"}
    assert "the stages call the loss by themselves" in why_no_files(inp)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"zero_stage": 2, "dp_shard_degree": 2}, "ZeRO-1 at most"),
        ({"zero_stage": 3, "dp_shard_degree": 2}, "ZeRO-1 at most"),
        ({"schedule": "interleaved", "virtual_stages": 2}, "one schedule, 1F1B"),
        ({"schedule": "gpipe"}, "one schedule, 1F1B"),
        ({"tp_degree": 2}, "split layers don't go into its pipeline"),
        ({"offload": True}, "can't keep states on the host"),
        ({"cp_degree": 2}, "context and expert parallelism"),
        ({"pp_degree": 8}, "4 repeated layers can't fill 8 stages"),
        ({"zero_stage": 1, "dp_shard_degree": 2, "dp_replicate_degree": 2}, "over all data ranks"),
    ],
)
def test_plans_that_it_cant_do_are_refused(change: dict, reason: str) -> None:
    assert reason in deepspeed.supports(dataclasses.replace(ALONE, **change), MODEL)


@pytest.mark.parametrize(
    ("facts", "plan", "reason"),
    [
        ({"can_pipeline": False, "pp_reason": "recurrent layers wait for each time step"}, ALONE, "recurrent layers wait"),
        ({"tied": [["h.0.attn.weight", "h.1.attn.weight"]]}, ALONE, "only the first and the last stage can share one"),
        ({"precision": "bf16"}, REPLICAS, "always shards optimizer states in bf16"),
    ],
)
def test_models_that_it_cant_cut_are_refused(facts: dict, plan: Plan, reason: str) -> None:
    assert reason in deepspeed.supports(plan, {**MODEL, **facts})


def test_bf16_is_taken_where_there_is_nothing_to_shard_or_states_are_sharded_anyway() -> None:
    assert [deepspeed.supports(plan, {**MODEL, "precision": "bf16"}) for plan in (ALONE, SHARDED)] == ["", ""]
    assert [s.supported for s in engines_for(SHARDED, MODEL, wanted=("deepspeed",))] == [True]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('["wte", "wpe", "h.0", "h.1"]', '["wte", "wpe", "h.0"]'),
        ('"h.2", "h.3"', '"h.3", "h.2"'),
        ('("wte.weight", "lm_head.weight")', '("wte.weight", "wte.weight")'),
        ("TIED = ", "TIES = "),
        ("STAGES = ", "STAGE = "),
        ("num_stages=len(STAGES)", "num_stages=1"),
        ("num_stages=", "num_stage="),
        ("partition_method=", "partition="),
        ('partition_method="type:StageLayer"', 'partition_method="parameters"'),
        (', partition_method="type:StageLayer"', ""),
        (', partition_method="type:StageLayer"', ', partition_method="type:StageLayer", activation_checkpoint_interval=1'),
        ("module = PipelineModule", "module = Pipeline"),
        ("def cut_into_stages(", "def cut_into_stages)("),
    ],
)
def test_another_cut_is_caught(old: str, new: str) -> None:
    inp = CASES["deepspeed-pipeline"]
    texts = files(inp)
    assert deepspeed.validate(texts, inp) == []
    assert old in texts["deepspeed_pipeline.py"]
    changed = texts["deepspeed_pipeline.py"].replace(old, new, 1)
    assert deepspeed.validate(texts | {"deepspeed_pipeline.py": changed}, inp) != []


def test_a_missing_cut_is_caught() -> None:
    inp = CASES["deepspeed-pipeline"]
    texts = {name: text for name, text in files(inp).items() if name != "deepspeed_pipeline.py"}
    assert deepspeed.validate(texts, inp) == ["deepspeed_pipeline.py is missing"]


def test_shared_weights_are_no_part_of_a_model_without_any() -> None:
    inp = dataclasses.replace(llama(ALONE), model={
        "block_paths": [f"model.layers.{i}" for i in range(32)], "can_pipeline": True,
        "stages": [[f"model.layers.{i}" for i in range(16)], [f"model.layers.{i}" for i in range(16, 32)]],
    }, num_nodes=1, gpus_per_node=2)  # fmt: skip
    text = files(inp)["deepspeed_pipeline.py"]
    assert "TIED" not in text
    assert deepspeed.validate(files(inp), inp) == []
