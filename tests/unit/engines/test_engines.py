"""What engines can express, what they refuse and why, and that their validators catch mistakes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from engine_plans import CASES, REPOSITORY, gpt2, llama, resnet

from advisor.engines import ENGINES, engines_for, launch_line, plan_files, why_no_files, write_plan
from advisor.engines.common import block_patterns
from advisor.engines.scripts import read_script
from cost_models.types import Plan

DDP = Plan(dp_replicate_degree=2, micro_batch=4, runtime="torch-ddp")
FSDP = Plan(dp_shard_degree=2, micro_batch=4, zero_stage=3, runtime="fsdp2")
BLOCKS = {"block_paths": ["layers.0", "layers.1"]}


def names(plan: Plan, model: dict | None = None) -> set[str]:
    found = {s.engine for s in engines_for(plan, BLOCKS if model is None else model) if s.supported}
    return found - {"Accelerate", "Hugging Face Trainer", "Lightning", "torchtitan", "Megatron-LM", "ColossalAI"}  # have tests of their own


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def test_each_zero_stage_has_its_engines() -> None:
    assert names(DDP) == {"PyTorch DDP", "PyTorch FSDP1", "DeepSpeed"}
    assert names(Plan(dp_shard_degree=4, zero_stage=1)) == {"PyTorch DDP", "DeepSpeed"}
    assert names(Plan(dp_shard_degree=4, zero_stage=2)) == {"PyTorch FSDP2", "PyTorch FSDP1", "DeepSpeed"}
    assert names(FSDP) == {"PyTorch FSDP2", "PyTorch FSDP1", "DeepSpeed"}
    assert names(Plan(dp_replicate_degree=2, dp_shard_degree=4, zero_stage=3)) == {"PyTorch FSDP2", "PyTorch FSDP1"}
    assert names(Plan(zero_stage=2, offload=True)) == {"PyTorch FSDP2", "PyTorch FSDP1", "DeepSpeed"}


def test_what_no_engine_can_express_has_a_reason_from_each() -> None:
    support = engines_for(Plan(pp_degree=4, schedule="1f1b", num_microbatches=8), BLOCKS)
    assert len(support) == len(ENGINES)
    assert not any(s.supported for s in support)
    assert all(s.reason for s in support)


PAIRS = [{"column": ["q", "k"], "row": ["o"]}]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"tp_pairs": []}, "no column and row weights"),
        ({"tp_pairs": [], "tp_reason": "it has no heads"}, "it has no heads"),
        ({"tp_pairs": [{"column": ["attn.c_attn"], "row": ["attn.c_proj"]}]}, "several products in one weight"),
        ({"tp_pairs": [{"column": ["a"], "row": ["b"], "group": "x"}, {"column": ["a"], "row": ["b"], "group": "y"}]}, "several kinds"),
        ({"tp_pairs": [{"column": ["a"], "row": ["b"], "linear": False}]}, "no nn.Linear"),
    ],
)
def test_layers_that_cannot_be_split_have_a_reason(model: dict, reason: str) -> None:
    plan = Plan(tp_degree=2, dp_shard_degree=2, zero_stage=3)
    assert names(plan, BLOCKS | {"tp_pairs": PAIRS}) == {"PyTorch tensor parallelism"}
    assert not names(plan, BLOCKS | model)
    assert reason in "; ".join(s.reason for s in engines_for(plan, BLOCKS | model))


def test_recomputation_needs_layers_to_recompute() -> None:
    plan = dataclasses.replace(DDP, recompute="full")
    assert names(plan)
    assert not names(plan, {"block_paths": []})


def test_the_engine_that_was_priced_comes_first() -> None:
    assert "plan-1/train.py" in launch_line(gpt2(FSDP))
    assert "plan-1/train_deepspeed.py" in launch_line(gpt2(Plan(dp_shard_degree=2, zero_stage=2, micro_batch=4, runtime="deepspeed-zero")))


def test_launch_line_names_nodes_and_a_rendezvous_only_when_there_are_several() -> None:
    one = launch_line(gpt2(DDP), "advice/plan-2")
    assert one == "torchrun --standalone --nproc-per-node 2 advice/plan-2/train.py"
    two = launch_line(CASES["zero3-two-nodes"])
    assert "--nnodes 2 --nproc-per-node 8" in two
    assert "--rdzv-endpoint $HEAD_NODE" in two


@pytest.mark.parametrize("case", CASES)
def test_generated_files_pass_their_own_check(case: str, tmp_path: Path) -> None:
    written = write_plan(CASES[case], tmp_path / "plan-1")
    assert {p.relative_to(tmp_path / "plan-1").as_posix() for p in (tmp_path / "plan-1").rglob("*") if p.is_file()} == set(written)
    assert (tmp_path / "plan-1" / "launch.sh").stat().st_mode & 0o111


def test_world_must_be_the_plans() -> None:
    with pytest.raises(ValueError, match="don't make the plan's world"):
        dataclasses.replace(gpt2(DDP), gpus_per_node=4)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"train_batch_sise": 4}, "did you mean train_batch_size"),
        ({"train_batch_size": 7}, "is not 4 x 1 x 2 ranks"),
        ({"gradient_accumulation_steps": 3}, "is not 4 x 3 x 2 ranks"),
        ({"gradient_clipping": "1"}, "which is no int or float"),
        ({"zero_optimization": {"stage": 4}}, "not 0 to 3"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpuu"}}}, "not one of cpu"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload_param needs stage 3"),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "did you mean overlap_comm"),
        ({"zero_optimization": {"stage": True}}, "which is no int"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both enabled"),
        ({"optimizer": {"type": "Nope"}}, "not one of Adam"),
        ({"train_micro_batch_size_per_gpu": None}, "which is no int"),
    ],
)
def test_deepspeed_validator_catches(change: dict, complaint: str) -> None:
    inp = gpt2(FSDP)
    files = plan_files(inp, Path("advice/plan-1"))
    config = json.loads(files["ds_config.json"]) | change
    (deepspeed,) = [e for e in ENGINES if e.NAME == "deepspeed"]
    assert deepspeed.validate(files, inp) == []
    problems = deepspeed.validate(files | {"ds_config.json": json.dumps(config)}, inp)
    assert complaint in "; ".join(problems)


def deepspeed_config(plan: Plan) -> dict:
    return json.loads(plan_files(gpt2(plan), Path("advice/plan-1"))["ds_config.json"])["zero_optimization"]


def test_offloading_takes_the_parameters_along_where_they_are_sharded() -> None:
    host = {"device": "cpu", "pin_memory": True}
    three, two = (deepspeed_config(dataclasses.replace(FSDP, zero_stage=stage, offload=True)) for stage in (3, 2))
    assert (three["offload_optimizer"], three["offload_param"]) == (host, host)
    assert (two["offload_optimizer"], two.get("offload_param")) == (host, None)
    assert "offload_param" not in deepspeed_config(FSDP)


def test_deepspeed_validator_wants_states_where_they_were_priced() -> None:
    inp = gpt2(dataclasses.replace(FSDP, offload=True))
    files = plan_files(inp, Path("advice/plan-1"))
    config = json.loads(files["ds_config.json"])
    del config["zero_optimization"]["offload_param"]
    (deepspeed,) = [e for e in ENGINES if e.NAME == "deepspeed"]
    assert deepspeed.validate(files, inp) == []
    assert "offload_param is missing" in "; ".join(deepspeed.validate(files | {"ds_config.json": json.dumps(config)}, inp))


@pytest.mark.parametrize("engine", [e for e in ENGINES if e.NAME in {"ddp", "fsdp2"}], ids=lambda e: e.NAME)
@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("WORLD_SIZE = 2", "WORLD_SIZE = 3", "WORLD_SIZE is 3, the plan says 2"),
        ("MICRO_BATCH = 8, 4", "MICRO_BATCH = 8, 5", "MICRO_BATCH is 5"),
        ("BACKWARDS_PER_STEP = 1", "BACKWARD_PER_STEP = 1", "BACKWARDS_PER_STEP is missing"),
        ("def main()", "def main(", "train.py line"),
    ],
)
def test_train_file_validator_catches(engine, old: str, new: str, complaint: str) -> None:
    inp = gpt2(DDP if engine.NAME == "ddp" else FSDP)
    files = plan_files(inp, Path("advice/plan-1"))
    assert old in files["train.py"]
    assert complaint in "; ".join(engine.validate(files | {"train.py": files["train.py"].replace(old, new)}, inp))


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"num_optimizers": 2}, "2 optimizers"),
        ({"accumulation": 4}, "set the script's own accumulation to 1"),
        ({"other_models": {"UNet": 5}}, "second model"),
        ({"optimizer": "hand-written"}, "by hand"),
    ],
)
def test_scripts_that_cannot_be_run_get_no_train_file_but_a_reason(meta: dict, reason: str) -> None:
    files = plan_files(gpt2(FSDP, meta=meta), Path("advice/plan-1"))
    own = {name for name in files if not name.startswith(("accelerate/", "lightning/", "colossalai/"))}  # which take the user's own loop
    assert own == {"parallelize.py", "fsdp1/parallelize.py", "ds_config.json", "plan.json", "README.md"}
    assert reason in files["README.md"]
    assert launch_line(gpt2(FSDP, meta=meta)) == ""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import torch.distributed as dist\ndist.init_process_group()", "already uses init_process_group"),
        ("from transformers import Trainer\nTrainer()", "already uses Trainer"),
        ("import torch\nmodel = torch.compile(object())", "torch.compile"),
        ("model = build().to('cuda:1')", "cuda:1"),
        ("optimizer.step(closure=f)", "evaluates the model again"),
    ],
)
def test_source_tells_what_cannot_be_wrapped(source: str, reason: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    files = plan_files(dataclasses.replace(gpt2(DDP), script=str(script)), tmp_path / "plan-1")
    assert "train.py" not in files
    assert reason in files["README.md"]


def test_functions_without_data_or_loss_get_no_train_file(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def build_model(): ...\ndef make_batch(n): ...\n")
    files = plan_files(dataclasses.replace(resnet(DDP), script=str(script)), tmp_path / "plan-1")
    assert "train.py" not in files
    assert "declares no loss_fn" in files["README.md"]


def test_functions_without_an_optimizer_get_the_profiled_kind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def build_model(): ...\ndef make_batch(n): ...\ndef loss_fn(m, b): ...\n")
    files = plan_files(dataclasses.replace(resnet(DDP), script=str(script)), tmp_path / "plan-1")
    assert "torch.optim.SGD(model.parameters())" in files["train.py"]


def test_a_script_that_is_not_there_still_gets_files(tmp_path: Path) -> None:
    files = plan_files(dataclasses.replace(gpt2(DDP), script=str(tmp_path / "gone.py")), tmp_path / "plan-1")
    assert "train.py" in files


def test_the_way_to_the_script_is_relative_to_the_folder() -> None:
    assert 'HERE / "../../examples/gpt2.py"' in plan_files(gpt2(DDP), Path("advice/plan-1"))["train.py"]


def test_block_paths_become_one_pattern_per_form() -> None:
    paths = [f"stages.{i}.{j}" for i in range(4) for j in range(3)] + ["head.layers.2", "head.layers.3", "neck"]
    assert block_patterns({"block_paths": paths}) == (r"stages\.\d+\.\d+", r"head\.layers\.\d+", "neck")


def test_own_checkpointing_is_not_doubled() -> None:
    plan = dataclasses.replace(FSDP, recompute="full")
    assert "checkpoint" in plan_files(llama(plan), Path("advice/plan-1"))["parallelize.py"]
    assert "checkpoint" not in plan_files(llama(plan, meta={"uses_checkpointing": True}), Path("advice/plan-1"))["parallelize.py"]


def test_autocast_scripts_keep_their_autocast() -> None:
    own = gpt2(DDP, precision="bf16", meta={"autocast_dtype": "bf16"})
    files = plan_files(own, Path("advice/plan-1"))
    assert "autocast" not in files["parallelize.py"]
    assert json.loads(files["ds_config.json"])["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert "autocast" in plan_files(gpt2(DDP, precision="bf16"), Path("advice/plan-1"))["parallelize.py"]


def test_deepspeed_never_clips_unasked() -> None:
    """Its default clips gradients to a norm of 1."""
    assert json.loads(plan_files(gpt2(DDP), Path("advice/plan-1"))["ds_config.json"])["gradient_clipping"] == 0.0


def test_fp16_needs_one_loss_scaler_and_only_one() -> None:
    without = plan_files(gpt2(DDP, precision="fp16"), Path("advice/plan-1"))
    assert "train.py" not in without
    assert json.loads(without["ds_config.json"])["fp16"]["loss_scale"] == 0  # dynamic
    with_scaler = plan_files(gpt2(DDP, precision="fp16", meta={"uses_grad_scaler": True, "autocast_dtype": "fp16"}), Path("advice/plan-1"))
    assert "train.py" in with_scaler
    assert "train_deepspeed.py" not in with_scaler
    assert "GradScaler(device.type)" in plan_files(resnet(DDP, precision="fp16"), Path("advice/plan-1"))["train.py"]


def test_unused_parameters_are_named() -> None:
    inp = gpt2(DDP, model={"unused_parameters": ["blocks.0.old.weight", "a", "b"]})
    text = plan_files(inp, Path("advice/plan-1"))["parallelize.py"]
    assert "find_unused_parameters=True" in text
    assert "blocks.0.old.weight" in text


def test_batch_normalization_is_pointed_out() -> None:
    assert "SyncBatchNorm" in plan_files(resnet(DDP), Path("advice/plan-1"))["README.md"]
    assert "SyncBatchNorm" not in plan_files(gpt2(DDP), Path("advice/plan-1"))["README.md"]


def test_small_models_get_small_buckets() -> None:
    text = plan_files(gpt2(DDP, meta={}), Path("advice/plan-1"))["parallelize.py"]
    assert "bucket_cap_mb=25" in text
    small = dataclasses.replace(gpt2(DDP), meta=dataclasses.replace(gpt2(DDP).meta, num_trainable_params=2_621_440))
    assert "bucket_cap_mb=8" in plan_files(small, Path("advice/plan-1"))["parallelize.py"]


def test_read_script_survives_what_it_cannot_parse(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def broken(:")
    assert not read_script(bad).names
    assert not read_script(tmp_path / "missing.py").functions


def readme_of(source: str, plan: Plan, tmp_path: Path, *, folder: str = "advice/plan-1", meta: dict | None = None) -> str:
    script = tmp_path / "script.py"
    script.write_text(source)
    inp = dataclasses.replace(gpt2(plan, meta=meta or {}), script=str(script), folder=folder)
    return plan_files(inp, tmp_path / "plan-1")["README.md"]


LOOP = "import torch\nfrom torch.utils.data import DataLoader\nloader = DataLoader(data, 8{more})\n"
SAVE = "torch.save(model.state_dict(), 'best.pt')\n"


def test_saving_is_explained_where_all_ranks_take_part(tmp_path: Path) -> None:
    sometimes = readme_of(LOOP.format(more="") + "if loss < best:\n    " + SAVE, FSDP, tmp_path)
    assert "The script saves inside an `if`: in `train.py` and `train_deepspeed.py` all ranks take part" in sometimes
    assert "drops the value" in sometimes
    always = readme_of(LOOP.format(more="") + SAVE, FSDP, tmp_path)
    assert "The script saves: in `train.py`" in always
    main = readme_of(LOOP.format(more="") + "if __name__ == '__main__':\n    " + SAVE, FSDP, tmp_path)
    assert "The script saves: in `train.py`" in main
    assert "The script saves" not in readme_of(LOOP.format(more=""), FSDP, tmp_path)


def test_saving_of_copies_is_left_to_rank_0(tmp_path: Path) -> None:
    text = readme_of(LOOP.format(more="") + "if loss < best:\n    " + SAVE, DDP, tmp_path)
    assert "The script saves inside an `if`: in `train_deepspeed.py` all ranks take part" in text
    assert "rank 0 alone writes, in `train.py`" in text


def test_leaving_a_loop_early_is_pointed_out(tmp_path: Path) -> None:
    assert "by `break`" in readme_of("while True:\n    break\n", DDP, tmp_path)
    assert "by `break`" not in readme_of("x = 1\n", DDP, tmp_path)


def test_variables_that_the_script_reads_are_named(tmp_path: Path) -> None:
    source = "import os\na = os.environ['DATA']\nb = os.environ.get('SIZE', '3')\nc = os.getenv('MODE')\nd = 'FAST' in os.environ\n"
    text = readme_of(source + "os.environ['WRITTEN'] = '1'\nr = os.environ['RANK']\n", DDP, tmp_path)
    assert "set `DATA`, `FAST`, `MODE`, `SIZE` as when the plan was made" in text


def test_launch_lines_start_from_where_the_folder_is_seen(tmp_path: Path) -> None:
    away = readme_of("x = 1\n", DDP, tmp_path, folder="out/plan-1")
    assert "From the folder in which you ran `advise`:" in away
    assert "nproc-per-node 2 out/plan-1/train.py" in away
    here = readme_of("x = 1\n", DDP, tmp_path, folder="")
    assert "From this folder:" in here
    assert "nproc-per-node 2 train.py" in here
    assert "`python ../script.py`" in here


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (LOOP.format(more=""), "with a batch of 8 (its loader's `batch_size`) and the same number of optimizer steps"),
        (LOOP.format(more=", shuffle=True"), "with `shuffle=False` in both"),
        ("import torch\nx = torch.randint(9, (8,))\n", "can't agree with a single process step by step"),
        ("import torch\nx = data[:8]\n", "are the same on every rank"),
        ("from torch.nn import BatchNorm1d\n", "BatchNorm's statistics are each rank's"),
    ],
)
def test_check_fits_how_the_script_gets_its_batches(source: str, says: str, tmp_path: Path) -> None:
    assert says in readme_of(source, DDP, tmp_path)


def test_check_counts_the_scripts_own_accumulation(tmp_path: Path) -> None:
    plan = dataclasses.replace(DDP, num_microbatches=2)
    text = readme_of(LOOP.format(more=""), plan, tmp_path, meta={"accumulation": 2})
    assert "with a batch of 8 (its loader's `batch_size`) and its 2 backward passes a step" in text


def test_fewer_steps_fit_into_a_data_set_of_one_size(tmp_path: Path) -> None:
    grown = dataclasses.replace(DDP, micro_batch=8)
    assert "each takes 16 samples, the script alone 8" in readme_of(LOOP.format(more=""), grown, tmp_path)
    assert "fewer optimizer steps" not in readme_of(LOOP.format(more=""), DDP, tmp_path)


def test_batch_norm_seen_by_the_profile_counts(tmp_path: Path) -> None:
    seen = {"hazards": [{"id": "batch-norm", "evidence": "53 batch norms"}]}
    assert "SyncBatchNorm" in readme_of("import torchvision\n", DDP, tmp_path, meta=seen)


def test_check_of_functions_is_a_command_that_runs(tmp_path: Path) -> None:
    script = tmp_path / "it's.py"
    script.write_text(
        "import torch\ndef build_model(): return torch.nn.Linear(2, 1)\ndef make_batch(n): return torch.ones(n, 2)\n"
        "def loss_fn(m, b): return (0 * m(b)).sum() + len(b)\n"
    )
    inp = dataclasses.replace(resnet(DDP), script=str(script))
    lines = plan_files(inp, tmp_path / "plan-1")["README.md"].splitlines()
    (command,) = [line.strip() for line in lines if " python -c " in line]
    done = subprocess.run(["bash", "-c", command.replace(" python ", f" {sys.executable} ")], capture_output=True, text=True, check=True)
    assert float(done.stdout) == inp.plan.global_batch


def test_why_there_are_no_files_is_one_sentence() -> None:
    assert why_no_files(gpt2(DDP)) == ""
    accumulates = why_no_files(gpt2(FSDP, meta={"accumulation": 4}))
    assert accumulates.startswith("No train file, because the script accumulates over 4")
    context = gpt2(Plan(cp_degree=2))
    assert "PyTorch DDP: it doesn't split layers" in why_no_files(context)
    assert launch_line(context) == ""


@pytest.mark.parametrize("form", ["script", "functions"])
def test_a_model_spread_over_devices_by_its_script_gets_no_train_file(form: str) -> None:
    split = [{"id": "two-device-split", "evidence": "parameters lie on cuda:0, cuda:1"}]
    inp = dataclasses.replace(gpt2(DDP, meta={"hazards": split}), form=form)
    assert why_no_files(inp).startswith("No train file, because the script places its model on cuda:1 or on several devices")
