"""PyTorch FSDP2 (`fully_shard`): ZeRO-2, ZeRO-3 and hybrid sharding, with offloading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from advisor.engines import calls, common, trainfile
from advisor.engines.environment import render_python
from advisor.engines.scripts import read_script
from advisor.engines.types import EngineInput
from cost_models.types import Plan

NAME = "fsdp2"
TITLE = "PyTorch FSDP2"
#: Names in `cost_models/runtimes` that this engine is priced by.
RUNTIMES: tuple[str, ...] = ("fsdp2",)
FOLDER = ""
TRAIN_FILE = "train.py"
ABOUT: Mapping[str, str] = {"parallelize.py": common.ABOUT_PARALLELIZE, "train.py": common.ABOUT_TRAIN, **trainfile.ABOUT_HELPERS}

#: From so many equal layers on, the next one's gather is issued ahead of time.
_MANY_BLOCKS = 8


def supports(plan: Plan, model: Mapping[str, Any]) -> str:
    """Empty when FSDP2 can express the plan, else why not."""
    if plan.pp_degree > 1:
        return "it has no pipeline"
    if plan.tp_degree > 1 or plan.cp_degree > 1 or plan.ep_degree > 1:
        return "it doesn't split layers"
    if plan.zero_stage < 2:
        return "it shards gradients with the optimizer states" if plan.zero_stage else "there is nothing to shard"
    return common.why_not_recompute(plan, model)


def files(inp: EngineInput, script_path: str) -> dict[str, str]:
    """parallelize.py and, where the script allows it, train.py."""
    texts = {"parallelize.py": render_python("fsdp2/parallelize.py.j2", _context(inp))}
    return texts | trainfile.train_file(inp, engine=NAME, file_name=TRAIN_FILE, script_path=script_path)


def _context(inp: EngineInput) -> dict[str, Any]:
    plan = inp.plan
    hybrid = plan.dp_replicate_degree > 1
    recompute = "none" if inp.meta.uses_checkpointing else plan.recompute
    blocks, dtype = common.block_patterns(inp.model), common.half_dtype(inp)
    scores_out = dtype and not read_script(trainfile.script_file(inp)).computes_own_loss
    shards = f"{plan.dp_shard_degree} ranks" + (f", on {plan.dp_replicate_degree} replicas of them" if hybrid else "")
    states = "Parameters, gradients and optimizer states" if plan.zero_stage == 3 else "Gradients and optimizer states"
    return {
        "title": f"FSDP2: {states.lower()} sharded over {shards}" + (f", {recompute} recomputation." if recompute != "none" else "."),
        "summary": _summary(plan), "block_patterns": blocks, "needs_blocks": True, "recompute": recompute,
        "checkpointed": common.checkpointed("module", recompute), "zero_stage": plan.zero_stage, "offload": plan.offload,
        "mesh_shape": (plan.dp_replicate_degree, plan.dp_shard_degree) if hybrid else (plan.dp_shard_degree,),
        "mesh_names": ("replicate", "shard") if hybrid else ("shard",), "param_dtype": dtype, "precision": inp.precision, "fp32_scores": scores_out,
        "prefetches": len(blocks) == 1 and len(inp.model["block_paths"]) >= _MANY_BLOCKS,
        "unit_params": common.unit_params(inp.meta.num_params),
        "leftovers": "embeddings, last norm and head" if blocks else "what no unit holds",
    }  # fmt: skip


def _summary(plan: Plan) -> str:
    if plan.zero_stage == 2:
        return "Shard everything between steps; a layer's weights are gathered in forward and stay for backward."
    return "Shard everything; a layer's weights are gathered just before it runs, forward and backward."


def start_line(inp: EngineInput, folder: str) -> str:
    """The torchrun command; "" where the script can't be run by a train file."""
    return trainfile.start_line(inp, folder, engine=NAME, file_name=TRAIN_FILE)


def validate(files: Mapping[str, str], inp: EngineInput) -> list[str]:
    """What is wrong with the files; empty when they compile and say what the plan says."""
    return trainfile.check(files, inp, TRAIN_FILE) or calls.problems("parallelize.py", files.get("parallelize.py", ""), _wanted(inp))


def _wanted(inp: EngineInput) -> dict[str, dict[str, str]]:
    """The arguments that make the plan, as they must be written."""
    plan, context = inp.plan, _context(inp)
    wanted = {"mesh": "mesh"}
    if plan.zero_stage == 2:
        wanted["reshard_after_forward"] = "False"
    if context["param_dtype"]:
        wanted["mp_policy"] = f"MixedPrecisionPolicy(torch.{context['param_dtype']}, torch.float32)"
    if plan.offload:
        wanted["offload_policy"] = "CPUOffloadPolicy(pin_memory=device_type == 'cuda')"
    mesh = {"argument 2": str(context["mesh_shape"]), "mesh_dim_names": str(context["mesh_names"])}
    return {"fully_shard": wanted, "init_device_mesh": mesh}
