"""PyTorch DistributedDataParallel; ZeRO-1 through ZeroRedundancyOptimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from advisor.engines import calls, common, trainfile
from advisor.engines.checks import normalizes_batches
from advisor.engines.environment import render_python
from advisor.engines.scripts import read_script
from advisor.engines.types import EngineInput
from cost_models.types import Plan

NAME = "ddp"
TITLE = "PyTorch DDP"
#: Names in `cost_models/runtimes` that this engine is priced by.
RUNTIMES: tuple[str, ...] = ("torch-ddp", "ddp")
FOLDER = ""
TRAIN_FILE = "train.py"
ABOUT: Mapping[str, str] = {"parallelize.py": common.ABOUT_PARALLELIZE, "train.py": common.ABOUT_TRAIN, **trainfile.ABOUT_HELPERS}

_MEGABYTE = 2**20
#: DDP's default bucket, and the share of all gradients that a bucket should not exceed, so that reduction overlaps backward.
_BUCKET_MB, _GRADIENT_SHARE = 25, 0.8
#: Hazards of a profile, and names in a script, that let a step's graph differ from the last one's.
_CONTROL_FLOW = {"data-dependent-shapes", "host-sync", "unused-parameters", "shared-module-called-n-times", "recurrent-state-carried"}
_RANDOM_LAYERS = {"random", "layerdrop", "drop_path", "DropPath", "stochastic_depth", "StochasticDepth", "bernoulli", "nonzero"}


def supports(plan: Plan, model: Mapping[str, Any]) -> str:
    """Empty when DDP can express the plan, else why not."""
    if plan.tp_degree > 1 or plan.cp_degree > 1 or plan.ep_degree > 1:
        return "it doesn't split layers"
    if plan.pp_degree > 1:
        return "it has no pipeline"
    if plan.zero_stage > 1 and plan.dp_shard_degree > 1:
        return "it keeps whole parameters and gradients on every rank"
    if plan.zero_stage == 1 and plan.dp_replicate_degree > 1:
        return "ZeroRedundancyOptimizer shards over all data ranks, not over some"
    if plan.offload:
        return "it can't keep optimizer states on the host"
    return common.why_not_recompute(plan, model)


def files(inp: EngineInput, script_path: str) -> dict[str, str]:
    """parallelize.py and, where the script allows it, train.py."""
    texts = {"parallelize.py": render_python("ddp/parallelize.py.j2", _context(inp))}
    return texts | trainfile.train_file(inp, engine=NAME, file_name=TRAIN_FILE, script_path=script_path)


def _context(inp: EngineInput) -> dict[str, Any]:
    plan = inp.plan
    bucket = _bucket_mb(inp)
    reason = "the default" if bucket == _BUCKET_MB else f"{_GRADIENT_SHARE:.0%} of the gradients, so that reducing can overlap backward"
    recompute = "none" if inp.meta.uses_checkpointing else plan.recompute
    half = "" if inp.meta.autocast_dtype else common.half_dtype(inp)
    unused = common.unused_parameters(inp.model)
    title = f"DistributedDataParallel on {plan.dp_degree} rank{'s' if plan.dp_degree > 1 else ''}"
    return {
        "title": title + (f", {recompute} recomputation." if recompute != "none" else "."), "recompute": recompute,
        "block_patterns": common.block_patterns(inp.model), "needs_blocks": recompute != "none",
        "checkpointed": common.checkpointed("block", recompute), "bucket_cap_mb": bucket, "bucket_reason": reason,
        "unused": common.named(unused), "autocast_dtype": half, "precision": inp.precision, "batch_norm": normalizes_batches(inp),
        "static_graph": _is_static(inp), "compressible": inp.num_nodes > 1 and inp.meta.param_dtype == "fp32",
    }  # fmt: skip


def _bucket_mb(inp: EngineInput) -> int:
    gradient_mb = inp.meta.num_trainable_params * (2 if inp.meta.param_dtype in {"bf16", "fp16"} else 4) / _MEGABYTE
    return max(1, min(_BUCKET_MB, math.floor(_GRADIENT_SHARE * gradient_mb)))


def _is_static(inp: EngineInput) -> bool:
    """Whether every step surely computes the same graph in one backward pass; with more of them no_sync() doesn't go with a static graph."""
    seen = {hazard.get("id") for hazard in inp.meta.hazards}
    names = read_script(trainfile.script_file(inp)).names
    return inp.plan.num_microbatches == 1 and bool(names) and not seen & _CONTROL_FLOW and not names & _RANDOM_LAYERS


def start_line(inp: EngineInput, folder: str) -> str:
    """The torchrun command; "" where the script can't be run by a train file."""
    return trainfile.start_line(inp, folder, engine=NAME, file_name=TRAIN_FILE)


def validate(files: Mapping[str, str], inp: EngineInput) -> list[str]:
    """What is wrong with the files; empty when they compile and say what the plan says."""
    return trainfile.check(files, inp, TRAIN_FILE) or calls.problems("parallelize.py", files.get("parallelize.py", ""), _wanted(inp))


def _wanted(inp: EngineInput) -> dict[str, dict[str, str]]:
    """The arguments that make the plan, as they must be written."""
    context = _context(inp)
    wanted = {"device_ids": calls.ANY, "bucket_cap_mb": str(context["bucket_cap_mb"]), "gradient_as_bucket_view": "True"}
    if context["batch_norm"]:
        wanted["broadcast_buffers"] = "True"
    if context["unused"]:
        wanted["find_unused_parameters"] = "True"
    elif context["static_graph"]:
        wanted["static_graph"] = "True"
    return {"DistributedDataParallel": wanted}
