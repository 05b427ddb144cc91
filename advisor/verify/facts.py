"""Looks at the shrunk model again: what its files are written from, and the workload that prices it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.engines import EngineInput
from advisor.engines.scripts import build_function, read_script
from advisor.profiling import StepProfile, capture
from advisor.verify.shrink import Shrunk
from advisor.workload import model_summary, shape
from advisor.workload.stages import stage_modules
from cost_models.types import Plan, Workload

_WRAPPER = '''"""{name} with fewer layers, as `advise verify` runs it."""

import importlib.util
import sys

from advisor.verify.smaller import make_smaller

SCRIPT = {script}
sys.path.insert(0, {folder})
_spec = importlib.util.spec_from_file_location({stem}, SCRIPT)
_user = importlib.util.module_from_spec(_spec)
sys.modules[{stem}] = _user
_spec.loader.exec_module(_user)


def {entry}():
    return make_smaller(_user.{entry}(), {removed})
'''
_PASSED_ON = {"make_batch": "batch_size", "loss_fn": "model, batch", "build_optimizer": "model"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The shrunk plan with the model that it is for."""

    inp: EngineInput
    workload: Workload


def facts_of(step: StepProfile, advised: EngineInput, plan: Plan, args: Sequence[str] = ()) -> Facts:
    """What an engine and the cost model must know of a plan for the model of a traced step.

    Args:
        step: of the (shrunk) model.
        advised: script, precision and optimizer.
        plan: to run on this machine.
        args: the script's own arguments.
    """
    workload = shape(step, precision=advised.precision, optimizer=advised.optimizer or None)
    model = model_summary(step, workload)
    if plan.pp_degree > 1:
        model["stages"] = stage_modules(step, workload, plan)
    inp = dataclasses.replace(
        advised, plan=plan, meta=dataclasses.replace(step.meta, script=advised.meta.script), model=model, num_nodes=1,
        gpus_per_node=plan.world_size, script_args=tuple(args), folder="", engines=(),
    )  # fmt: skip
    return Facts(inp=inp, workload=workload)


def look(
    inp: EngineInput, shrunk: Shrunk, folder: Path, *, args: Sequence[str], timeout_s: float, progress: Callable[[str], None]
) -> Facts:
    """Trace a step of the shrunk model.

    Args:
        inp: the plan as advised.
        shrunk: what it becomes.
        folder: for a file that builds the smaller model.
        args: the script's own arguments.
        timeout_s: for everything that runs the user's code.
        progress: told what is going on.

    Raises:
        ScriptError: the script takes no step, perhaps because of the layers that were taken out.
    """
    entry, script = build_function(inp), Path(inp.script)
    if shrunk.removed_blocks:
        script = folder / Path(inp.script).name
        script.write_text(_wrapper(inp, shrunk, entry), encoding="utf8")
    functions = inp.form == "functions"
    step = capture(
        str(script), entry=entry if functions else None, args=tuple(args), capture="traced", timeout_s=timeout_s,
        batch_size=shrunk.plan.micro_batch if functions else None, progress=progress,
    )  # fmt: skip
    return facts_of(step, inp, shrunk.plan, args)


def _wrapper(inp: EngineInput, shrunk: Shrunk, entry: str) -> str:
    path = Path(inp.script).resolve()
    text = _WRAPPER.format(
        name=path.name, script=json.dumps(str(path)), folder=json.dumps(str(path.parent)), stem=json.dumps(path.stem), entry=entry,
        removed=list(shrunk.removed_blocks),
    )  # fmt: skip
    declared = read_script(path).functions
    for name, parameters in _PASSED_ON.items():
        if name in declared:
            text += f"\n\ndef {name}({parameters}):\n    return _user.{name}({parameters})\n"
    return text
