"""PyTorch pipelines (`torch.distributed.pipelining`), with DDP, FSDP2 or tensor parallelism inside the stages."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from advisor.engines import common, tensor_parallel, trainfile
from advisor.engines.environment import render_python, repr_like_ruff
from advisor.engines.scripts import read_script
from advisor.engines.types import EngineInput
from cost_models.types import Plan

NAME = "pipeline"
TITLE = "PyTorch pipelines"
#: Names in `cost_models/runtimes` that this engine is priced by.
RUNTIMES: tuple[str, ...] = ("torch-tp",)
FOLDER = ""
TRAIN_FILE = "train.py"
STAGES_FILE, RUN_FILE, LAYERS_FILE, LOSS_FILE = "stages.py", "run_stages.py", "split_layers.py", "cut_loss.py"
ABOUT: Mapping[str, str] = {
    "parallelize.py": "`parallelize(model, loss_fn)` for your own loop: which modules are on which stage, and the schedule",
    STAGES_FILE: "how a stage runs its part of the model without a change to the model's code; PyTorch only, made to be read",
    RUN_FILE: "how a rank runs its stages by a schedule: forward, backward, clipping",
    LAYERS_FILE: "how the products of a layer are cut over a tensor group",
    LOSS_FILE: "the cross-entropy of logits that are cut by vocabulary",
    "train.py": common.ABOUT_TRAIN, **trainfile.ABOUT_HELPERS,
}  # fmt: skip
_LINE_LENGTH = 140
_KEPT = "one gather a step instead of two for each micro-batch"
_ALTERNATIVE = "ScheduleInterleavedZeroBubble, called alike, fills waiting time with weight gradients, for more memory"


def supports(plan: Plan, model: Mapping[str, Any]) -> str:
    """Empty when the plan can be expressed, else why not."""
    if plan.pp_degree == 1:
        return "there is nothing to cut into stages"
    if plan.cp_degree > 1 or plan.ep_degree > 1:
        return "context and expert parallelism are not written"
    if plan.offload:
        return "its stages can't keep states on the host"
    return _why_not_cut(plan, model) or _why_not_inside(plan, model) or common.why_not_recompute(plan, model)


def _why_not_cut(plan: Plan, model: Mapping[str, Any]) -> str:
    if not model.get("can_pipeline", True):
        return str(model.get("pp_reason") or "the model is no chain of layers that hands on one tensor")
    num_layers, num_stages = len(model.get("block_paths") or []), plan.pp_degree * plan.virtual_stages
    if num_layers < num_stages:
        return f"{num_layers} repeated layers can't fill {num_stages} stages"
    layers = tuple(f"{path}." for path in model.get("block_paths") or [])
    shared = next((names for names in model.get("tied") or [] if len(names) > 2 or any(name.startswith(layers) for name in names)), None)
    if shared:
        return f"{common.named(shared)} are one weight, and only the first and the last stage can share one"
    return ""


def _why_not_inside(plan: Plan, model: Mapping[str, Any]) -> str:
    """What stands against the plan's other dimensions inside of the stages."""
    loose = sorted({name for stage in model.get("stages") or [] for name in stage} & set(model.get("loose_parameters") or []))
    if loose and plan.virtual_stages > 1:
        return f"{common.named(loose)} lies in no module of a stage, and interleaved stages need one around it"
    return tensor_parallel.why_not_split(model, plan.tp_degree) if plan.tp_degree > 1 else ""


def files(inp: EngineInput, script_path: str) -> dict[str, str]:
    """parallelize.py, stages.py and, where the script has its loss as a function, train.py."""
    texts = {
        "parallelize.py": render_python("pipeline/parallelize.py.j2", _context(inp)),
        STAGES_FILE: stages_text(),
        RUN_FILE: render_python("pipeline/run_stages.py.j2", {}),
    }
    if inp.plan.tp_degree > 1:
        split = tensor_parallel.split_context(inp.model, sequence_parallel=inp.plan.sequence_parallel)
        texts[LAYERS_FILE] = render_python("pipeline/split_layers.py.j2", split)
        if tensor_parallel.loss_context(inp, _vocabulary(inp))["cut_logits"]:
            texts[LOSS_FILE] = render_python("tensor_parallel/cut_loss.py.j2", {})
    extra = {
        "trained": "pipeline", "trained_parameter": "pipeline: Pipeline", "trained_module": "pipeline.model",
        "losses_per_step": f"WORLD_SIZE // {inp.plan.pp_degree} * NUM_MICROBATCHES",
    }  # fmt: skip
    return texts | trainfile.train_file(inp, engine=NAME, file_name=TRAIN_FILE, script_path=script_path, extra=extra)


def stages_text() -> str:
    """The content of stages.py, which depends on no plan."""
    return render_python("pipeline/stages.py.j2", {})


def stages_of(plan: Plan, model: Mapping[str, Any]) -> list[list[str]]:
    """Names of the modules (and of parameters outside of any) of each stage, in execution order.

    Raises:
        ValueError: the model's own cut has another number of stages.
    """
    stages = [list(stage) for stage in model.get("stages") or []]
    if len(stages) != plan.pp_degree * plan.virtual_stages:
        raise ValueError(f"the model is cut into {len(stages)} stages, the plan has {plan.pp_degree} x {plan.virtual_stages}")
    return stages


def _context(inp: EngineInput) -> dict[str, Any]:
    plan, stages = inp.plan, stages_of(inp.plan, inp.model)
    mesh, shards = _mesh(plan), _shards(plan)
    blocks = set(inp.model.get("block_paths") or [])
    layers = [name for stage in stages for name in stage if name in blocks]
    recompute = "none" if inp.meta.uses_checkpointing else plan.recompute
    dtype = common.half_dtype(inp)
    schedule, reason = _schedule(plan)
    return {
        "title": title(plan, recompute), "summary": _summary(plan), "num_microbatches": plan.num_microbatches,
        "stages": [listed(stage) for stage in stages], "tied": tied_ends(stages, inp.model), "zero_stage": plan.zero_stage,
        "experts": bool(inp.model.get("num_experts")),
        "block_patterns": common.block_patterns(inp.model), "needs_blocks": shards or recompute != "none" or plan.tp_degree > 1, "recompute": recompute,
        "checkpointed": common.checkpointed("layer", recompute), "mesh_shape": tuple(mesh.values()), "mesh_names": tuple(mesh),
        "shards": shards, "hides_shards": shards and plan.zero_stage >= 2,
        "keeps_gathered": plan.zero_stage != 3, "kept_reason": _KEPT,
        "param_dtype": dtype if shards else "", "autocast_dtype": "" if shards or inp.meta.autocast_dtype else dtype, "precision": inp.precision,
        "fp32_scores": bool(dtype) and shards and not read_script(trainfile.script_file(inp)).computes_own_loss,
        "interleaved": plan.virtual_stages > 1, "schedule": schedule, "schedule_reason": reason,
        "tp_degree": plan.tp_degree, "sequence_parallel": plan.sequence_parallel,
        "vocabulary": _vocabulary(inp), **tensor_parallel.loss_context(inp, _vocabulary(inp)), "first_layer": layers[0], "last_layer": layers[-1],
        "alternative": _ALTERNATIVE, "scaler": inp.precision == "fp16",
    }  # fmt: skip


def _vocabulary(inp: EngineInput) -> list[Mapping[str, Any]]:
    """Tables and heads that are cut by rows; those that both ends share stay whole."""
    return tensor_parallel.vocabulary_tables(inp) if inp.plan.tp_degree > 1 and not inp.model.get("tied") else []


def _shards(plan: Plan) -> bool:
    return plan.zero_stage > 0 and plan.dp_shard_degree > 1


def _mesh(plan: Plan) -> dict[str, int]:
    """Ranks along each dimension, the slowest-varying first: neighbours in a tensor group are neighbours on a node, stages are far apart."""
    shards = plan.dp_shard_degree if _shards(plan) else 1
    sizes = {"pipeline": plan.pp_degree, "replicate": plan.dp_degree // shards, "shard": shards, "tensor": plan.tp_degree}
    return {name: size for name, size in sizes.items() if size > 1}


def _inside(plan: Plan) -> str:
    """What a stage's ranks share, in words; "" where there is one rank to a stage."""
    state = {1: "optimizer states", 2: "gradients and optimizer states", 3: "parameters"}.get(plan.zero_stage, "")
    shards = plan.dp_shard_degree if state else 1
    parts = [f"{plan.dp_degree // shards} replicas"] * (plan.dp_degree > shards) + [f"{state} sharded over {shards} ranks"] * (shards > 1)
    split = f"layers{' and sequence' if plan.sequence_parallel else ''} split over {plan.tp_degree} ranks"
    return ", ".join(parts + [split] * (plan.tp_degree > 1))


def title(plan: Plan, recompute: str) -> str:
    """The plan's stages and what is inside of them, in a sentence."""
    schedule = {"gpipe": "GPipe", "interleaved": "interleaved 1F1B"}.get(plan.schedule, "1F1B")
    stages = f"{plan.pp_degree} ranks with {plan.virtual_stages} stages each" if plan.virtual_stages > 1 else f"{plan.pp_degree} stages"
    parts = [f"Pipeline of {stages}, {schedule}", _inside(plan), f"{recompute} recomputation" if recompute != "none" else ""]
    return "; ".join(part for part in parts if part) + "."


def _summary(plan: Plan) -> str:
    kept = "stages" if plan.virtual_stages > 1 else "stage"
    return f"Leave this rank its {kept}" + (f", with {inside}" if (inside := _inside(plan)) else "") + "."


def _schedule(plan: Plan) -> tuple[str, str]:
    """Class of the schedule, and why where it isn't the one that the plan names."""
    if plan.virtual_stages > 1:
        return "ScheduleInterleaved1F1B", ""
    if plan.schedule == "gpipe":
        return "ScheduleGPipe", ""
    if plan.num_microbatches < plan.pp_degree:
        return "ScheduleGPipe", "1F1B with fewer micro-batches than stages is this"
    return "Schedule1F1B", ""


def tied_ends(stages: Sequence[Sequence[str]], model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names of weights that both the first and the last stage use, as the first and as the last call them."""

    def lies_on(name: str, stage: Sequence[str]) -> bool:
        return any(name == place or name.startswith(f"{place}.") for place in stage)

    pairs = [sorted(names, key=lambda name: lies_on(name, stages[-1])) for names in model.get("tied") or []]
    return [(a, b) for a, b in pairs if lies_on(a, stages[0]) and lies_on(b, stages[-1])]


def listed(names: Sequence[str]) -> str:
    """A list of names as Python; runs of numbered ones as a generator."""
    parts: list[str] = []
    for (pattern, _offset), run in itertools.groupby(enumerate(names), key=_numbered):
        found = [name for _, name in run]
        if len(found) < 3:
            parts += [repr_like_ruff(name) for name in found]
            continue
        first = int(next(part for part in found[0].split(".") if part.isdigit()))
        bounds = f"{first}, {first + len(found)}" if first else str(len(found))
        parts.append(f'*(f"{pattern}" for i in range({bounds}))')
    text = f"[{', '.join(parts)}]"
    if len(parts) == 1 and parts[0].startswith("*("):
        return f"[{parts[0][2:-1]}]"
    return text if len(text) + 5 <= _LINE_LENGTH else "[\n        " + ",\n        ".join(parts) + ",\n    ]"


def _numbered(item: tuple[int, str]) -> tuple[str, int]:
    """Pattern and offset: equal for neighbours whose one number goes up by one."""
    place, name = item
    parts = name.split(".")
    numbers = [int(part) for part in parts if part.isdigit()]
    if len(numbers) != 1:
        return name, 0
    return ".".join("{i}" if part.isdigit() else part for part in parts), numbers[0] - place


def start_line(inp: EngineInput, folder: str) -> str:
    """The torchrun command; "" where the script can't be run by a train file."""
    return trainfile.start_line(inp, folder, engine=NAME, file_name=TRAIN_FILE)


def validate(files: Mapping[str, str], inp: EngineInput) -> list[str]:
    """What is wrong with the files; empty when they compile and say what the plan says."""
    problems = trainfile.check(files, inp, TRAIN_FILE)
    return problems or _check_parallelize(files["parallelize.py"], inp)


def _check_parallelize(text: str, inp: EngineInput) -> list[str]:
    """Micro-batches, cut, mesh and schedule against the plan."""
    plan, tree, stages = inp.plan, ast.parse(text), stages_of(inp.plan, inp.model)
    problems = common.check_constants("parallelize.py", text, {"NUM_MICROBATCHES": plan.num_microbatches})
    tied, mesh, schedule = tied_ends(stages, inp.model), _mesh(plan), _schedule(plan)[0]
    lists = {"STAGES": f"[{', '.join(map(listed, stages))}]", **({"TIED": repr_like_ruff(tied)} if tied else {})}
    problems += common.check_literals("parallelize.py", text, lists)
    calls = {node.func.id: node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    wanted = f"init_device_mesh(device.type, {repr_like_ruff(tuple(mesh.values()))}, mesh_dim_names={repr_like_ruff(tuple(mesh))})"
    if "init_device_mesh" not in calls or ast.unparse(calls["init_device_mesh"]) != ast.unparse(ast.parse(wanted)):
        problems.append(f"parallelize.py: the mesh is not {wanted}")
    if schedule not in calls:
        problems.append(f"parallelize.py: the schedule is not {schedule}")
    return problems
