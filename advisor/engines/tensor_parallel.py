"""PyTorch tensor and sequence parallelism (`parallelize_module`), with FSDP2 over the data ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from advisor.engines import common, trainfile
from advisor.engines.environment import render_python
from advisor.engines.scripts import read_script
from advisor.engines.types import EngineInput
from cost_models.types import Plan

NAME = "tensor_parallel"
TITLE = "PyTorch tensor parallelism"
#: Names in `cost_models/runtimes` that this engine is priced by.
RUNTIMES: tuple[str, ...] = ("torch-tp",)
FOLDER = ""
TRAIN_FILE = "train.py"
ABOUT: Mapping[str, str] = {"parallelize.py": common.ABOUT_PARALLELIZE, "train.py": common.ABOUT_TRAIN}

#: Parts of names of weights that hold several products side by side: a contiguous cut would mix them.
_FUSED = ("qkv", "c_attn", "query_key_value", "in_proj", "gate_up")


def supports(plan: Plan, model: Mapping[str, Any]) -> str:
    """Empty when the plan can be expressed, else why not."""
    if plan.tp_degree == 1:
        return "there is nothing to split"
    if plan.pp_degree > 1 or plan.cp_degree > 1 or plan.ep_degree > 1:
        return "pipelines, context and expert parallelism are not written"
    if plan.zero_stage == 1 or plan.offload:
        return "with split layers neither ZeRO-1 nor offloading is written"
    return _why_not_split(model) or common.why_not_recompute(plan, model)


def _why_not_split(model: Mapping[str, Any]) -> str:
    pairs = model.get("tp_pairs") or []
    if not pairs:
        return str(model.get("tp_reason") or "no column and row weights are known")
    if len({pair.get("group", "") for pair in pairs}) > 1:
        return "its layers are of several kinds"
    if model.get("tied"):
        return "weights are tied"
    names = [name for pair in pairs for name in (*pair["column"], *pair["row"])]
    fused = [name for name in names if any(part in name for part in _FUSED)]
    if fused:
        return f"{fused[0]} holds several products in one weight, and a cut would mix them"
    if not all(pair.get("linear", True) for pair in pairs):
        return "some of the weights to split are no nn.Linear"
    return ""


def files(inp: EngineInput, script_path: str) -> dict[str, str]:
    """parallelize.py and, where the script allows it, train.py."""
    texts = {"parallelize.py": render_python("tensor_parallel/parallelize.py.j2", _context(inp))}
    return texts | trainfile.train_file(inp, engine=NAME, file_name=TRAIN_FILE, script_path=script_path)


def _context(inp: EngineInput) -> dict[str, Any]:
    plan = inp.plan
    sharded = plan.zero_stage > 0 and plan.dp_shard_degree > 1
    replicas = plan.dp_replicate_degree if sharded else plan.dp_degree
    data = [("replicate", replicas)] if replicas > 1 else []
    data += [("shard", plan.dp_shard_degree if sharded else 1)] if plan.dp_degree > 1 else []
    names, sizes = zip(*data, ("tensor", plan.tp_degree), strict=True)
    dtype = common.half_dtype(inp)
    recompute = "none" if inp.meta.uses_checkpointing else plan.recompute
    kinds = f"{plan.tp_degree} ranks split every layer" + (" and its sequence" if plan.sequence_parallel else "")
    over = f"; {'parameters' if sharded else 'copies'} over {plan.dp_degree} data ranks" if data else ""
    return {
        "title": f"Tensor parallelism: {kinds}{over}.", "summary": f"Cut the layers over {plan.tp_degree} ranks{_then(plan, sharded)}.",
        "block_patterns": common.block_patterns(inp.model), "needs_blocks": True, "recompute": recompute,
        "checkpointed": common.checkpointed("block", recompute), "sequence_parallel": plan.sequence_parallel,
        "pairs": [{"column": list(p["column"]), "row": list(p["row"])} for p in inp.model["tp_pairs"]],
        "stream": "Shard(1)" if plan.sequence_parallel else "Replicate()", "mesh_shape": sizes, "mesh_names": names,
        "data_mesh": (names[0] if len(data) == 1 else tuple(name for name, _ in data)) if data else "",
        "keeps_gathered": bool(data) and plan.zero_stage != 3, "param_dtype": dtype if data else "", "precision": inp.precision,
        "kept_reason": "layers stay gathered from forward to backward" if sharded else "copies are whole: nothing to gather again",
        "fp32_scores": bool(dtype) and not read_script(trainfile.script_file(inp)).computes_own_loss,
    }  # fmt: skip


def _then(plan: Plan, sharded: bool) -> str:
    if plan.dp_degree == 1:
        return ""
    return ", then shard what each holds over the data ranks" if sharded else ", each group with its own share of the batch"


def start_line(inp: EngineInput, folder: str) -> str:
    """The torchrun command; "" where the script can't be run by a train file."""
    return trainfile.start_line(inp, folder, engine=NAME, file_name=TRAIN_FILE)


def validate(files: Mapping[str, str], inp: EngineInput) -> list[str]:
    """What is wrong with the files; empty when they compile and say what the plan says."""
    return trainfile.check(files, inp, TRAIN_FILE)
