"""DeepSpeed's pipeline: any model as a `PipelineModule` with one entry a stage, cut where the plan's price assumes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from advisor.engines import calls, common, pipeline, trainfile
from advisor.engines.environment import render_python, repr_like_ruff
from advisor.engines.scripts import read_script
from advisor.engines.types import EngineInput
from cost_models.types import Plan

CUT_FILE, LAYERS_FILE = "deepspeed_pipeline.py", "deepspeed_stages.py"
ABOUT: Mapping[str, str] = {
    CUT_FILE: "`cut_into_stages(model, loss_fn)` for your own loop: which modules are on which stage of DeepSpeed's pipeline",
    LAYERS_FILE: "a stage as an entry of DeepSpeed's list of layers, and what stands in the place of forward, backward and step",
    pipeline.STAGES_FILE: pipeline.ABOUT[pipeline.STAGES_FILE],
}
#: How its list is cut: every stage gets one entry of this class.
_METHOD = "type:StageLayer"


def why_not(plan: Plan, model: Mapping[str, Any]) -> str:
    """Why DeepSpeed's pipeline can't express a plan with stages; empty when it can."""
    if plan.virtual_stages > 1 or plan.schedule != "1f1b":
        return "its pipeline has one schedule, 1F1B"
    if plan.tp_degree > 1:
        return "its split layers don't go into its pipeline"
    if plan.zero_stage > 1:
        return "its pipeline takes ZeRO-1 at most, and refuses sharded gradients and parameters"
    if plan.zero_stage == 0 and plan.dp_degree > 1 and model.get("precision") == "bf16":
        return "its pipeline always shards optimizer states in bf16, as ZeRO-1 does"
    return pipeline.supports(plan, model)


def files(inp: EngineInput) -> dict[str, str]:
    """The cut, and how a stage runs."""
    plan = inp.plan
    recompute = "none" if inp.meta.uses_checkpointing else plan.recompute
    stages = pipeline.stages_of(plan, inp.model)
    dtype = "" if inp.meta.autocast_dtype else common.half_dtype(inp)
    context = {
        "title": pipeline.title(plan, recompute), "num_microbatches": plan.num_microbatches, "stages": [pipeline.listed(stage) for stage in stages],
        "tied": pipeline.tied_ends(stages, inp.model), "recompute": recompute, "needs_blocks": recompute != "none",
        "block_patterns": common.block_patterns(inp.model), "checkpointed": common.checkpointed("layer", recompute), "dtype": dtype,
        "fp32_scores": bool(dtype) and not read_script(trainfile.script_file(inp)).computes_own_loss,
        "marks_parameters": plan.zero_stage == 0 and not dtype,
    }  # fmt: skip
    return {
        CUT_FILE: render_python("deepspeed/pipeline.py.j2", context),
        LAYERS_FILE: render_python("deepspeed/stages.py.j2", context),
        pipeline.STAGES_FILE: pipeline.stages_text(),
    }


def section() -> dict[str, Any]:
    """DeepSpeed's "pipeline" section: layers that are recomputed do so one by one, as the plan's memory was priced."""
    return {"activation_checkpoint_interval": 0}


def train_context(plan: Plan) -> dict[str, Any]:
    """What the train file's template must know of stages."""
    if plan.pp_degree == 1:
        return {"stages": False}
    return {
        "stages": True, "trained": "pipeline", "trained_parameter": "pipeline: DeepSpeedPipeline", "trained_module": "pipeline.engine.module",
        "losses_per_step": "WORLD_SIZE",
    }  # fmt: skip


def validate(files: Mapping[str, str], inp: EngineInput) -> list[str]:
    """What is wrong with the cut; empty when stages and shared weights are the plan's."""
    text = files.get(CUT_FILE)
    if text is None:
        return [f"{CUT_FILE} is missing"]
    stages = pipeline.stages_of(inp.plan, inp.model)
    wanted = {"STAGES": f"[{', '.join(map(pipeline.listed, stages))}]"}
    if tied := pipeline.tied_ends(stages, inp.model):
        wanted["TIED"] = repr_like_ruff(tied)
    problems = common.check_literals(CUT_FILE, text, wanted)
    given = {"argument 1": calls.ANY, "num_stages": "len(STAGES)", "partition_method": repr(_METHOD)}
    return problems + calls.problems(CUT_FILE, text, {"PipelineModule": given})
