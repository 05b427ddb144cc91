"""torchtitan: a configuration function with the model's sizes, and a launch script with the plan's degrees as flags."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from advisor.engines import common, schema
from advisor.engines.decoder import Decoder, decoder
from advisor.engines.environment import render, render_python
from advisor.engines.flags import flag_lines, read_flags
from advisor.engines.launch import torchrun_line
from advisor.engines.types import EngineInput
from cost_models.types import Plan

NAME = "torchtitan"
TITLE = "torchtitan"
RUNTIMES: tuple[str, ...] = ()  # never before an engine that runs the script itself
FOLDER = "torchtitan"
TRAIN_FILE = ""
CONFIG_FILE, LAUNCH_FILE = "titan_config.py", "launch.sh"
ABOUT: Mapping[str, str] = {
    CONFIG_FILE: "the model's sizes for torchtitan, which builds it anew; tokenizer, data and learning rate are yours to set there",
    LAUNCH_FILE: "starts torchtitan with the plan's degrees",
}
_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "tf32": "float32"}


def supports(plan: Plan, model: Mapping[str, Any]) -> str:
    """Empty when torchtitan can express the plan, else why not."""
    try:
        made = decoder(model)
    except ValueError as reason:
        return f"it builds the model anew, and {reason}"
    if not made.gated or not made.rms_norm or made.biases or made.num_positions:
        return "its Llama has gated layers, RMSNorm, rotary positions and no biases, and this model hasn't"
    return _why_not_plan(plan, made)


def _why_not_plan(plan: Plan, made: Decoder) -> str:
    stages = plan.pp_degree * plan.virtual_stages
    checks = (
        (plan.zero_stage == 1, "its FSDP shards gradients with the optimizer states"),
        (plan.ep_degree > 1, "this model has no experts"),
        (plan.offload and plan.zero_stage < 3, "it offloads sharded parameters and optimizer states together"),
        (bool(made.num_heads % plan.tp_degree or made.num_kv_heads % plan.tp_degree),
         f"{made.num_heads} heads and {made.num_kv_heads} for keys and values can't be shared out over {plan.tp_degree} ranks"),
        (bool(made.seq_len % (plan.tp_degree * plan.cp_degree)), f"{made.seq_len} positions can't be shared out evenly"),
        (bool(made.num_layers % stages), f"{made.num_layers} layers make no {stages} equal stages"),
        (plan.pp_degree > 1 and made.tied, "its pipeline can't hold a tied head apart from the embedding"),
    )  # fmt: skip
    return next((reason for wrong, reason in checks if wrong), "")


def flags(inp: EngineInput) -> dict[str, Any]:
    """Flags by name, without the dashes."""
    plan, pipeline = inp.plan, inp.plan.pp_degree > 1
    local = plan.micro_batch * (plan.num_microbatches if pipeline else 1)
    made: dict[str, Any] = {
        "training.local_batch_size": local, "training.global_batch_size": plan.global_batch, "training.seq_len": int(inp.model["seq_len"]),
        "training.dtype": "bfloat16" if inp.meta.param_dtype == "bf16" else "float32", "training.mixed_precision_param": _DTYPES.get(inp.precision, "float32"),
        "parallelism.data_parallel_replicate_degree": plan.dp_degree if plan.zero_stage == 0 else plan.dp_replicate_degree,
        "parallelism.data_parallel_shard_degree": 1 if plan.zero_stage == 0 else plan.dp_shard_degree,
        "parallelism.tensor_parallel_degree": plan.tp_degree, "parallelism.context_parallel_degree": plan.cp_degree,
        "parallelism.pipeline_parallel_degree": plan.pp_degree,
    }  # fmt: skip
    if plan.zero_stage:
        made["parallelism.fsdp_reshard_after_forward"] = "always" if plan.zero_stage == 3 else "never"
    if plan.tp_degree > 1:
        made["parallelism.enable_sequence_parallel"] = plan.sequence_parallel
    if plan.offload:
        made["training.enable_cpu_offload"] = True
    if pipeline:
        made |= {
            "parallelism.pipeline_parallel_schedule": _SCHEDULES[plan.schedule], "parallelism.pipeline_parallel_microbatch_size": plan.micro_batch,
            "parallelism.pipeline_parallel_layers_per_stage": len(inp.model["block_paths"]) // (plan.pp_degree * plan.virtual_stages),
            "parallelism.pipeline_parallel_first_stage_less_layers": 0, "parallelism.pipeline_parallel_last_stage_less_layers": 0,
        }  # fmt: skip
    if pipeline or plan.offload:
        made["training.disable_cuda_graphs"] = True
    if not inp.meta.clips_gradients:
        made["training.max_norm"] = 1e9
    return made


def files(inp: EngineInput, script_path: str) -> dict[str, str]:
    """titan_config.py and launch.sh."""
    del script_path  # torchtitan builds the model itself
    context = {
        "label": inp.plan.label(), "made": decoder(inp.model), "recompute": inp.plan.recompute, "folder": shlex.quote(inp.folder or "."),
        "flags": flag_lines(flags(inp), negated=True), "script": inp.script, "num_nodes": inp.num_nodes,
        "torchrun": torchrun_line(inp, "-m").removesuffix(" -m").replace("$HEAD_NODE", '"$HEAD_NODE"'),
    }  # fmt: skip
    return {CONFIG_FILE: render_python("torchtitan/titan_config.py.j2", context), LAUNCH_FILE: render("torchtitan/launch.sh.j2", context)}


def start_line(inp: EngineInput, folder: str) -> str:
    """Nothing: what it starts isn't the user's own training; launch.sh says how."""
    del inp, folder
    return ""


def validate(files: Mapping[str, str], inp: EngineInput) -> list[str]:
    """What is wrong with the files: flags that torchtitan doesn't know, types, choices, what isn't the plan's or the model's."""
    missing = [f"{name} is missing" for name in (CONFIG_FILE, LAUNCH_FILE) if name not in files]
    problems = missing or common.check_python(CONFIG_FILE, files[CONFIG_FILE])
    if problems:
        return problems
    made = read_flags(files[LAUNCH_FILE], after="train")
    found = schema.check_section(made, schema.table("torchtitan")["flags"])
    return (found or schema.differences(made, flags(inp))) + _not_the_models(files[CONFIG_FILE], inp)


def _not_the_models(text: str, inp: EngineInput) -> list[str]:
    made = decoder(inp.model)
    wanted = {"LAYERS": made.num_layers, "WIDTH": made.hidden_size, "INNER": made.ffn_size, "HEADS": made.num_heads,
              "KV_HEADS": made.num_kv_heads, "VOCAB": made.vocab_size, "SEQ_LEN": made.seq_len}  # fmt: skip
    return common.check_constants(CONFIG_FILE, text, wanted)
