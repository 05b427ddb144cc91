"""DeepSpeed ZeRO 0 to 3, with offloading to the host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from advisor.engines import common, ds_schema, trainfile
from advisor.engines.types import EngineInput
from cost_models.types import Plan

NAME = "deepspeed"
TITLE = "DeepSpeed"
#: Names in `cost_models/runtimes` that this engine is priced by.
RUNTIMES: tuple[str, ...] = ("deepspeed-zero", "deepspeed")
FOLDER = ""
TRAIN_FILE = "train_deepspeed.py"
ABOUT: Mapping[str, str] = {"ds_config.json": "the plan for DeepSpeed", "train_deepspeed.py": "the same training through DeepSpeed"}
CONFIG_FILE = "ds_config.json"


def supports(plan: Plan, model: Mapping[str, Any]) -> str:
    """Empty when DeepSpeed can express the plan, else why not."""
    if plan.pp_degree > 1 or plan.tp_degree > 1 or plan.cp_degree > 1 or plan.ep_degree > 1:
        return "only its ZeRO stages are written, not its pipelines and split layers"
    if plan.zero_stage and plan.dp_replicate_degree > 1 and plan.dp_shard_degree > 1:
        return "its ZeRO shards over all data ranks, not over some"
    return common.why_not_recompute(plan, model)


def files(inp: EngineInput, script_path: str) -> dict[str, str]:
    """ds_config.json and, where the script allows it, train_deepspeed.py."""
    texts = {CONFIG_FILE: json.dumps(config(inp), indent=2) + "\n"}
    half = "" if inp.meta.autocast_dtype else common.half_dtype(inp)
    recompute = "none" if inp.meta.uses_checkpointing else inp.plan.recompute
    extra = {
        "cast_inputs": f"torch.{half}" if half else "", "recompute": recompute, "needs_blocks": recompute != "none",
        "block_patterns": common.block_patterns(inp.model), "checkpointed": common.checkpointed("block", recompute),
    }  # fmt: skip
    return texts | trainfile.train_file(inp, engine=NAME, file_name=TRAIN_FILE, script_path=script_path, extra=extra)


def config(inp: EngineInput) -> dict[str, Any]:
    """The content of ds_config.json."""
    plan, meta = inp.plan, inp.meta
    made: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_clipping": 0.0,  # DeepSpeed would clip to 1 otherwise; a script that clips sets its own norm
        "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,  # the script's own optimizer, whichever it is
        "zero_optimization": _zero(plan),
    }
    if plan.offload:
        made["zero_force_ds_cpu_optimizer"] = False  # the script's torch optimizer steps on the host
    half = {"bf16": "bfloat16", "fp16": "float16"}.get(meta.autocast_dtype, "")
    if half:
        made["torch_autocast"] = {"enabled": True, "dtype": half}
    elif inp.precision == "bf16" or meta.param_dtype == "bf16":
        made["bf16"] = {"enabled": True}
    elif inp.precision == "fp16" or meta.param_dtype == "fp16":
        made["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
    return made


def _zero(plan: Plan) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": plan.zero_stage}
    if plan.zero_stage:
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
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
    text = files.get(CONFIG_FILE)
    if text is None:
        return [*problems, f"{CONFIG_FILE} is missing"]
    found = ds_schema.problems(text, world_size=inp.plan.dp_degree)
    return problems + (found or _not_the_plans(json.loads(text)["zero_optimization"], inp.plan))


def _not_the_plans(zero: Mapping[str, Any], plan: Plan) -> list[str]:
    """Where a valid configuration puts states elsewhere than the plan was priced for."""
    wanted = _zero(plan)
    return [
        f"zero_optimization.{key} is {zero.get(key, 'missing')}, the plan needs {wanted.get(key, 'none')}"
        for key in ("stage", "offload_optimizer", "offload_param")
        if zero.get(key) != wanted.get(key)
    ]
