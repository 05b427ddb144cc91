"""Train files with a loop of a library's own (Accelerate, Trainer, Lightning), for files that declare `build_model` and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from advisor.engines import common
from advisor.engines.environment import render_python
from advisor.engines.scripts import build_function, read_script, why_not_run
from advisor.engines.types import EngineInput

#: For files that declare no optimizer, by the profile's name.
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "rmsprop": "RMSprop", "adagrad": "Adagrad"}


def loop_file(inp: EngineInput, *, engine: str, file_name: str, script_path: str, extra: Mapping[str, Any]) -> dict[str, str]:
    """The train file by its name; empty when the script can't be run by one."""
    if why_not_run(inp, read_script(Path(inp.script)), engine=engine):
        return {}
    plan = inp.plan
    recompute = "none" if inp.meta.uses_checkpointing else plan.recompute
    context = {
        "script_name": Path(inp.script).name, "script_path": script_path, "label": plan.label(), "world_size": plan.world_size,
        "micro_batch": plan.micro_batch, "num_microbatches": plan.num_microbatches, "seed": inp.seed, "tf32": inp.precision == "tf32",
        "build_model": build_function(inp), "arithmetic": common.arithmetic(plan), "optimizer": optimizer(inp), "recompute": recompute,
        "needs_blocks": recompute != "none", "block_patterns": common.block_patterns(inp.model), "cast_inputs": "",
        "checkpointed": common.checkpointed("block", recompute), **extra,
    }  # fmt: skip
    return {file_name: render_python(f"{engine}/train_functions.py.j2", context)}


def optimizer(inp: EngineInput) -> str:
    """Expression that builds the optimizer of `model`."""
    facts = read_script(Path(inp.script))
    if "build_optimizer" in facts.functions or not facts.functions:
        return "user.build_optimizer(model)"
    return f"torch.optim.{_OPTIMIZERS.get(inp.optimizer or inp.meta.optimizer, 'AdamW')}(model.parameters())"
