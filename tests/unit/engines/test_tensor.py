"""What the tensor-parallel engine writes for layers of each form, what it refuses and why, and that its validator catches mistakes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from engine_plans import REPOSITORY, gpt2, llama

from advisor.engines import EngineInput
from advisor.engines import tensor_parallel as engine
from advisor.profiling.schema import load_profile
from advisor.workload import model_summary, shape
from cost_models.types import Plan

PROFILES = REPOSITORY / "tests" / "profiles"
TENSOR = Plan(tp_degree=2, micro_batch=8, runtime="torch-tp")


def summary(name: str) -> dict:
    profile = load_profile(PROFILES / name)
    return model_summary(profile, shape(profile))


def pair(column: list[str], row: str, **more) -> dict:
    plain = {"layout": "out_in", "linear": True, "attention": False, "parts": [[1]] * len(column), "inner": [], "adapters": []}
    return {"column": column, "row": [row], **plain, **more}


HEADS = pair(["attn.q", "attn.k", "attn.v"], "attn.o", attention=True)
CONV1D = {
    "block_paths": [f"transformer.h.{i}" for i in range(12)], "num_heads": 12, "num_kv_heads": 12, "vocab_size": 50257,
    "tied": [["transformer.wte.weight", "lm_head.weight"]],
    "tp_pairs": [
        pair(["attn.c_attn"], "attn.c_proj", attention=True, parts=[[1, 1, 1]], layout="in_out", linear=False),
        pair(["mlp.c_fc"], "mlp.c_proj", layout="in_out", linear=False),
    ],
    "tp_tables": [{"module": "transformer.wte", "kind": "embedding", "rows": 50257}, {"module": "lm_head", "kind": "head", "rows": 50257}],
}  # fmt: skip
SHARDED = Plan(
    tp_degree=4, dp_shard_degree=2, zero_stage=3, micro_batch=1, sequence_parallel=True, recompute="selective", runtime="torch-tp"
)
CASES = {
    "tensor-fused": dataclasses.replace(gpt2(TENSOR), model=summary("gpt2")),
    "tensor-conv1d": dataclasses.replace(gpt2(TENSOR), model=CONV1D),
    "tensor-vocabulary": dataclasses.replace(llama(SHARDED), model=summary("llama3_8b")),
}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def files(inp: EngineInput) -> dict[str, str]:
    return engine.files(inp, "../../examples/script.py")


@pytest.mark.parametrize("case", CASES)
def test_files_are_as_committed(case: str, check_golden) -> None:
    texts = files(CASES[case])
    assert set(texts) == {"parallelize.py", "split_layers.py", "train.py"} | ({"cut_loss.py"} if case == "tensor-vocabulary" else set())
    for name, text in texts.items():
        check_golden(f"engines/{case}/{name}", text)


@pytest.mark.parametrize("case", CASES)
def test_python_is_clean_and_short_enough_to_read(case: str, tmp_path: Path) -> None:
    for name, text in files(CASES[case]).items():
        (tmp_path / name).write_text(text)
        assert len(text.splitlines()) < 200 or name == "train.py"
    settings = ["--config", str(REPOSITORY / "pyproject.toml")]
    checked = [name for name in files(CASES[case]) if name != "train.py"]
    for command in (
        ["ruff", "check", *settings, "--ignore", "D,S,T20", "."],
        ["ruff", "format", "--diff", *settings, "."],
        ["mypy", "--config-file", "", "--no-site-packages", "--ignore-missing-imports", *checked],  # seconds: torch is not read
    ):
        done = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


PLAIN = {"block_paths": ["layers.0", "layers.1"], "tp_pairs": [HEADS, pair(["up"], "down")], "num_heads": 8, "num_kv_heads": 8}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_heads": 12, "num_kv_heads": 6}, "6 key-value heads can't be shared out evenly over 4 ranks"),
        ({"num_heads": 6, "num_kv_heads": 6}, "6 heads can't be shared out"),
        (
            {"tp_pairs": [HEADS | {"column": ["attn.in_proj_weight"], "layout": ""}]},
            "nn.MultiheadAttention keeps q, k and v in a bare parameter",
        ),
        ({"tp_pairs": [pair(["moe.experts.0.w1"], "moe.experts.0.w2")]}, "experts are cut by expert parallelism"),
        ({"tp_pairs": [pair(["up"], "down", layout="")]}, "no nn.Linear (or transformers' Conv1D)"),
        ({"tp_pairs": [pair(["attn.qkv"], "attn.o", parts=[[]])]}, "attn.qkv holds several products in one weight"),
        (
            {"tp_pairs": [HEADS | {"adapters": ["attn.q.lora_B", "attn.o.lora_A"]}]},
            "low-rank adapters (attn.q.lora_B, attn.o.lora_A) are no nn.Linear layers",
        ),
        (
            {"tp_pairs": [pair(["attn.qkv"], "attn.o", parts=[[1, 1, 1]], low_rank={"out": ["attn.lora_B"], "in": []})]},
            "attn.qkv holds several products in one weight, and an adapter beside it",
        ),
        ({"tp_pairs": [HEADS | {"inner": ["attn.q_norm"]}]}, "attn.q_norm has weights between split layers"),
        ({"tp_pairs": [HEADS | {"group": "encoder"}, HEADS | {"group": "decoder"}]}, "its layers are of several kinds"),
        ({"tp_pairs": [], "tp_reason": "convolutions do 99% of the flops"}, "convolutions do 99% of the flops"),
        ({"loose_parameters": ["layers.0.gamma"]}, "layers.0.gamma belongs to a layer that has modules of its own"),
    ],
)
def test_models_that_cannot_be_cut_have_a_reason(change: dict, reason: str) -> None:
    plan = dataclasses.replace(TENSOR, tp_degree=4)
    assert engine.supports(plan, PLAIN) == ""
    assert reason in engine.supports(plan, PLAIN | change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"zero_stage": 3, "dp_shard_degree": 2, "offload": True}, "no offloading"),
        ({"tp_degree": 1}, "nothing to split"),
        ({"pp_degree": 2, "schedule": "1f1b"}, "pipelines"),
        ({"cp_degree": 2}, "context and expert parallelism"),
    ],
)
def test_plans_that_it_cannot_express_have_a_reason(change: dict, reason: str) -> None:
    assert reason in engine.supports(dataclasses.replace(TENSOR, **change), PLAIN)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt2", ""), ("llama3_8b", ""), ("lora_7b", "low-rank adapters"), ("vit_finetune", ""), ("multitask_unused", "MultiheadAttention"),
        ("two_device_copy", "several kinds"), ("resnet50", "convolutions"), ("lstm_lm", "recurrent"),
    ],
)  # fmt: skip
def test_profiled_models_are_cut_or_refused(name: str, reason: str) -> None:
    found = engine.supports(TENSOR, summary(name))
    assert reason in found if reason else found == ""


def test_fused_weights_are_cut_product_by_product() -> None:
    layers = files(CASES["tensor-fused"])["split_layers.py"]
    assert 'FUSED = {"attention.qkv": (1, 1, 1)}' in layers
    assert "FUSED" not in files(CASES["tensor-vocabulary"])["split_layers.py"]
    grouped = dataclasses.replace(CASES["tensor-fused"], model=PLAIN | {"tp_pairs": [pair(["attn.wqkv"], "attn.o", parts=[[4, 1, 1]])]})
    assert 'FUSED = {"attn.wqkv": (4, 1, 1)}' in files(grouped)["split_layers.py"]


@pytest.mark.parametrize(
    ("vocab", "rows", "cut"),
    [(50257, 50257, False), (50304, 50304, True), (50304, 1024, False), (128, 130, False)],
    ids=["odd", "even", "table of positions", "shards of unequal size"],
)
def test_the_vocabulary_is_cut_where_it_can_be_shared_out_evenly(vocab: int, rows: int, cut: bool) -> None:
    plan = dataclasses.replace(TENSOR, dp_shard_degree=4, zero_stage=3)
    tables = [{"module": "embed", "kind": "embedding", "rows": rows}]
    text = files(dataclasses.replace(gpt2(plan), model=PLAIN | {"vocab_size": vocab, "tp_tables": tables}))["parallelize.py"]
    assert ('"embed": RowwiseParallel' in text) == cut
    assert "gather_logits" not in text


def test_parameters_beside_layers_are_kept_whole_outside_of_the_repeated_layers() -> None:
    text = files(dataclasses.replace(gpt2(TENSOR), model=PLAIN | {"loose_parameters": ["cls_token"]}))["parallelize.py"]
    assert "keep_whole(module, tensor)" in text
    assert "keep_whole" not in files(CASES["tensor-fused"])["parallelize.py"]
    assert "cls_token belongs to a module" in engine.why_not_split(PLAIN | {"loose_parameters": ["cls_token"]}, 2)


@pytest.mark.parametrize(("seq_len", "reason"), [(1024, ""), (0, ""), (197, "a sequence of 197 can't be shared out evenly over 2 ranks")])
def test_a_sequence_is_split_where_it_can_be_shared_out_evenly(seq_len: int, reason: str) -> None:
    plan = dataclasses.replace(TENSOR, sequence_parallel=True)
    assert engine.supports(plan, PLAIN | {"seq_len": seq_len}) == reason
    assert engine.supports(TENSOR, PLAIN | {"seq_len": seq_len}) == ""


ADAPTED = pair(
    ["attn.q.base", "attn.k", "attn.v.base"], "attn.o.base", attention=True, low_rank={"out": ["attn.q.B", "attn.v.B"], "in": ["attn.o.A"]}
)


@pytest.mark.parametrize("sequence", [False, True])
def test_adapters_are_cut_beside_their_weights(sequence: bool) -> None:
    model = PLAIN | {"tp_pairs": [ADAPTED], "num_params": 100, "num_trainable_params": 10}
    inp = dataclasses.replace(CASES["tensor-fused"], model=model, plan=dataclasses.replace(TENSOR, sequence_parallel=sequence))
    assert engine.supports(inp.plan, model) == ""
    texts = files(inp)
    layers = texts["split_layers.py"]
    assert 'LOW_RANK = {"out": ["attn.q.B", "attn.v.B"], "in": ["attn.o.A"]}' in layers
    assert 'ATTENTION = {"attn.q.base": "attn"}' in layers  # not the adapter around a weight
    assert ("requires_grad_(False)" in layers) == sequence
    assert engine.validate(texts, inp) == []
    texts["split_layers.py"] = layers.replace('"in": ["attn.o.A"]', '"in": []')
    assert "LOW_RANK is" in "; ".join(engine.validate(texts, inp))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        (
            {"whole_logits": "argmax reads the logits beside the cross-entropy"},
            "# gathered: argmax reads the logits beside the cross-entropy",
        ),
    ],
)
def test_logits_stay_cut_or_are_gathered_for_a_reason(change: dict, reason: str) -> None:
    texts = files(dataclasses.replace(CASES["tensor-vocabulary"], model=CASES["tensor-vocabulary"].model | change))
    assert ("cut_loss.py" in texts) == ("keep_logits_cut(module)" in texts["parallelize.py"]) == (not reason)
    assert reason in texts["parallelize.py"]


def test_a_cross_entropy_imported_by_name_sees_whole_logits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from torch.nn.functional import cross_entropy\n")
    texts = files(dataclasses.replace(CASES["tensor-vocabulary"], script=str(script)))
    assert "# gathered: the script imports cross_entropy by name, where it can't be exchanged" in texts["parallelize.py"]


@pytest.mark.parametrize(("micro_batches", "once"), [(2, True), (1, False)])
def test_zero_1_reduces_gradients_once_a_step(micro_batches: int, once: bool) -> None:
    plan = Plan(tp_degree=2, dp_shard_degree=2, zero_stage=1, num_microbatches=micro_batches, runtime="torch-tp")
    assert engine.supports(plan, PLAIN) == ""
    texts = engine.files(llama(plan), "examples/llama3_8b.py")
    assert ("set_requires_gradient_sync(at_boundary())" in texts["train.py"]) == once
    assert "reshard_after_forward=False" in texts["parallelize.py"]


def test_precision_needs_no_data_ranks() -> None:
    half = dataclasses.replace(CASES["tensor-fused"], precision="bf16")
    assert "MixedPrecisionPolicy(torch.bfloat16, torch.float32)" in files(half)["parallelize.py"]
    assert "fully_shard" not in files(CASES["tensor-fused"])["parallelize.py"]


@pytest.mark.parametrize(("micro_batches", "late"), [(2, True), (1, False)])
def test_replicas_are_reduced_once_a_step(micro_batches: int, late: bool) -> None:
    plan = Plan(tp_degree=2, dp_replicate_degree=2, num_microbatches=micro_batches, runtime="torch-tp")
    text = engine.files(llama(plan), "examples/llama3_8b.py")["train.py"]
    assert ("set_requires_all_reduce(at_boundary())" in text) == late


def test_tied_weights_stay_tied() -> None:
    assert "# tied still" in files(CASES["tensor-fused"])["parallelize.py"]
    assert "# tied still" not in files(CASES["tensor-vocabulary"])["parallelize.py"]


@pytest.mark.parametrize(
    ("name", "old", "new", "complaint"),
    [
        ("train.py", "WORLD_SIZE = 2", "WORLD_SIZE = 4", "WORLD_SIZE is 4, the plan says 2"),
        ("train.py", "WORLD_SIZE = 2", "WORLDSIZE = 2", "WORLD_SIZE is missing"),
        ("train.py", "BACKWARDS_PER_STEP = 1", 'BACKWARDS_PER_STEP = "1"', "BACKWARDS_PER_STEP is 1"),
        ("parallelize.py", "(2,), mesh_dim_names", "(4,), mesh_dim_names", "mesh is (4,), named ('tensor',); the plan says (2,)"),
        ("parallelize.py", "init_device_mesh(device_type, (2,)", "init_device_mesh(device_type, 2", "mesh is 2, named"),
        ("parallelize.py", '("tensor",)', '("tensr",)', "named ('tensr',)"),
        ("parallelize.py", "def parallelize(", "def paralelize(", "parallelize.py defines no parallelize"),
        ("split_layers.py", '(["mlp.0"], ["mlp.2"])', '(["mlp.0"], ["mlp.3"])', "PAIRS"),
        ("split_layers.py", "(1, 1, 1)", "(1, 1)", "FUSED"),
        ("split_layers.py", "PAIRS = [", "PAIR = [", "PAIRS is missing"),
        ("split_layers.py", "def split_layers(", "def split_layers(:", "split_layers.py line"),
    ],
)
def test_validator_catches(name: str, old: str, new: str, complaint: str) -> None:
    inp = CASES["tensor-fused"]
    texts = files(inp)
    assert engine.validate(texts, inp) == []
    assert old in texts[name]
    assert complaint in "; ".join(engine.validate(texts | {name: texts[name].replace(old, new)}, inp))
