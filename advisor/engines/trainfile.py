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

#: For scripts that declare no optimizer, by the profile's name.
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "rmsprop": "RMSprop", "adagrad": "Adagrad"}
_WRAPPERS = {"ddp": "DistributedDataParallel", "deepspeed": "DeepSpeed's engine", "fsdp2": "", "tensor_parallel": ""}


def script_file(inp: EngineInput) -> Path:
    """The user's script, without an entry that may hang on it."""
    return Path(inp.script)


def train_file(
    inp: EngineInput, *, engine: str, file_name: str, script_path: str, extra: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """The train file by its name; empty when the script can't be run by one."""
    facts = read_script(script_file(inp))
    if why_not_run(inp, facts, engine=engine):
        return {}
    context = {
        **_context(inp, file_name, script_path),
        "engine": engine,
        "wrapper": _WRAPPERS[engine],
        "saves_together": engine != "ddp",
        **(extra or {}),
    }
    return {file_name: render_python(f"{engine}/train_{inp.form}.py.j2", context)}


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
        "tp_degree": plan.tp_degree, "data_ranks": "NUM_DATA_RANKS" if plan.tp_degree > 1 else "WORLD_SIZE",
        "data_rank": ("data_rank" if inp.form == "functions" else "DATA_RANK") if plan.tp_degree > 1 else data_rank,
        "zero_stage": plan.zero_stage, "uses_grad_scaler": meta.uses_grad_scaler, "clips": meta.clips_gradients, "cast_inputs": "",
        "shards_parameters": plan.zero_stage == 3 and plan.dp_shard_degree > 1, "host_collectives": plan.offload,
        "reduces_late": plan.dp_replicate_degree > 1 and plan.dp_shard_degree > 1 and plan.num_microbatches > 1,
        "build_model": build_function(inp), "scaler": inp.precision == "fp16", "arithmetic": common.arithmetic(plan),
        "optimizer": "user.build_optimizer(model)" if declared else f"torch.optim.{kind}(model.parameters())",
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
