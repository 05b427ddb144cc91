"""DDP, FSDP1 and FSDP2: which settings a plan, a model and a script bring about, and that a changed one is caught."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from engine_plans import REPOSITORY, gpt2, llama, resnet

from advisor.engines import EngineInput, ddp, fsdp1, fsdp2, plan_files
from cost_models.types import Plan

DDP = Plan(dp_replicate_degree=2, micro_batch=4, runtime="torch-ddp")
FSDP = Plan(dp_shard_degree=2, micro_batch=4, zero_stage=3, runtime="fsdp2")
HYBRID = Plan(dp_replicate_degree=2, dp_shard_degree=4, zero_stage=3)
FOLDER = Path("advice/plan-1")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def parallelize(inp: EngineInput, engine=ddp) -> str:
    return engine.files(inp, "../../model.py")["parallelize.py"]


def with_script(inp: EngineInput, tmp_path: Path, source: str) -> EngineInput:
    script = tmp_path / "script.py"
    script.write_text(source)
    return dataclasses.replace(inp, script=str(script))


@pytest.mark.parametrize(
    ("plan", "strategy"),
    [
        (DDP, "NO_SHARD"),
        (FSDP, "FULL_SHARD"),
        (dataclasses.replace(FSDP, zero_stage=2), "SHARD_GRAD_OP"),
        (HYBRID, "HYBRID_SHARD"),
        (dataclasses.replace(HYBRID, zero_stage=2), "_HYBRID_SHARD_ZERO2"),
    ],
)
def test_fsdp1_has_a_strategy_for_each_plan(plan: Plan, strategy: str) -> None:
    text = parallelize(gpt2(plan), fsdp1)
    assert f"ShardingStrategy.{strategy}," in text
    assert ("device_mesh=" in text) == (strategy != "NO_SHARD")


@pytest.mark.parametrize(
    ("plan", "model", "reason"),
    [
        (Plan(pp_degree=2, schedule="1f1b", num_microbatches=2), {}, "no pipeline"),
        (Plan(tp_degree=2), {}, "doesn't split layers"),
        (Plan(dp_shard_degree=2, zero_stage=1), {}, "shards gradients with the optimizer states"),
        (Plan(), {}, "nothing to shard"),
        (FSDP, {"tied": [["a", "b"]]}, "tear tied weights apart"),
        (dataclasses.replace(FSDP, recompute="full"), {}, "no repeated layers"),
    ],
)
def test_fsdp1_refuses_with_a_reason(plan: Plan, model: dict, reason: str) -> None:
    assert reason in fsdp1.supports(plan, model)


def test_fsdp1_runs_unmodified_scripts_too() -> None:
    assert "route_calls(model, parallel)" in plan_files(gpt2(FSDP), FOLDER)["fsdp1/train.py"]


def test_fsdp1_refuses_a_script_that_scales_its_loss() -> None:
    files = plan_files(gpt2(FSDP, meta={"uses_grad_scaler": True}), FOLDER)
    assert "train.py" in files
    assert "no `fsdp1/train.py`: the script's GradScaler sees this rank's shards alone" in files["README.md"]


def test_models_without_layers_are_wrapped_by_size() -> None:
    inp = dataclasses.replace(resnet(FSDP), model={})
    assert "min_num_params=UNIT_PARAMS" in parallelize(inp, fsdp1)
    assert "for module in units(model)" in parallelize(inp, fsdp2)


@pytest.mark.parametrize(
    ("source", "static"),
    [("x = 1\n", True), ("import random\nif random.random() < 0.1: x = 1\n", False), ("layer = DropPath(0.1)\n", False)],
)
def test_a_graph_is_static_only_without_layers_that_are_skipped(source: str, static: bool, tmp_path: Path) -> None:
    assert ("static_graph=True" in parallelize(with_script(gpt2(DDP), tmp_path, source))) == static


@pytest.mark.parametrize("hazard", ["data-dependent-shapes", "host-sync", "unused-parameters", "recurrent-state-carried"])
def test_a_graph_is_not_static_where_the_profile_saw_control_flow(hazard: str, tmp_path: Path) -> None:
    seen = gpt2(DDP, meta={"hazards": [{"id": hazard, "evidence": "..."}]})
    assert "static_graph" not in parallelize(with_script(seen, tmp_path, "x = 1\n"))


def test_a_graph_is_not_static_with_no_sync(tmp_path: Path) -> None:
    """DDP stops on an assertion of its own otherwise."""
    plan = dataclasses.replace(DDP, num_microbatches=2)
    assert "static_graph" not in parallelize(with_script(gpt2(plan), tmp_path, "x = 1\n"))


def test_gradients_can_be_compressed_between_nodes_only() -> None:
    two_nodes = gpt2(Plan(dp_replicate_degree=16, micro_batch=4))
    assert "COMPRESS = False" in parallelize(two_nodes)
    assert "bf16_compress_hook" in parallelize(two_nodes)
    assert "COMPRESS" not in parallelize(gpt2(DDP))


def test_running_statistics_follow_rank_0() -> None:
    assert "broadcast_buffers=True" in parallelize(resnet(DDP))
    assert "broadcast_buffers" not in parallelize(gpt2(DDP))


def test_layers_are_fetched_ahead_where_there_are_many() -> None:
    few = dataclasses.replace(gpt2(FSDP), model={"block_paths": [f"blocks.{i}" for i in range(4)]})
    assert "set_modules_to_forward_prefetch" in parallelize(gpt2(FSDP), fsdp2)
    assert "prefetch" not in parallelize(few, fsdp2)


def test_a_data_set_of_the_script_is_sampled(tmp_path: Path) -> None:
    functions = "def build_model(): ...\ndef make_batch(n): ...\ndef loss_fn(m, b): ...\n"
    drawn = plan_files(with_script(resnet(DDP), tmp_path, functions), tmp_path / "plan-1")["train.py"]
    read = plan_files(with_script(resnet(DDP), tmp_path, functions + "def make_dataset(): ...\n"), tmp_path / "plan-1")["train.py"]
    assert "draw(user.make_batch, GLOBAL_BATCH, data)" in drawn
    assert "ResumableSampler" not in drawn
    assert "micro_batches(user.make_dataset(), rank, first * NUM_MICROBATCHES)" in read


FP16 = {"precision": "fp16"}


@pytest.mark.parametrize(
    ("engine", "inp", "old", "new", "complaint"),
    [
        (ddp, gpt2(DDP), "bucket_cap_mb", "bucket_cap_md", "did you mean bucket_cap_mb"),
        (ddp, gpt2(DDP), "bucket_cap_mb=25", "bucket_cap_mb=26", "the plan needs 25"),
        (ddp, gpt2(DDP), "bucket_cap_mb=25", 'bucket_cap_mb="25"', "the plan needs 25"),
        (ddp, gpt2(DDP), "gradient_as_bucket_view=True", "gradient_as_bucket_view=False", "the plan needs True"),
        (ddp, gpt2(DDP, model={"unused_parameters": ["a"]}), "find_unused_parameters=True", "find_unused_parameters=0", "needs True"),
        (ddp, resnet(DDP), "broadcast_buffers", "broadcast_bufers", "did you mean broadcast_buffers"),
        (ddp, gpt2(DDP), "DistributedDataParallel(", "DataParallel(", "doesn't call DistributedDataParallel"),
        (fsdp1, gpt2(FSDP), "sharding_strategy", "sharding_stratgy", "did you mean sharding_strategy"),
        (fsdp1, gpt2(FSDP), "FULL_SHARD,", "SHARD_GRAD_OP,", "the plan needs ShardingStrategy.FULL_SHARD"),
        (fsdp1, gpt2(FSDP), "use_orig_params=True", 'use_orig_params="True"', "the plan needs True"),
        (fsdp1, gpt2(HYBRID), "(2, 4)", "(4, 2)", "the plan needs init_device_mesh"),
        (fsdp1, gpt2(FSDP), "BACKWARD_PRE", "BACKWARD_POST", "the plan needs BackwardPrefetch.BACKWARD_PRE"),
        (fsdp1, gpt2(FSDP, **FP16), "param_dtype=torch.float16", "param_dtype=torch.bfloat16", "the plan needs MixedPrecision"),
        (fsdp1, gpt2(dataclasses.replace(FSDP, offload=True)), "cpu_offload=", "cpu_ofload=", "did you mean cpu_offload"),
        (fsdp2, gpt2(dataclasses.replace(FSDP, zero_stage=2)), "reshard_after_forward=False", "reshard_after_forward=True", "needs False"),
        (fsdp2, gpt2(FSDP, **FP16), "mp_policy=MixedPrecisionPolicy(torch.float16", "mp_policy=MixedPrecisionPolicy(torch.half", "the plan needs"),
        (fsdp2, gpt2(dataclasses.replace(FSDP, offload=True)), "offload_policy", "offload_polcy", "did you mean offload_policy"),
        (fsdp2, gpt2(HYBRID), '("replicate", "shard")', '("replicate", "shards")', "the plan needs ('replicate', 'shard')"),
        (fsdp2, gpt2(HYBRID), "(2, 4)", "(4, 2)", "the plan needs (2, 4)"),
    ],
)  # fmt: skip
def test_a_changed_setting_is_caught(engine, inp: EngineInput, old: str, new: str, complaint: str) -> None:
    files = engine.files(inp, "../../model.py")
    assert engine.validate(files, inp) == []
    assert old in files["parallelize.py"]
    assert complaint in "; ".join(engine.validate(files | {"parallelize.py": files["parallelize.py"].replace(old, new, 1)}, inp))


def golden_inputs() -> dict[str, EngineInput]:
    """Functions in the forms that the shared cases don't show."""
    hybrid = Plan(dp_replicate_degree=2, dp_shard_degree=8, micro_batch=8, num_microbatches=2, zero_stage=2, recompute="selective")
    return {
        "ddp-functions": resnet(Plan(dp_replicate_degree=16, micro_batch=32, num_microbatches=2), engines=("ddp",), precision="fp16"),
        "fsdp1-functions": resnet(hybrid, engines=("fsdp1",), precision="fp16"),
        "fsdp1-replicated": resnet(DDP, engines=("fsdp1",)),
        "fsdp1-llama": llama(HYBRID, engines=("fsdp1",)),
    }


@pytest.mark.parametrize("case", golden_inputs())
def test_files_are_as_committed(case: str, check_golden) -> None:
    for name, text in plan_files(golden_inputs()[case], FOLDER).items():
        check_golden(f"engines/{case}/{name}", text)
