"""DeepSpeed ZeRO 0 to 3, with offloading to the host, split layers (AutoTP) or its pipeline."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from advisor.engines import common, deepspeed_pipeline, ds_schema, trainfile
from advisor.engines.types import EngineInput
from cost_models.types import Plan

NAME = "deepspeed"
TITLE = "DeepSpeed"
#: Names in `cost_models/runtimes` that this engine is priced by.
RUNTIMES: tuple[str, ...] = ("deepspeed-zero", "deepspeed")
FOLDER = ""
TRAIN_FILE = "train_deepspeed.py"
CONFIG_FILE, HOST_FILE = "ds_config.json", "hostfile"
ABOUT: Mapping[str, str] = {
    CONFIG_FILE: "the plan for DeepSpeed (`pip install deepspeed`)",
    TRAIN_FILE: "the same training through DeepSpeed",
    HOST_FILE: "for DeepSpeed's own launcher, in place of torchrun: put your nodes' names in, then, in this folder, `deepspeed --hostfile hostfile train_deepspeed.py`",
    **deepspeed_pipeline.ABOUT,
}


def supports(plan: Plan, model: Mapping[str, Any]) -> str:
    """Empty when DeepSpeed can express the plan, else why not."""
    if plan.cp_degree > 1 or plan.ep_degree > 1:
        return "its context and expert parallelism are not written"
    if plan.pp_degree > 1 and (reason := deepspeed_pipeline.why_not(plan, model)):
        return reason
    if plan.tp_degree > 1 and (reason := _why_not_split(plan, model)):
        return reason
    if plan.zero_stage and plan.dp_replicate_degree > 1 and plan.dp_shard_degree > 1:
        return "its ZeRO shards over all data ranks, not over some"
    return common.why_not_recompute(plan, model)


def _why_not_split(plan: Plan, model: Mapping[str, Any]) -> str:
    """Why AutoTP can't split the layers; empty when it can."""
    pairs = model.get("tp_pairs") or []
    names = [name for pair in pairs for name in (*pair["column"], *pair["row"])]
    if plan.sequence_parallel:
        return "its split layers keep whole sequences"
    if plan.offload or plan.zero_stage == 3 or (plan.zero_stage == 0 and plan.dp_degree > 1):
        return "its split layers go with ZeRO 1 and 2 on the GPU"
    if not pairs or not common.block_patterns(model):
        return str(model.get("tp_reason") or "no column and row weights are known")
    if not all(pair.get("linear", True) for pair in pairs):
        return "some of the weights to split are no nn.Linear"
    fused = [name for name in names if common.is_fused(name)]
    return f"{fused[0]} holds several products in one weight, and a cut would mix them" if fused else ""


def files(inp: EngineInput, script_path: str) -> dict[str, str]:
    """ds_config.json and, where the script allows it, train_deepspeed.py."""
    texts = {CONFIG_FILE: json.dumps(config(inp), indent=2) + "\n"}
    if inp.num_nodes > 1:
        texts[HOST_FILE] = hosts(inp)
    if inp.plan.pp_degree > 1:
        texts |= deepspeed_pipeline.files(inp)
    half = "" if inp.meta.autocast_dtype else common.half_dtype(inp)
    recompute = "none" if inp.meta.uses_checkpointing else inp.plan.recompute
    extra = {
        "cast_inputs": f"torch.{half}" if half else "", "recompute": recompute, "needs_blocks": recompute != "none",
        "block_patterns": common.block_patterns(inp.model), "checkpointed": common.checkpointed("block", recompute),
        **deepspeed_pipeline.train_context(inp.plan),
    }  # fmt: skip
    return texts | trainfile.train_file(inp, engine=NAME, file_name=TRAIN_FILE, script_path=script_path, extra=extra)


def hosts(inp: EngineInput) -> str:
    """The content of hostfile: one line a node."""
    return "".join(f"node-{i} slots={inp.gpus_per_node}\n" for i in range(1, inp.num_nodes + 1))


def config(inp: EngineInput) -> dict[str, Any]:
    """The content of ds_config.json."""
    plan, meta = inp.plan, inp.meta
    made: dict[str, Any] = (
        {} if plan.tp_degree > 1 else {"train_batch_size": plan.global_batch}
    )  # it counts split layers' ranks as data ranks
    made |= {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_clipping": 0.0,  # DeepSpeed would clip to 1 otherwise; a script that clips sets its own norm
        "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,  # the script's own optimizer, whichever it is
        "zero_optimization": _zero(plan),
    }
    if plan.offload:
        made["zero_force_ds_cpu_optimizer"] = False  # the script's torch optimizer steps on the host
    if plan.pp_degree > 1:
        made["pipeline"] = deepspeed_pipeline.section()
    if plan.tp_degree > 1:
        made["tensor_parallel"] = _split(plan, inp.model)
    half = {"bf16": "bfloat16", "fp16": "float16"}.get(meta.autocast_dtype, "")
    if half:
        made["torch_autocast"] = {"enabled": True, "dtype": half}
    elif inp.precision == "bf16" or meta.param_dtype == "bf16":
        made["bf16"] = {"enabled": True}
    elif inp.precision == "fp16" or meta.param_dtype == "fp16":
        made["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
    return made


def _split(plan: Plan, model: Mapping[str, Any]) -> dict[str, Any]:
    """AutoTP with every weight named: its own guesses are for models that it knows."""
    blocks = "|".join(common.block_patterns(model))

    def weights(role: str) -> list[str]:
        return [rf"({blocks})\.{re.escape(name)}\.weight$" for pair in model["tp_pairs"] for name in pair[role]]

    specs = [{"patterns": weights(role), "partition_type": role} for role in ("column", "row")]
    return {"autotp_size": plan.tp_degree, "partition_config": {"use_default_specs": False, "layer_specs": specs}}


def _zero(plan: Plan) -> dict[str, Any]:
    # ZeRO 0 would clip each rank of a tensor group by its own norm; on one data rank stage 1 shards nothing
    zero: dict[str, Any] = {"stage": max(plan.zero_stage, 1) if plan.tp_degree > 1 else plan.zero_stage}
    if zero["stage"]:  # a pipeline's gradients are reduced at the step's end: nothing to overlap with, and no use for buffers
        zero |= {"overlap_comm": plan.pp_degree == 1, "contiguous_gradients": plan.pp_degree == 1}
    if plan.zero_stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if plan.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if plan.offload and plan.zero_stage == 3:  # priced with parameters and gradients on the host
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return zero


def start_line(inp: EngineInput, folder: str) -> str:
    """The torchrun command; "" where the script can't be run by a train file."""
    return trainfile.start_line(inp, folder, engine=NAME, file_name=TRAIN_FILE)


def validate(files: Mapping[str, str], inp: EngineInput) -> list[str]:
    """What is wrong with the files: keys that DeepSpeed would ignore or refuse, batch arithmetic, world size, states that lie
    elsewhere than priced, Python that doesn't compile.
    """
    problems = trainfile.check(files, inp, TRAIN_FILE)
    if inp.plan.pp_degree > 1 and not problems:
        problems = deepspeed_pipeline.validate(files, inp)
    text = files.get(CONFIG_FILE)
    if text is None:
        return [*problems, f"{CONFIG_FILE} is missing"]
    problems += _of_hosts(files.get(HOST_FILE), inp)
    found = ds_schema.problems(text, world_size=inp.plan.dp_degree)
    return problems + (found or _not_the_plans(json.loads(text), config(inp)))


def _of_hosts(text: str | None, inp: EngineInput) -> list[str]:
    """One line `NAME slots=GPUS` a node; names are the user's."""
    if inp.num_nodes == 1:
        return []
    if text is None:
        return [f"{HOST_FILE} is missing"]
    lines = text.splitlines()
    wrong = [line for line in lines if not re.fullmatch(rf"\S+ slots={inp.gpus_per_node}", line)]
    return [f"{HOST_FILE}: {line!r} is no NAME slots={inp.gpus_per_node}" for line in wrong] + (
        [f"{HOST_FILE} has {len(lines)} lines, the plan {inp.num_nodes} nodes"] if len(lines) != inp.num_nodes else []
    )


def _not_the_plans(made: Mapping[str, Any], wanted: Mapping[str, Any], path: str = "") -> list[str]:
    """Where a valid configuration splits, places or computes something otherwise than the plan was priced for."""
    found = []
    for key in dict.fromkeys((*wanted, *made)):
        here, there = made.get(key, "missing"), wanted.get(key, "none")
        if isinstance(here, dict) and isinstance(there, dict):
            found += _not_the_plans(here, there, f"{path}{key}.")
        elif here != there:
            found.append(f"{path}{key} is {here}, the plan needs {there}")
    return found
