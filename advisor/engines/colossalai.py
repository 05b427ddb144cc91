"""ColossalAI: the booster plugin of a plan. Only checked against its sources: it can't be installed beside today's torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from advisor.engines import common, schema
from advisor.engines.environment import render_python, repr_like_ruff
from advisor.engines.trainer import is_pretrained
from advisor.engines.types import EngineInput
from cost_models.types import Plan

NAME = "colossalai"
TITLE = "ColossalAI"
RUNTIMES: tuple[str, ...] = ()
FOLDER = "colossalai"
TRAIN_FILE = ""
PLUGIN_FILE = "plugin.py"
ABOUT: Mapping[str, str] = {
    PLUGIN_FILE: "the plan for ColossalAI's `Booster`, which wants torch 2.5.1 or older: checked by its signatures, never run"
}
#: Classes of transformers that it has policies for.
_SPLITTABLE = (
    "BertForMaskedLM", "BertLMHeadModel", "BloomForCausalLM", "CohereForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel", "GPTJForCausalLM",
    "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "OPTForCausalLM", "Qwen2ForCausalLM", "T5ForConditionalGeneration",
    "WhisperForConditionalGeneration",
)  # fmt: skip


def plugin_name(plan: Plan) -> str:
    """ColossalAI's plugin for a plan."""
    if plan.tp_degree > 1 or plan.pp_degree > 1:
        return "HybridParallelPlugin"
    return {0: "TorchDDPPlugin", 3: "GeminiPlugin"}.get(plan.zero_stage, "LowLevelZeroPlugin")


def supports(plan: Plan, model: Mapping[str, Any]) -> str:
    """Empty when ColossalAI can express the plan, else why not."""
    name, kind = plugin_name(plan), str(model.get("class") or "this model")
    split = name == "HybridParallelPlugin"
    checks = (
        (plan.cp_degree > 1 or plan.ep_degree > 1, "its context and expert parallelism are not written"),
        (split and kind not in _SPLITTABLE, f"it splits layers and stages of transformers' models that it knows, not of {kind}"),
        (split and plan.zero_stage > (1 if plan.pp_degree > 1 else 2), f"beside split layers or stages it has no ZeRO-{plan.zero_stage}"),
        (split and plan.dp_replicate_degree > 1 and plan.dp_shard_degree > 1, "beside split layers or stages it shards over all data ranks"),
        (plan.pp_degree > 1 and plan.schedule == "gpipe", "its schedules are 1F1B and interleaved"),
        (plan.offload and plan.zero_stage == 0, "it offloads sharded states alone"),
        (name == "GeminiPlugin" and model.get("precision") in {"fp32", "tf32"}, "its Gemini computes in 16 bits"),
        (split and plan.zero_stage > 0 and model.get("precision") in {"fp32", "tf32"}, "its ZeRO beside split layers computes in 16 bits"),
        (plan.recompute == "selective", "it recomputes whole layers or none"),
        (plan.recompute == "full" and not is_pretrained(model), "it leaves recomputation to transformers' models"),
    )  # fmt: skip
    return next((reason for wrong, reason in checks if wrong), "")


def files(inp: EngineInput, script_path: str) -> dict[str, str]:
    """plugin.py."""
    del script_path  # the user's own loop is boosted
    context = {
        "label": inp.plan.label(), "name": plugin_name(inp.plan), "recompute": inp.plan.recompute, "pipeline": inp.plan.pp_degree > 1,
        "arguments": {key: repr_like_ruff(value) for key, value in arguments(inp).items()}, "accumulation": inp.plan.num_microbatches,
    }  # fmt: skip
    return {PLUGIN_FILE: render_python("colossalai/plugin.py.j2", context)}


def arguments(inp: EngineInput) -> dict[str, Any]:
    """Arguments of the plugin."""
    plan, name = inp.plan, plugin_name(inp.plan)
    clip = {"max_norm": 1.0} if inp.meta.clips_gradients else {}
    if name == "TorchDDPPlugin":
        unused = {"find_unused_parameters": True} if common.unused_parameters(inp.model) else {}
        return {"gradient_as_bucket_view": True, **unused}
    precision = inp.precision if inp.precision in {"bf16", "fp16"} else "fp32"
    replicas = {"extra_dp_size": plan.dp_replicate_degree} if plan.dp_replicate_degree > 1 and plan.dp_shard_degree > 1 else {}
    if name == "GeminiPlugin":
        host = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "pin_memory": True} if plan.offload else {}
        accumulates = {"enable_gradient_accumulation": True} if plan.num_microbatches > 1 else {}
        return {"placement_policy": "static", "precision": precision, "shard_param_frac": 1.0, **host, **accumulates, **replicas, **clip}
    if name == "LowLevelZeroPlugin":
        return {"stage": plan.zero_stage, "precision": precision, "cpu_offload": plan.offload, **replicas, **clip}
    return {**_split(plan), "precision": precision, "zero_stage": plan.zero_stage, "cpu_offload": plan.offload, **clip}


def _split(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = {"tp_size": plan.tp_degree, "pp_size": plan.pp_degree}
    if plan.sequence_parallel and plan.tp_degree > 1:
        found |= {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
    if plan.pp_degree > 1:
        found |= {"num_microbatches": plan.num_microbatches, "pp_style": plan.schedule, "num_model_chunks": plan.virtual_stages}
    return found


def start_line(inp: EngineInput, folder: str) -> str:
    """Nothing: the user's own loop is boosted, in an environment with an older torch."""
    del inp, folder
    return ""


def validate(files: Mapping[str, str], inp: EngineInput) -> list[str]:
    """What is wrong with the file: arguments that the plugin doesn't take, what isn't the plan's, Python that doesn't compile."""
    if PLUGIN_FILE not in files:
        return [f"{PLUGIN_FILE} is missing"]
    if problems := common.check_python(PLUGIN_FILE, files[PLUGIN_FILE]):
        return problems
    name = plugin_name(inp.plan)
    made = schema.calls(files[PLUGIN_FILE]).get(name)
    if made is None:
        return [f"{PLUGIN_FILE} calls no {name}"]
    found = schema.check_section(made, schema.table("colossalai")["calls"][name], f"{name}.")
    return found or schema.differences(made, arguments(inp), f"{name}.")
