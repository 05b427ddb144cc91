"""Hugging Face Accelerate: its configuration file (DDP, FSDP2, FSDP1, DeepSpeed, Megatron-LM) and a training loop that uses it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml

from advisor.engines import common, loops, schema, trainfile
from advisor.engines.environment import render
from advisor.engines.scripts import read_script
from advisor.engines.types import EngineInput
from cost_models.types import Plan

NAME = "accelerate"
TITLE = "Accelerate"
RUNTIMES: tuple[str, ...] = ()
FOLDER = "accelerate"
TRAIN_FILE = "train_accelerate.py"
CONFIG_FILE, FSDP1_FILE = "accelerate.yaml", "fsdp1.yaml"
ABOUT: Mapping[str, str] = {
    CONFIG_FILE: "the plan for `accelerate launch --config_file`",
    FSDP1_FILE: "the same through FSDP1",
    TRAIN_FILE: "the training as a loop with `Accelerator`; needs GPUs (on a CPU DDP alone runs, by `ACCELERATE_USE_CPU=true torchrun`)",
}
#: Classes of transformers that its Megatron-LM plugin can build.
_MEGATRON_MODELS = ("GPT2LMHeadModel", "LlamaForCausalLM", "MegatronBertForPreTraining", "MegatronBertForSequenceClassification",
                    "T5ForConditionalGeneration")  # fmt: skip
_CONTAINERS = {"Sequential", "ModuleList"}
_HALF = {"bf16", "fp16"}
_PORT = 29500


def distributed_type(plan: Plan) -> str:
    """Accelerate's name for how the plan is run."""
    if plan.tp_degree > 1 or plan.pp_degree > 1:
        return "MEGATRON_LM"
    if plan.world_size == 1 and not plan.offload:
        return "NO"
    if plan.zero_stage == 0:
        return "MULTI_GPU"
    hybrid = plan.dp_replicate_degree > 1 and plan.dp_shard_degree > 1
    return "DEEPSPEED" if plan.zero_stage == 1 or (plan.runtime.startswith("deepspeed") and not hybrid) else "FSDP"


def supports(plan: Plan, model: Mapping[str, Any]) -> str:
    """Empty when Accelerate can express the plan, else why not."""
    if plan.cp_degree > 1 or plan.ep_degree > 1:
        return "its file splits neither sequences nor experts"
    if distributed_type(plan) == "MEGATRON_LM":
        return _why_not_megatron(plan, model)
    if plan.zero_stage == 1 and plan.dp_replicate_degree > 1 and plan.dp_shard_degree > 1:
        return "only DeepSpeed shards optimizer states alone, and over all data ranks"
    return common.why_not_recompute(plan, model)


def _why_not_megatron(plan: Plan, model: Mapping[str, Any]) -> str:
    name = model.get("class") or "this model"
    checks = (
        (name not in _MEGATRON_MODELS, f"it splits layers and stages only through Megatron-LM, which builds GPT-2, Llama, BERT and T5 of transformers, not {name}"),
        (plan.zero_stage > 1, "its Megatron-LM plugin shards optimizer states alone"),
        (plan.virtual_stages > 1, "its Megatron-LM plugin takes no virtual stages from a file"),
        (plan.pp_degree > 1 and plan.schedule != "1f1b", "Megatron-LM's schedule is 1F1B"),
        (plan.offload, "its Megatron-LM plugin is not made to offload here"),
    )  # fmt: skip
    return next((reason for wrong, reason in checks if wrong), "")


def files(inp: EngineInput, script_path: str) -> dict[str, str]:
    """accelerate.yaml, fsdp1.yaml for plans that FSDP1 can express, and train_accelerate.py where the script allows it."""
    texts = {name: _config_text(inp, made) for name, made in _configs(inp).items()}
    kind = distributed_type(inp.plan)
    extra = {
        "kind": kind, "unused": common.named(common.unused_parameters(inp.model)), "launch": _launch(inp, inp.folder, TRAIN_FILE),
        "cast_inputs": {"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(_mixed_precision(inp), "") if kind == "DEEPSPEED" else "",
    }  # fmt: skip
    return texts | loops.loop_file(inp, engine=NAME, file_name=TRAIN_FILE, script_path=script_path, extra=extra)


def _configs(inp: EngineInput) -> dict[str, dict[str, Any]]:
    """Contents of the YAML files by name."""
    made = {CONFIG_FILE: config(inp)}
    hybrid = inp.plan.dp_replicate_degree > 1
    if distributed_type(inp.plan) == "FSDP" and (not hybrid or inp.plan.dp_shard_degree == inp.gpus_per_node):
        made[FSDP1_FILE] = config(inp) | {"fsdp_config": _fsdp1(inp)}
        made[FSDP1_FILE].pop("parallelism_config", None)
    return made


def config(inp: EngineInput) -> dict[str, Any]:
    """The content of accelerate.yaml."""
    plan, kind = inp.plan, distributed_type(inp.plan)
    made: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": kind, "num_machines": inp.num_nodes, "num_processes": plan.world_size,
        "machine_rank": 0,
    }  # fmt: skip
    if inp.num_nodes > 1:
        made |= {"main_process_ip": "127.0.0.1", "main_process_port": _PORT, "rdzv_backend": "c10d"}
    made |= {"mixed_precision": _mixed_precision(inp), "use_cpu": False, "debug": False}
    sections = {
        "FSDP": ("fsdp_config", _fsdp2),
        "DEEPSPEED": ("deepspeed_config", _deepspeed),
        "MEGATRON_LM": ("megatron_lm_config", _megatron),
    }
    if kind in sections:
        section, fill = sections[kind]
        made[section] = fill(inp)
    if kind == "FSDP" and plan.dp_replicate_degree > 1:
        made["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": plan.dp_replicate_degree, "parallelism_config_dp_shard_size": plan.dp_shard_degree,
        }  # fmt: skip
    return made


def _mixed_precision(inp: EngineInput) -> str:
    """The file's `mixed_precision`; DeepSpeed and Megatron-LM hold the weights in it, beside fp32 copies."""
    by_itself = inp.meta.param_dtype in _HALF or bool(inp.meta.autocast_dtype)
    if distributed_type(inp.plan) in {"DEEPSPEED", "MEGATRON_LM"} and inp.meta.param_dtype in _HALF:
        return inp.meta.param_dtype
    return inp.precision if inp.precision in _HALF and not by_itself else "no"


def _about_precision(inp: EngineInput) -> str:
    kind = distributed_type(inp.plan)
    if _mixed_precision(inp) == "no":
        return f"the script sees to {inp.precision} by itself" if inp.precision in _HALF else ""
    if kind in {"DEEPSPEED", "MEGATRON_LM"}:
        return "of the weights; fp32 copies lie with the optimizer states"
    return "fp32 weights; gathers, products and reductions in it" if kind == "FSDP" else "of the products; weights stay in fp32"


def _layers(inp: EngineInput) -> dict[str, Any]:
    """What is gathered at a time: the repeated layers, by their classes' names."""
    classes = inp.model.get("block_classes") or []
    if not classes or _CONTAINERS & set(classes):
        return {"fsdp_auto_wrap_policy": "NO_WRAP"}
    return {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": ",".join(classes)}


def _recomputes(inp: EngineInput) -> bool:
    """Whether the file itself asks for recomputation: only where no train file of ours does it (with the dropout masks of forward)."""
    return inp.plan.recompute == "full" and inp.form != "functions" and not inp.meta.uses_checkpointing


def _fsdp2(inp: EngineInput) -> dict[str, Any]:
    return {
        "fsdp_version": 2, "fsdp_reshard_after_forward": inp.plan.zero_stage == 3, **_layers(inp), "fsdp_offload_params": inp.plan.offload,
        "fsdp_activation_checkpointing": _recomputes(inp), "fsdp_cpu_ram_efficient_loading": False, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }  # fmt: skip


def _fsdp1(inp: EngineInput) -> dict[str, Any]:
    plan = inp.plan
    hybrid = plan.dp_replicate_degree > 1
    strategies = {(3, False): "FULL_SHARD", (2, False): "SHARD_GRAD_OP", (3, True): "HYBRID_SHARD", (2, True): "HYBRID_SHARD_ZERO2"}
    strategy = strategies[plan.zero_stage, hybrid]
    return _fsdp2(inp) | {
        "fsdp_version": 1, "fsdp_reshard_after_forward": strategy, "fsdp_sharding_strategy": strategy, "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": False, "fsdp_backward_prefetch": "BACKWARD_PRE",
    }  # fmt: skip


def _deepspeed(inp: EngineInput) -> dict[str, Any]:
    plan = inp.plan
    made: dict[str, Any] = {
        "zero_stage": plan.zero_stage, "gradient_accumulation_steps": plan.num_microbatches, "gradient_clipping": 0.0,
        "offload_optimizer_device": "cpu" if plan.offload else "none",
        "offload_param_device": "cpu" if plan.offload and plan.zero_stage == 3 else "none", "zero3_init_flag": False,
    }  # fmt: skip
    if plan.zero_stage == 3:
        made["zero3_save_16bit_model"] = True
    if inp.num_nodes > 1:
        made["deepspeed_multinode_launcher"] = "standard"
    return made


def _megatron(inp: EngineInput) -> dict[str, Any]:
    plan = inp.plan
    made: dict[str, Any] = {
        "megatron_lm_tp_degree": plan.tp_degree, "megatron_lm_pp_degree": plan.pp_degree, "megatron_lm_num_micro_batches": plan.num_microbatches,
        "megatron_lm_sequence_parallelism": plan.sequence_parallel, "megatron_lm_use_distributed_optimizer": plan.zero_stage == 1,
        "megatron_lm_recompute_activations": plan.recompute == "selective", "megatron_lm_gradient_clipping": 0.0,
    }  # fmt: skip
    if plan.recompute == "full":
        made |= {
            "megatron_lm_recompute_granularity": "full",
            "megatron_lm_recompute_method": "uniform",
            "megatron_lm_recompute_num_layers": 1,
        }
    return made


def _comments(inp: EngineInput) -> dict[str, str]:
    plan = inp.plan
    return {
        "num_processes": f"on all machines together, {inp.gpus_per_node} on each" if inp.num_nodes > 1 else "",
        "machine_rank": "the rendezvous numbers the machines" if inp.num_nodes > 1 else "",
        "main_process_ip": "put the first machine's address here, or give --main_process_ip",
        "mixed_precision": _about_precision(inp),
        "fsdp_reshard_after_forward": "" if plan.zero_stage == 3 else "layers stay gathered from forward to backward",
        "fsdp_auto_wrap_policy": "no repeated layers known by class: the whole model is one unit" if _layers(inp)["fsdp_auto_wrap_policy"] == "NO_WRAP" else "",
        "fsdp_activation_checkpointing": _about_recomputation(inp),
        "fsdp_cpu_ram_efficient_loading": "every rank builds the model, from one seed",
        "fsdp_sharding_strategy": "the older name, which FSDP1 reads first",
        "gradient_clipping": "Accelerate's default clips to 1" if inp.form == "functions" else "put your script's norm here: DeepSpeed clips in its own step",
        "megatron_lm_gradient_clipping": "Accelerate's default clips to 1; put your script's norm here",
        "zero3_init_flag": "the model is built whole, then cut up",
        "parallelism_config_dp_shard_size": "sharded in groups of so many, which are replicated",
    }  # fmt: skip


def _about_recomputation(inp: EngineInput) -> str:
    plan = inp.plan
    if _recomputes(inp):
        return "draws dropout masks anew in backward: only for models without dropout"
    if plan.recompute == "none":
        return ""
    if inp.meta.uses_checkpointing:
        return "the script does it itself"
    return (
        f"done by {TRAIN_FILE}"
        if inp.form == "functions"
        else f"{plan.recompute} recomputation: call torch.utils.checkpoint in your layers"
    )


def _config_text(inp: EngineInput, made: Mapping[str, Any]) -> str:
    steps = inp.plan.num_microbatches
    accumulation = f"gradient_accumulation_steps={steps}" if steps > 1 else ""
    advice = [f"In your script: accelerator = Accelerator({accumulation}); model, optimizer, loader = accelerator.prepare(model, optimizer, loader);",
              "accelerator.backward(loss) in the place of loss.backward(); a loader's batches have the plan's micro-batch."]  # fmt: skip
    own = inp.form == "functions" or _uses_accelerate(inp)
    is_fsdp1 = made.get("fsdp_config", {}).get("fsdp_version") == 1
    train = PurePath(inp.script) if inp.form != "functions" else PurePath(inp.folder or ".") / FOLDER / TRAIN_FILE
    name = FSDP1_FILE if is_fsdp1 else CONFIG_FILE
    launch = _command(inp, str(PurePath(inp.folder or ".") / FOLDER / name), shlex.quote(str(train)))
    comments = {key: text for key, text in _comments(inp).items() if text}
    context = {
        "title": f"{inp.plan.label()}{' through FSDP1' if is_fsdp1 else ''}, for Accelerate", "launch": launch, "advice": [] if own else advice,
        "config": made, "comments": comments,
    }  # fmt: skip
    return render("accelerate/config.yaml.j2", context)


def _uses_accelerate(inp: EngineInput) -> bool:
    return inp.form == "script" and "Accelerator" in read_script(Path(inp.script)).names


def _launch(inp: EngineInput, folder: str, train: str) -> str:
    base = PurePath(folder or ".") / FOLDER
    return _command(inp, str(base / CONFIG_FILE), shlex.quote(str(base / train)))


def _command(inp: EngineInput, config_file: str, train: str) -> str:
    head = " --main_process_ip $HEAD_NODE" if inp.num_nodes > 1 else ""
    return f"accelerate launch --config_file {shlex.quote(config_file)}{head} {train}"


def start_line(inp: EngineInput, folder: str) -> str:
    """The `accelerate launch` command: of the train file, or of a script that uses Accelerate by itself; "" where there is neither."""
    config_file = str(PurePath(folder) / CONFIG_FILE)
    if _uses_accelerate(inp):
        return _command(inp, config_file, shlex.join([inp.script, *inp.script_args]))
    line = trainfile.start_line(inp, folder, engine=NAME, file_name=TRAIN_FILE)
    return _command(inp, config_file, shlex.quote(str(PurePath(folder) / TRAIN_FILE))) if line else ""


def validate(files: Mapping[str, str], inp: EngineInput) -> list[str]:
    """What is wrong with the files: keys that Accelerate doesn't know (of which it ignores many), types, choices, what isn't the plan's."""
    problems = trainfile.check(files, inp, TRAIN_FILE)
    for name, wanted in _configs(inp).items():
        problems += _problems(files[name], wanted) if name in files else [f"{name} is missing"]
    return problems


def _problems(text: str, wanted: Mapping[str, Any]) -> list[str]:
    try:
        made = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [f"not YAML: {' '.join(str(error).split())}"]
    if not isinstance(made, dict):
        return ["not a YAML mapping"]
    known = schema.table("accelerate")
    found = schema.check_section(made, known["top"])
    for section, options in known["sections"].items():
        if isinstance(made.get(section), dict):
            found += schema.check_section(made[section], options, f"{section}.")
    return found or schema.differences(made, wanted)
