"""Files for other frameworks run for real, two processes over gloo, and compute what one process computes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from engine_cells import DEEPSPEED_IMPORTS, HERE, losses, run_cells
from tools import tool

from advisor.engines import EngineInput, accelerate, lightning, trainer
from advisor.profiling.schema import ProfileMeta
from advisor.verify.starts import heavy_imports
from cost_models.types import Plan

MODELS = HERE / "models"
#: What the profile would tell of the small models.
FACTS = {
    "gpt2": {"class": "GPT2", "block_paths": [f"h.{i}" for i in range(4)], "block_classes": ["Block"], "tied": [["wte.weight", "lm_head.weight"]]},
    "llama_gqa": {"class": "LlamaForCausalLM", "block_paths": [f"model.layers.{i}" for i in range(4)], "block_classes": ["LlamaDecoderLayer"],
                  "num_heads": 4, "num_kv_heads": 2, "tp_pairs": [
                      {"column": [f"self_attn.{n}_proj" for n in "qkv"], "row": ["self_attn.o_proj"]},
                      {"column": ["mlp.gate_proj", "mlp.up_proj"], "row": ["mlp.down_proj"]}]},
}  # fmt: skip
DDP = Plan(dp_replicate_degree=2, micro_batch=2, num_microbatches=2, runtime="torch-ddp")
FSDP = Plan(dp_shard_degree=2, micro_batch=2, num_microbatches=2, zero_stage=3, recompute="full", runtime="fsdp2")
SPLIT = Plan(tp_degree=2, micro_batch=4, num_microbatches=2, runtime="torch-tp")
ZERO = Plan(dp_shard_degree=2, micro_batch=2, num_microbatches=2, zero_stage=2, runtime="deepspeed-zero")
#: By cell: engine, model, plan and, for Accelerate, the configuration file.
CELLS = {
    "accelerate-ddp": (accelerate, "gpt2", DDP, "accelerate.yaml"),
    "accelerate-fsdp2": (accelerate, "llama_gqa", FSDP, "accelerate.yaml"),
    "accelerate-fsdp2-tied": (accelerate, "gpt2", FSDP, "accelerate.yaml"),
    "accelerate-fsdp1": (accelerate, "gpt2", FSDP, "fsdp1.yaml"),
    "accelerate-deepspeed": (accelerate, "gpt2", ZERO, "accelerate.yaml"),
    "trainer-ddp": (trainer, "llama_gqa", DDP, ""),
    "trainer-fsdp2": (trainer, "llama_gqa", FSDP, ""),
    "trainer-deepspeed": (trainer, "llama_gqa", ZERO, ""),
    "lightning-ddp": (lightning, "gpt2", DDP, ""),
    "lightning-fsdp2": (lightning, "llama_gqa", FSDP, ""),
    "lightning-tensor": (lightning, "llama_gqa", SPLIT, ""),
}


def framework_input(model: str, plan: Plan) -> EngineInput:
    meta = ProfileMeta(script=f"{model}.py", form="functions", model_class=FACTS[model]["class"], optimizer="adamw", batch_size=4)
    return EngineInput(plan=plan, script=str(MODELS / f"{model}.py"), form="functions", meta=meta, gpus_per_node=2, model=FACTS[model])


def written(engine, inp: EngineInput, folder: Path) -> Path:
    """The train file, beside the others of its engine."""
    assert engine.supports(inp.plan, inp.model) == ""
    texts = engine.files(inp, inp.script)
    assert engine.validate(texts, inp) == []
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder / engine.TRAIN_FILE


def cell(name: str, folder: Path) -> dict:
    engine, model, plan, config = CELLS[name]
    train = written(engine, framework_input(model, plan), folder / f"{name}-files")
    arguments = ["--steps", "3"]
    environment = {}
    if engine is lightning:
        return {"name": name, "file": str(train), "args": arguments}
    if engine is accelerate:
        arguments += ["--max-norm", "1e6"]  # never reached
        environment = tool("accelerate_environment").environment_of(train.parent / config)
    if plan.zero_stage == 0:
        environment["ACCELERATE_USE_CPU"] = "true"
    return {"name": name, "file": str(HERE / "accelerate_on_cpu.py"), "args": [str(train), *arguments], "env": environment}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("frameworks")
    alone = [
        {"name": model, "file": str(HERE / "references.py"), "args": ["functions", str(MODELS / f"{model}.py"), "2", "4"], "alone": True}
        for model in FACTS
    ]
    cells = alone + [cell(name, folder) for name in CELLS]
    imports = (*DEEPSPEED_IMPORTS, *heavy_imports(["accelerate", "trainer", "lightning"]))
    return run_cells(cells, folder, num_procs=2, imports=imports)


@pytest.mark.parametrize("name", CELLS)
def test_reproduces_the_losses_of_one_process(name: str, results: dict[str, list[dict]]) -> None:
    ranks, (alone,) = results[name], results[CELLS[name][1]]
    assert [rank["code"] for rank in ranks] == [0, 0], "\n".join(rank["output"][-3000:] for rank in ranks)
    expected = losses(alone["output"])
    assert len(expected) == 3
    assert losses(ranks[0]["output"]) == pytest.approx(expected, rel=1e-4)


BECAME = {
    "accelerate-ddp": ("MULTI_CPU", "DistributedDataParallel", 0),
    "accelerate-fsdp2": ("FSDP", "FSDPLlamaForCausalLM", 1),
    "accelerate-fsdp2-tied": ("FSDP", "FSDPGPT2", 1),
    "accelerate-fsdp1": ("FSDP", "FullyShardedDataParallel", 0),
    "accelerate-deepspeed": ("DEEPSPEED", "DeepSpeedEngine", 0),
    "trainer-ddp": ("MULTI_CPU", "DistributedDataParallel", 0),
    "trainer-fsdp2": ("FSDP", "FSDPLlamaForCausalLM", 1),
    "trainer-deepspeed": ("DEEPSPEED", "DeepSpeedEngine", 0),
}


@pytest.mark.parametrize("name", BECAME)
def test_accelerate_did_as_its_file_says(name: str, results: dict[str, list[dict]]) -> None:
    """Its exit code tells nothing: it is 0 where nothing was sharded."""
    for rank in results[name]:
        found = json.loads(re.search(r"became (.*)", rank["output"]).group(1))
        kind, wrapper, sharded_share = BECAME[name]
        assert (found["distributed_type"], found["num_processes"], found["class"]) == (kind, 2, wrapper)
        assert found["num_sharded"] == sharded_share * found["num_parameters"]
        assert found["placements"] == (["(Shard(dim=0),)"] if sharded_share else [])


@pytest.mark.parametrize("name", [name for name in CELLS if name.endswith("fsdp2")])
def test_optimizers_step_shards(name: str, results: dict[str, list[dict]]) -> None:
    for rank in results[name]:
        held = rank["steps"][-1]
        assert (held["num_plain_tensors"], held["placements"], held["meshes"]) == (0, ["(Shard(dim=0),)"], ["(2,)"])
        assert held["num_local"] == pytest.approx(held["num_params"] / 2, rel=0.01)


@pytest.mark.parametrize("name", CELLS)
def test_takes_one_step_per_global_batch_on_two_ranks(name: str, results: dict[str, list[dict]]) -> None:
    for rank in results[name]:
        steps = [step for step in rank["steps"] if step["optimizer"] == "AdamW"]
        assert [(step["world_size"], step["backend"]) for step in steps] == [(2, "gloo")] * 3


def test_lightning_splits_the_layers(results: dict[str, list[dict]]) -> None:
    for rank in results["lightning-tensor"]:
        held = rank["steps"][-1]
        assert held["num_local"] < 0.8 * held["num_params"]
        assert {"(Shard(dim=0),)", "(Shard(dim=1),)"} <= set(held["placements"])
