"""Megatron-LM: a script that starts `pretrain_gpt.py` with the model's sizes and the plan's degrees."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from advisor.engines import schema
from advisor.engines.decoder import Decoder, decoder
from advisor.engines.environment import render
from advisor.engines.flags import flag_lines, read_flags
from advisor.engines.launch import torchrun_line
from advisor.engines.types import EngineInput
from cost_models.types import Plan

NAME = "megatron"
TITLE = "Megatron-LM"
RUNTIMES: tuple[str, ...] = ()  # never before an engine that runs the script itself
FOLDER = "megatron"
TRAIN_FILE = ""
LAUNCH_FILE = "pretrain.sh"
ABOUT: Mapping[str, str] = {
    LAUNCH_FILE: "the plan and the model's sizes for Megatron-LM 0.19's `pretrain_gpt.py`, on made-up data until you name yours",
}
#: Optimizers by the profile's name.
_OPTIMIZERS = {"adamw": "adam", "adam": "adam", "sgd": "sgd", "lion": "lion"}


def supports(plan: Plan, model: Mapping[str, Any]) -> str:
    """Empty when Megatron-LM can express the plan, else why not."""
    try:
        made = decoder(model)
    except ValueError as reason:
        return f"it builds the model anew, and {reason}"
    optimizer = str(model.get("optimizer") or "adamw")
    if optimizer not in _OPTIMIZERS:
        return f"it has no {optimizer} optimizer"
    return _why_not_sizes(plan, made) or _why_not_sharding(plan, made)


def _why_not_sizes(plan: Plan, made: Decoder) -> str:
    """What can't be divided: the rules of Megatron-LM's own `validate_args`."""
    tp, pp, stages = plan.tp_degree, plan.pp_degree, plan.pp_degree * plan.virtual_stages
    checks = (
        (plan.ep_degree > 1, "this model has no experts"),
        (made.num_heads % tp or made.num_kv_heads % tp,
         f"{made.num_heads} heads and {made.num_kv_heads} for keys and values can't be shared out over {tp} ranks"),
        (plan.sequence_parallel and made.seq_len % tp, f"{made.seq_len} positions can't be shared out over {tp} ranks"),
        (plan.cp_degree > 1 and made.seq_len % (2 * plan.cp_degree), f"{made.seq_len} positions make no {2 * plan.cp_degree} equal pieces"),
        (made.num_layers % stages, f"{made.num_layers} layers make no {stages} equal stages"),
        (pp > 1 and plan.schedule == "gpipe", "its schedule is 1F1B"),
        (plan.virtual_stages > 1 and plan.num_microbatches % pp, f"interleaving wants a multiple of {pp} micro-batches"),
    )  # fmt: skip
    return next((reason for wrong, reason in checks if wrong), "")


def _why_not_sharding(plan: Plan, made: Decoder) -> str:
    hybrid = plan.dp_replicate_degree > 1 and plan.dp_shard_degree > 1
    checks = (
        (plan.offload and plan.zero_stage != 1, "it offloads the optimizer states of its distributed optimizer (ZeRO-1) alone"),
        (hybrid and _with_torch_fsdp(plan, made), "its FSDP2 shards over all data ranks"),
    )
    return next((reason for wrong, reason in checks if wrong), "")


def _with_torch_fsdp(plan: Plan, made: Decoder) -> bool:
    """Whether ZeRO-3 is left to PyTorch's FSDP2; else, and for ZeRO-2, to Megatron's own."""
    return plan.zero_stage == 3 and plan.runtime == "fsdp2" and plan.pp_degree == 1 and not made.tied


def arguments(inp: EngineInput) -> dict[str, Any]:
    """Arguments by name, without the dashes."""
    made = decoder(inp.model)
    return {**_model(made), **_degrees(inp.plan, made), **_sharding(inp.plan, made), **_training(inp, made)}


def _model(made: Decoder) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num-layers": made.num_layers, "hidden-size": made.hidden_size, "ffn-hidden-size": made.ffn_size,
        "num-attention-heads": made.num_heads, "seq-length": made.seq_len, "max-position-embeddings": made.num_positions or made.seq_len,
        "position-embedding-type": "learned_absolute" if made.num_positions else "rope", "normalization": "RMSNorm" if made.rms_norm else "LayerNorm",
        "vocab-size": made.vocab_size, "tokenizer-type": "NullTokenizer",
    }  # fmt: skip
    if made.num_kv_heads != made.num_heads:
        found |= {"group-query-attention": True, "num-query-groups": made.num_kv_heads}
    kinds = {"swiglu": made.gated, "disable-bias-linear": not made.biases, "untie-embeddings-and-output-weights": not made.tied}
    return found | {name: True for name, applies in kinds.items() if applies}


def _degrees(plan: Plan, made: Decoder) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tensor-model-parallel-size": plan.tp_degree, "pipeline-model-parallel-size": plan.pp_degree, "context-parallel-size": plan.cp_degree,
    }  # fmt: skip
    if plan.sequence_parallel and plan.tp_degree > 1:
        found["sequence-parallel"] = True
    if plan.virtual_stages > 1:
        found["num-layers-per-virtual-pipeline-stage"] = made.num_layers // (plan.pp_degree * plan.virtual_stages)
    return found


def _sharding(plan: Plan, made: Decoder) -> dict[str, Any]:
    """Who keeps parameters, gradients and optimizer states."""
    if plan.zero_stage == 0:
        return {}
    if _with_torch_fsdp(plan, made):
        return {"use-torch-fsdp2": True, "no-gradient-accumulation-fusion": True, "ckpt-format": "torch_dist"}
    found: dict[str, Any] = {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True}
    if plan.zero_stage > 1:
        strategy = "optim_grads_params" if plan.zero_stage == 3 else "optim_grads"
        found |= {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": strategy, "ckpt-format": "fsdp_dtensor"}
    if plan.dp_replicate_degree > 1 and plan.dp_shard_degree > 1:
        found["num-distributed-optimizer-instances"] = plan.dp_replicate_degree
    if plan.offload:
        found |= {"optimizer-cpu-offload": True, "use-precision-aware-optimizer": True}
    return found


def _training(inp: EngineInput, made: Decoder) -> dict[str, Any]:
    plan = inp.plan
    found: dict[str, Any] = {"micro-batch-size": plan.micro_batch, "global-batch-size": plan.global_batch}
    if plan.recompute == "full":
        found |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    elif plan.recompute == "selective":
        found["recompute-granularity"] = "selective"
    if inp.precision in {"bf16", "fp16"}:
        found[inp.precision] = True
    if made.gated:  # Megatron's default is 0.1; Llama-like models have none
        found |= {"attention-dropout": 0.0, "hidden-dropout": 0.0}
    return found | {
        "clip-grad": 1.0 if inp.meta.clips_gradients else 0.0, "optimizer": _OPTIMIZERS[str(inp.model.get("optimizer") or "adamw")],
        "lr": 3e-4, "train-iters": 1000, "mock-data": True,
    }  # fmt: skip


def files(inp: EngineInput, script_path: str) -> dict[str, str]:
    """pretrain.sh."""
    del script_path  # Megatron-LM builds the model itself
    plan, made = inp.plan, decoder(inp.model)
    sharded = plan.zero_stage > 1
    groups = {
        "the model": _model(made), "how it is spread": {**_degrees(plan, made), **_sharding(plan, made)}, "training": _training(inp, made),
    }  # fmt: skip
    context = {
        "label": plan.label(), "script": inp.script, "folder": shlex.quote(inp.folder or "."), "num_nodes": inp.num_nodes, "rope": not made.num_positions,
        "groups": {title: flag_lines(values) for title, values in groups.items()},
        "one_connection": (plan.tp_degree > 1 or plan.cp_degree > 1) and not sharded,
        "torchrun": torchrun_line(inp, "-m").removesuffix(" -m").replace("$HEAD_NODE:29500", '"$HEAD_NODE:29500"'),
    }  # fmt: skip
    return {LAUNCH_FILE: render("megatron/pretrain.sh.j2", context)}


def start_line(inp: EngineInput, folder: str) -> str:
    """Nothing: what it starts isn't the user's own training; pretrain.sh says how."""
    del inp, folder
    return ""


def validate(files: Mapping[str, str], inp: EngineInput) -> list[str]:
    """What is wrong with the file: arguments that Megatron-LM doesn't know, types, choices, arithmetic, what isn't the plan's."""
    if LAUNCH_FILE not in files:
        return [f"{LAUNCH_FILE} is missing"]
    made = read_flags(files[LAUNCH_FILE], after="arguments=(")
    found = schema.check_section(made, schema.table("megatron")["arguments"])
    return found or [*_arithmetic(made, inp.plan.world_size), *schema.differences(made, arguments(inp))]


def _arithmetic(made: Mapping[str, Any], world_size: int) -> list[str]:
    """Rules of Megatron-LM's `validate_args` that concern sizes."""
    tp, pp, cp, layers, heads, micro, total = (
        int(made.get(name) or 1) for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size", "num-layers",
                                              "num-attention-heads", "micro-batch-size", "global-batch-size"))  # fmt: skip
    groups, chunk = int(made.get("num-query-groups") or heads), int(made.get("num-layers-per-virtual-pipeline-stage") or layers)
    data_ranks, rest = divmod(world_size, tp * pp * cp)
    checks = (
        (rest, f"{world_size} ranks aren't a multiple of {tp} x {pp} x {cp} for tensor, pipeline and context parallelism"),
        (heads % tp or groups % tp, f"{heads} heads and {groups} query groups aren't multiples of tensor-model-parallel-size {tp}"),
        (layers % pp, f"num-layers {layers} is no multiple of pipeline-model-parallel-size {pp}"),
        (chunk < layers and (layers // pp) % chunk, f"{layers // pp} layers a rank make no virtual stages of {chunk}"),
        (data_ranks and total % (micro * data_ranks), f"global-batch-size {total} is no multiple of {micro} x {data_ranks} data ranks"),
        (made.get("overlap-param-gather") and not made.get("use-distributed-optimizer"), "overlap-param-gather needs use-distributed-optimizer"),
        (made.get("optimizer-cpu-offload") and not made.get("use-precision-aware-optimizer"),
         "optimizer-cpu-offload needs use-precision-aware-optimizer"),
    )  # fmt: skip
    return [text for wrong, text in checks if wrong]
