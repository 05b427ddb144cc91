"""The train file of an engine: which template, which imports, and what it must say."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from advisor.engines import common
from advisor.engines.environment import render_python
from advisor.engines.launch import torchrun_line
from advisor.engines.scripts import build_function, read_script, why_not_run
from advisor.engines.types import EngineInput
from cost_models.types import Plan

#: For scripts that declare no optimizer, by the profile's name.
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "rmsprop": "RMSprop", "adagrad": "Adagrad"}
#: What stands around the model and is called in its place.
_WRAPPERS = {"ddp": "DistributedDataParallel", "fsdp1": "FullyShardedDataParallel", "deepspeed": "DeepSpeed's engine"}
HELPERS_FILE, CHECKPOINTS_FILE = "train_helpers.py", "train_checkpoints.py"
#: README lines of the files that a train file imports.
ABOUT_HELPERS: Mapping[str, str] = {
    HELPERS_FILE: "options, random numbers, warm-up and metrics of the train file",
    CHECKPOINTS_FILE: "asynchronous checkpoints of the train file, and resuming from them",
}


def script_file(inp: EngineInput) -> Path:
    """The user's script, without an entry that may hang on it."""
    return Path(inp.script)


def train_file(
    inp: EngineInput, *, engine: str, file_name: str, script_path: str, extra: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """The train file and what it imports, by name; empty when the script can't be run by one."""
    facts = read_script(script_file(inp))
    if why_not_run(inp, facts, engine=engine):
        return {}
    context = {
        **_context(inp, file_name, script_path),
        "engine": engine,
        "wrapper": _WRAPPERS.get(engine, ""),
        "saves_together": engine != "ddp",
        "counts_calls": engine in {"ddp", "fsdp1"},
        "saves_beside": engine != "deepspeed",
        "trained": "engine" if engine == "deepspeed" else "model",
        "trained_parameter": "model: nn.Module",
        "trained_module": "model",
        "whole_states": False,
        **(extra or {}),
    }
    texts = {file_name: render_python(f"{engine}/train_{inp.form}.py.j2", context)}
    if inp.form == "functions":
        texts[HELPERS_FILE] = render_python("common/train_helpers.py.j2", context)
        if context["saves_beside"]:
            texts[CHECKPOINTS_FILE] = render_python("common/train_checkpoints.py.j2", context)
    return texts


def start_line(inp: EngineInput, folder: str, *, engine: str, file_name: str) -> str:
    """The torchrun command of a train file in `folder`; "" where the script can't be run by one."""
    return "" if why_not_run(inp, read_script(script_file(inp)), engine=engine) else torchrun_line(inp, PurePath(folder) / file_name)


def _context(inp: EngineInput, file_name: str, script_path: str) -> dict[str, Any]:
    plan, meta = inp.plan, inp.meta
    facts = read_script(script_file(inp))
    kind = _OPTIMIZERS.get(inp.optimizer or meta.optimizer, "AdamW")
    declared = "build_optimizer" in facts.functions or not facts.functions
    turns = max(1, plan.num_microbatches // max(meta.accumulation, 1))
    folder, data_rank = inp.folder or ".", "rank" if inp.form == "functions" else "RANK"
    return {
        "script_name": script_file(inp).name, "script_path": script_path, "script_args": shlex.join(inp.script_args), "file_name": file_name,
        "launch": torchrun_line(inp, f"{folder}/{file_name}"), "label": plan.label(), "world_size": plan.world_size,
        "micro_batch": plan.micro_batch, "num_microbatches": plan.num_microbatches, "script_batch": meta.batch_size,
        "turns_per_step": turns, "backwards_per_step": plan.num_microbatches, "seed": inp.seed, "tf32": inp.precision == "tf32",
        "tp_degree": plan.tp_degree, **_data_ranks(plan, data_rank),
        "losses_per_step": "WORLD_SIZE * NUM_MICROBATCHES",
        "zero_stage": plan.zero_stage, "uses_grad_scaler": meta.uses_grad_scaler, "clips": meta.clips_gradients, "cast_inputs": "",
        "shards_parameters": plan.zero_stage == 3 and plan.dp_shard_degree > 1, "host_collectives": plan.offload,
        "reduces_late": plan.num_microbatches > 1 and plan.dp_replicate_degree > 1 and (plan.dp_shard_degree > 1 or plan.tp_degree > 1),
        "reduces_once": plan.zero_stage == 1 and plan.tp_degree > 1 and plan.num_microbatches > 1,
        "has_dataset": "make_dataset" in facts.functions,
        "make_eval_batch": "make_eval_batch" if "make_eval_batch" in facts.functions else "make_batch",
        "build_model": build_function(inp), "scaler": inp.precision == "fp16", "arithmetic": common.arithmetic(plan),
        "optimizer": "user.build_optimizer(model)" if declared else f"torch.optim.{kind}(model.parameters())",
    }  # fmt: skip


def _data_ranks(plan: Plan, own: str) -> dict[str, Any]:
    """How ranks that share their data are told from others; `own` is what the file calls a rank's number."""
    shared_by = plan.tp_degree * plan.pp_degree
    if shared_by == 1:
        alone = {"data_ranks": "WORLD_SIZE", "data_rank": own, "data_rank_of": "rank", "dropout_rank": own}
        return {"shared_by": 1, "shared_by_whom": "", **alone}
    tensor, apart = plan.tp_degree, plan.world_size // plan.pp_degree
    group, data_rank = "rank" if tensor == 1 else f"rank // {tensor}", "data_rank" if own == "rank" else "DATA_RANK"
    words = f"groups of {tensor} ranks in a row split each layer" if tensor > 1 else ""
    if plan.pp_degree > 1:
        words = f"{words + ', ' if words else ''}{plan.pp_degree} {'groups' if words else 'ranks'}, {apart} apart, form a pipeline"
    return {
        "shared_by": shared_by, "shared_by_whom": f"{words} and share their data", "data_ranks": "NUM_DATA_RANKS", "data_rank": data_rank,
        "data_rank_of": f"{group} % NUM_DATA_RANKS" if plan.pp_degree > 1 else group,
        "dropout_rank": group if plan.pp_degree > 1 else data_rank,
    }  # fmt: skip


def check(files: Mapping[str, str], inp: EngineInput, train_name: str) -> list[str]:
    """Every Python file compiles, and the train file's constants are the plan's."""
    problems = [p for name, text in files.items() if name.endswith(".py") for p in common.check_python(name, text)]
    if problems or train_name not in files:
        return problems
    plan = inp.plan
    expected = {"WORLD_SIZE": plan.world_size, "MICRO_BATCH": plan.micro_batch}
    if inp.form == "functions":
        expected["NUM_MICROBATCHES"] = plan.num_microbatches
    else:
        expected["BACKWARDS_PER_STEP"] = plan.num_microbatches
    return common.check_constants(train_name, files[train_name], expected)
