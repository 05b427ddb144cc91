"""PyTorch Lightning: a strategy with the plan's degrees (DDP, FSDP2 and split layers, DeepSpeed) and a train file that uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from advisor.engines import common, fsdp2, loops, schema, tensor_parallel, trainfile
from advisor.engines.environment import render_python, repr_like_ruff
from advisor.engines.types import EngineInput
from cost_models.types import Plan

NAME = "lightning"
TITLE = "Lightning"
RUNTIMES: tuple[str, ...] = ()
FOLDER = "lightning"
TRAIN_FILE = "train_lightning.py"
STRATEGY_FILE, PARALLELIZE_FILE = "strategy.py", "parallelize.py"
ABOUT: Mapping[str, str] = {
    STRATEGY_FILE: "the plan for Lightning's `Trainer`",
    PARALLELIZE_FILE: "for `configure_model` of your LightningModule",
    TRAIN_FILE: "the training through Lightning",
}
_STRATEGIES = ("DDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


def strategy_name(plan: Plan) -> str:
    """Lightning's strategy for a plan."""
    if plan.tp_degree == 1 and plan.zero_stage == 0:
        return "DDPStrategy"
    hybrid = plan.dp_replicate_degree > 1 and plan.dp_shard_degree > 1
    with_deepspeed = plan.zero_stage == 1 or (plan.runtime.startswith("deepspeed") and not hybrid)
    return "DeepSpeedStrategy" if plan.tp_degree == 1 and with_deepspeed else "ModelParallelStrategy"


def supports(plan: Plan, model: Mapping[str, Any]) -> str:
    """Empty when Lightning can express the plan, else why not."""
    if plan.pp_degree > 1:
        return "it has no pipeline"
    if plan.cp_degree > 1 or plan.ep_degree > 1:
        return "its strategies split neither sequences nor experts"
    if plan.tp_degree > 1 and plan.zero_stage == 1 and plan.num_microbatches > 1:
        return "its loop reduces gradients in every micro-batch, as ZeRO-2 does"
    if strategy_name(plan) == "ModelParallelStrategy":
        return tensor_parallel.supports(plan, model) if plan.tp_degree > 1 else fsdp2.supports(plan, model)
    if plan.zero_stage and plan.dp_replicate_degree > 1 and plan.dp_shard_degree > 1:
        return "its DeepSpeed strategy shards over all data ranks"
    return common.why_not_recompute(plan, model)


def files(inp: EngineInput, script_path: str) -> dict[str, str]:
    """strategy.py, parallelize.py where it is needed, and train_lightning.py where the script allows it."""
    plan, name = inp.plan, strategy_name(inp.plan)
    written = {key: repr_like_ruff(value) for key, value in strategy(inp).items()}
    context = {"label": plan.label(), "name": name, "arguments": written, "comments": _comments(inp), "trainer": trainer(inp)}
    texts = {STRATEGY_FILE: render_python("lightning/strategy.py.j2", context)}
    splits = name == "ModelParallelStrategy"
    if splits:
        engine = tensor_parallel if plan.tp_degree > 1 else fsdp2
        texts |= {file: text for file, text in engine.files(inp, script_path).items() if not file.startswith("train")}
    extra: dict[str, Any] = {
        "launch": trainfile.start_line(inp, f"{inp.folder or '.'}/{FOLDER}", engine=NAME, file_name=TRAIN_FILE), "name": name, "splits": splits,
        "tp_degree": plan.tp_degree, "optimizer": loops.optimizer(inp).replace("user.", "self.user.").replace("(model", "(self.model"),
    }  # fmt: skip
    if splits:
        extra |= {"recompute": "none", "needs_blocks": False}  # parallelize.py sees to it
    return texts | loops.loop_file(inp, engine=NAME, file_name=TRAIN_FILE, script_path=script_path, extra=extra)


def strategy(inp: EngineInput) -> dict[str, Any]:
    """Arguments of the strategy."""
    plan = inp.plan
    if strategy_name(plan) == "DDPStrategy":
        unused = {"find_unused_parameters": True} if common.unused_parameters(inp.model) else {}
        return {"gradient_as_bucket_view": True, **unused}
    if strategy_name(plan) == "ModelParallelStrategy":
        return {"data_parallel_size": plan.dp_degree, "tensor_parallel_size": plan.tp_degree}
    made: dict[str, Any] = {"stage": plan.zero_stage, "logging_batch_size_per_gpu": plan.micro_batch}
    if plan.offload:
        made |= {"offload_optimizer": True, "offload_parameters": plan.zero_stage == 3, "pin_memory": True}
    return made


def trainer(inp: EngineInput) -> dict[str, Any]:
    """Arguments of the Trainer that belong to the plan."""
    return {
        "num_nodes": inp.num_nodes, "devices": inp.gpus_per_node, "precision": _precision(inp), "accumulate_grad_batches": inp.plan.num_microbatches,
    }  # fmt: skip


def _precision(inp: EngineInput) -> str:
    name, held = strategy_name(inp.plan), inp.meta.param_dtype
    if name == "DeepSpeedStrategy" and held in {"bf16", "fp16"}:
        return f"{'16' if held == 'fp16' else held}-true"
    mixed = common.half_dtype(inp) and not inp.meta.autocast_dtype and name != "ModelParallelStrategy"
    return f"{'16' if inp.precision == 'fp16' else inp.precision}-mixed" if mixed else "32-true"


def _comments(inp: EngineInput) -> dict[str, str]:
    unused = common.named(common.unused_parameters(inp.model))
    made = {
        "gradient_as_bucket_view": "gradients live in the buckets: no second copy",
        "find_unused_parameters": f"no gradient for {unused}: freeze what is never used, then drop this",
        "logging_batch_size_per_gpu": "of a micro-batch, where Lightning can't see it in the loader",
    }
    if _precision(inp) == "32-true" and inp.precision in {"bf16", "fp16"}:
        seen_to = (
            PARALLELIZE_FILE if strategy_name(inp.plan) == "ModelParallelStrategy" and inp.meta.param_dtype == "fp32" else "the script"
        )
        made["precision"] = f"{seen_to} sees to {inp.precision}"
    return made


def start_line(inp: EngineInput, folder: str) -> str:
    """The torchrun command; "" where the script can't be run by a train file."""
    return trainfile.start_line(inp, folder, engine=NAME, file_name=TRAIN_FILE)


def validate(files: Mapping[str, str], inp: EngineInput) -> list[str]:
    """What is wrong with the files: arguments that Lightning doesn't take, what isn't the plan's, Python that doesn't compile."""
    problems = trainfile.check(files, inp, TRAIN_FILE)
    if STRATEGY_FILE not in files:
        return [*problems, f"{STRATEGY_FILE} is missing"]
    if problems:
        return problems
    known, name = schema.table("lightning")["calls"], strategy_name(inp.plan)
    made = schema.calls(files[STRATEGY_FILE])
    if name not in made:
        return [f"{STRATEGY_FILE} calls no {name}"]
    settings = made.get("TRAINER", {})
    found = [*schema.check_section(made[name], known[name], f"{name}."), *schema.check_section(settings, known["Trainer"], "TRAINER.")]
    return found or schema.differences({name: made[name], "TRAINER": settings}, {name: strategy(inp), "TRAINER": trainer(inp)})
