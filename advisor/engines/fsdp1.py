"""PyTorch FSDP1 (`FullyShardedDataParallel`): all five of its sharding strategies, for code that hasn't moved to FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from advisor.engines import calls, common, trainfile
from advisor.engines.environment import render_python
from advisor.engines.launch import torchrun_line
from advisor.engines.scripts import read_script
from advisor.engines.types import EngineInput
from cost_models.types import Plan

NAME = "fsdp1"
TITLE = "PyTorch FSDP1"
#: Names in `cost_models/runtimes` that this engine is priced by: none, its plans are priced as those of DDP and FSDP2.
RUNTIMES: tuple[str, ...] = ()
FOLDER = "fsdp1"
TRAIN_FILE = "train.py"
ABOUT: Mapping[str, str] = {
    "parallelize.py": "the same through FullyShardedDataParallel, for code that hasn't moved to FSDP2",
    "train.py": common.ABOUT_TRAIN,
    **trainfile.ABOUT_HELPERS,
}

#: By ZeRO stage, without and with replicas of the shards, and why.
_STRATEGIES = {
    0: ("NO_SHARD", "NO_SHARD", "whole copies, as DDP has them; torch calls this one deprecated and DDP its successor"),
    2: ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "ZeRO-2: layers stay gathered from forward to backward"),
    3: ("FULL_SHARD", "HYBRID_SHARD", "ZeRO-3: a layer is gathered just before it runs, forward and backward"),
}


def supports(plan: Plan, model: Mapping[str, Any]) -> str:
    """Empty when FSDP1 can express the plan, else why not."""
    if plan.pp_degree > 1:
        return "it has no pipeline"
    if plan.tp_degree > 1 or plan.cp_degree > 1 or plan.ep_degree > 1:
        return "it doesn't split layers"
    if plan.zero_stage == 1:
        return "it shards gradients with the optimizer states"
    if plan.zero_stage == 0 and (plan.dp_degree == 1 or plan.offload):
        return "there is nothing to shard"
    if model.get("tied") and not common.block_patterns(model):
        return "without repeated layers it is wrapped by size, which would tear tied weights apart"
    return common.why_not_recompute(plan, model)


def files(inp: EngineInput, script_path: str) -> dict[str, str]:
    """parallelize.py and, where the script allows it, train.py."""
    strategy = _strategy(inp.plan)
    extra = {
        "launch": torchrun_line(inp, f"{inp.folder or '.'}/{FOLDER}/{TRAIN_FILE}"),
        "replicas_only": strategy == "NO_SHARD", "saves_together": strategy != "NO_SHARD",
        "no_syncs": strategy == "NO_SHARD" and inp.plan.num_microbatches > 1,
        "whole_states": strategy == "NO_SHARD" or inp.plan.dp_shard_degree == 1,
    }  # fmt: skip
    texts = {"parallelize.py": render_python("fsdp1/parallelize.py.j2", _context(inp))}
    return texts | trainfile.train_file(inp, engine=NAME, file_name=TRAIN_FILE, script_path=script_path, extra=extra)


def _hybrid(plan: Plan) -> bool:
    return plan.zero_stage > 0 and plan.dp_replicate_degree > 1


def _strategy(plan: Plan) -> str:
    return _STRATEGIES[plan.zero_stage][_hybrid(plan)]


def _mesh_shape(plan: Plan) -> tuple[int, ...]:
    if plan.zero_stage == 0:
        return ()
    return (plan.dp_replicate_degree, plan.dp_shard_degree) if _hybrid(plan) else (plan.dp_shard_degree,)


def _context(inp: EngineInput) -> dict[str, Any]:
    plan = inp.plan
    recompute = "none" if inp.meta.uses_checkpointing else plan.recompute
    dtype = common.half_dtype(inp)
    strategy, reason = _strategy(plan), _STRATEGIES[plan.zero_stage][2]
    over = f"{plan.dp_shard_degree} ranks, on {plan.dp_replicate_degree} replicas of them" if _hybrid(plan) else f"{plan.dp_degree} ranks"
    return {
        "title": f"FSDP1: {strategy} over {over}" + (f", {recompute} recomputation." if recompute != "none" else "."),
        "summary": "Every rank holds the whole model." if strategy == "NO_SHARD" else "Every rank keeps its part of each layer's weights.",
        "block_patterns": common.block_patterns(inp.model), "needs_blocks": True, "recompute": recompute,
        "checkpointed": common.checkpointed("block", recompute), "strategy": strategy, "strategy_reason": reason,
        "mesh_shape": _mesh_shape(plan), "mesh_names": ("replicate", "shard") if _hybrid(plan) else ("shard",), "param_dtype": dtype,
        "precision": inp.precision, "offload": plan.offload, "shards": strategy != "NO_SHARD",
        "fp32_scores": bool(dtype) and not read_script(trainfile.script_file(inp)).computes_own_loss,
        "unit_params": common.unit_params(inp.meta.num_params),
    }  # fmt: skip


def start_line(inp: EngineInput, folder: str) -> str:
    """The torchrun command; "" where the script can't be run by a train file."""
    return trainfile.start_line(inp, folder, engine=NAME, file_name=TRAIN_FILE)


def validate(files: Mapping[str, str], inp: EngineInput) -> list[str]:
    """What is wrong with the files; empty when they compile and say what the plan says."""
    return trainfile.check(files, inp, TRAIN_FILE) or calls.problems("parallelize.py", files.get("parallelize.py", ""), _wanted(inp))


def _wanted(inp: EngineInput) -> dict[str, dict[str, str]]:
    """The arguments that make the plan, as they must be written."""
    plan, context = inp.plan, _context(inp)
    wanted = {
        "sharding_strategy": f"ShardingStrategy.{context['strategy']}", "auto_wrap_policy": calls.ANY, "device_id": calls.ANY,
        "use_orig_params": "True",
    }  # fmt: skip
    if context["mesh_shape"]:
        shape, names = context["mesh_shape"], context["mesh_names"]
        wanted["device_mesh"] = f"init_device_mesh('cuda' if on_gpu else 'cpu', {shape}, mesh_dim_names={names})"
    if context["param_dtype"]:
        wanted["mixed_precision"] = f"MixedPrecision(param_dtype=torch.{context['param_dtype']}, reduce_dtype=torch.float32)"
    if plan.offload:
        wanted["cpu_offload"] = "CPUOffload(offload_params=on_gpu)"
    if context["shards"]:
        wanted["backward_prefetch"] = "BackwardPrefetch.BACKWARD_PRE"
    return {"FullyShardedDataParallel": wanted}
