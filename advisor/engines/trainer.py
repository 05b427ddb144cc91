"""Hugging Face Trainer: arguments (DDP, FSDP2, DeepSpeed) and a train file for models of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from advisor.engines import common, deepspeed, ds_schema, loops, schema, trainfile
from advisor.engines.types import EngineInput
from cost_models.types import Plan

NAME = "trainer"
TITLE = "Hugging Face Trainer"
RUNTIMES: tuple[str, ...] = ()
FOLDER = "trainer"
TRAIN_FILE = "train_trainer.py"
ARGUMENTS_FILE = "training_arguments.json"
ABOUT: Mapping[str, str] = {
    ARGUMENTS_FILE: 'the plan for `TrainingArguments(output_dir=..., **json.load(open("training_arguments.json")))`',
    TRAIN_FILE: "the training through `Trainer`; needs GPUs where it shards",
}
#: Names of transformers' classes that compute a loss.
_PRETRAINED = re.compile(r"\w+(For[A-Z]\w+|LMHeadModel|DoubleHeadsModel)")


def is_pretrained(model: Mapping[str, Any]) -> bool:
    """Whether the model seems to be one of transformers' with a head."""
    return bool(_PRETRAINED.fullmatch(str(model.get("class") or "")))


def supports(plan: Plan, model: Mapping[str, Any]) -> str:
    """Empty when the Trainer can express the plan, else why not."""
    name = str(model.get("class") or "this model")
    checks = (
        (not is_pretrained(model), f"it trains models of transformers (PreTrainedModel), and {name} seems to be none"),
        (plan.pp_degree > 1, "it has no pipeline"),
        (plan.tp_degree > 1, 'it splits layers only where from_pretrained(tp_plan="auto") did so (Llama has such a plan, GPT-2 has none)'),
        (plan.cp_degree > 1 or plan.ep_degree > 1, "its arguments split neither sequences nor experts"),
        (plan.zero_stage > 0 and plan.dp_replicate_degree > 1 and plan.dp_shard_degree > 1, "its arguments name no groups of ranks to shard over"),
        (plan.recompute == "selective", "it recomputes whole layers or none"),
    )  # fmt: skip
    return next((reason for wrong, reason in checks if wrong), "")


def kind(plan: Plan) -> str:
    """What spreads the plan below the Trainer: DDP, FSDP or DEEPSPEED."""
    if plan.zero_stage == 0:
        return "DDP"
    return "DEEPSPEED" if plan.zero_stage == 1 or plan.runtime.startswith("deepspeed") else "FSDP"


def files(inp: EngineInput, script_path: str) -> dict[str, str]:
    """training_arguments.json and, where the script allows it, train_trainer.py."""
    texts = {ARGUMENTS_FILE: json.dumps(arguments(inp), indent=2) + "\n"}
    extra = {
        "kind": kind(inp.plan),
        "launch": trainfile.start_line(inp, f"{inp.folder or '.'}/{FOLDER}", engine=NAME, file_name=TRAIN_FILE),
    }
    return texts | loops.loop_file(inp, engine=NAME, file_name=TRAIN_FILE, script_path=script_path, extra=extra)


def arguments(inp: EngineInput) -> dict[str, Any]:
    """The content of training_arguments.json."""
    plan, meta = inp.plan, inp.meta
    recomputes = plan.recompute == "full" and not meta.uses_checkpointing
    autocast = inp.precision if common.half_dtype(inp) and not meta.autocast_dtype else ""
    if kind(plan) == "DEEPSPEED" and meta.param_dtype in {"bf16", "fp16"}:
        autocast = meta.param_dtype
    made: dict[str, Any] = {
        "per_device_train_batch_size": plan.micro_batch, "gradient_accumulation_steps": plan.num_microbatches,
        "max_grad_norm": 1.0 if meta.clips_gradients else 0.0, "bf16": autocast == "bf16", "fp16": autocast == "fp16", "seed": inp.seed,
        "gradient_checkpointing": recomputes,
    }  # fmt: skip
    if inp.precision == "tf32":
        made["tf32"] = True
    if recomputes:
        made["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if kind(plan) == "FSDP":
        made |= {"fsdp": True, "fsdp_config": _fsdp(inp)}
    elif kind(plan) == "DEEPSPEED":
        made["deepspeed"] = {**deepspeed.config(inp), "gradient_clipping": made["max_grad_norm"]}
    elif plan.world_size > 1:
        made |= {"ddp_find_unused_parameters": bool(common.unused_parameters(inp.model)), "ddp_bucket_cap_mb": 25}
    return made


def _fsdp(inp: EngineInput) -> dict[str, Any]:
    classes = inp.model.get("block_classes") or []
    layers: dict[str, Any] = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} if classes else {"auto_wrap_policy": "NO_WRAP"}
    if classes:
        layers["transformer_layer_cls_to_wrap"] = list(classes)
    return {
        "version": 2, "reshard_after_forward": inp.plan.zero_stage == 3, **layers, "cpu_offload": inp.plan.offload,
        "state_dict_type": "SHARDED_STATE_DICT", "cpu_ram_efficient_loading": False,
    }  # fmt: skip


def start_line(inp: EngineInput, folder: str) -> str:
    """The torchrun command; "" where the script can't be run by a train file."""
    return trainfile.start_line(inp, folder, engine=NAME, file_name=TRAIN_FILE)


def validate(files: Mapping[str, str], inp: EngineInput) -> list[str]:
    """What is wrong with the files: arguments that transformers doesn't know, types, choices, what isn't the plan's."""
    problems = trainfile.check(files, inp, TRAIN_FILE)
    if ARGUMENTS_FILE not in files:
        return [*problems, f"{ARGUMENTS_FILE} is missing"]
    return problems + _problems(files[ARGUMENTS_FILE], inp)


def _problems(text: str, inp: EngineInput) -> list[str]:
    try:
        made = json.loads(text)
    except ValueError as error:
        return [f"not JSON: {error}"]
    if not isinstance(made, dict):
        return ["not a JSON object"]
    known = schema.table("transformers")
    found = schema.check_section(made, known["arguments"])
    if isinstance(made.get("fsdp_config"), dict):
        found += schema.check_section(made["fsdp_config"], known["fsdp_config"], "fsdp_config.")
    if isinstance(made.get("deepspeed"), dict):
        found += [f"deepspeed: {problem}" for problem in ds_schema.problems(json.dumps(made["deepspeed"]), world_size=inp.plan.dp_degree)]
    return found or schema.differences(made, arguments(inp))
