"""How each engine's train file is started in a process of ours, and why some can't be here."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from advisor.engines import EngineInput, lightning
from advisor.engines.scripts import read_script, why_not_run
from advisor.engines.types import Engine
from cost_models.types import Plan

#: Packages that an engine's train file needs beside torch.
_PACKAGES = {"deepspeed": "deepspeed", "accelerate": "accelerate", "trainer": "transformers", "lightning": "lightning"}
#: Modules worth importing once for all cells; DeepSpeed imports most of its own, and PyTorch's compiler, when an engine is made.
_HEAVY = {
    "ddp": ("torch.distributed.optim",),
    "pipeline": ("torch.distributed.pipelining",),
    "deepspeed": ("deepspeed", "deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.zero.muon.muon_optimizer", "setuptools"),
    "accelerate": ("accelerate",),
    "trainer": ("transformers.trainer",),
    "lightning": ("lightning",),
}


def why_not_here(engine: Engine, inp: EngineInput, *, on_gpu: bool) -> str:
    """Empty when the engine's files for this plan can be run on this machine, else why not."""
    package = _PACKAGES.get(engine.NAME, "")
    if not engine.TRAIN_FILE:
        return f"{engine.TITLE} trains in an environment and by a launcher of its own"
    if package and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if not engine.start_line(inp, engine.FOLDER):
        return why_not_run(inp, read_script(Path(inp.script)), engine=engine.NAME) or "no train file is written for this script"
    return "" if on_gpu else _why_not_on_cpu(engine, inp.plan)


def _why_not_on_cpu(engine: Engine, plan: Plan) -> str:
    if engine.NAME in {"accelerate", "trainer"} and plan.zero_stage > 0:
        return "Accelerate shards on GPUs alone, and goes on unsharded where there is none"
    if engine.NAME == "lightning" and lightning.strategy_name(plan) == "DeepSpeedStrategy":
        return "Lightning's DeepSpeedStrategy runs on GPUs alone"
    return ""


def with_hint(message: str) -> str:
    """What a script's error says; and what to do where it reads a file by a path relative to its folder, or is too slow for this machine."""
    if "did not end within" in message:
        return f"{message}; to verify it on this machine, advise a smaller version of it by its own arguments after --"
    found = re.search(r"No such file or directory: '([^/'][^']*)'", message)
    if not found:
        return message
    return f"{message.rstrip('.')}; {found[1]} is looked for in {Path.cwd()}: run `advise verify` from the folder in which the script itself is started"


def start(engine: Engine, inp: EngineInput, folder: Path, num_steps: int) -> dict[str, Any]:
    """Fields of the cell that runs the engine's train file.

    Args:
        engine: one that can run here.
        inp: the shrunk plan.
        folder: where its files were written.
        num_steps: steps that are compared; one more is taken, before which parameters are looked at.
    """
    home = folder / engine.FOLDER
    args = ["--steps", str(num_steps + 1)] if inp.form == "functions" else list(inp.script_args)
    cell: dict[str, Any] = {"file": str(home / engine.TRAIN_FILE), "args": args}
    if engine.NAME == "accelerate":
        cell["accelerate_config"] = str(home / "accelerate.yaml")
    return cell


def heavy_imports(names: Mapping[str, Any] | list[str]) -> list[str]:
    """Modules that these engines need."""
    return [module for name in names for module in _HEAVY.get(name, ())]


def takes_checkpoints(train_file: Path) -> bool:
    """Whether the train file, with the files beside it, has the option."""
    return any('"--checkpoint"' in path.read_text(encoding="utf8") for path in train_file.parent.glob("*.py"))
