"""Writes a plan's folder: every engine's files that can express the plan, a launch script and a README."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from advisor.engines import ddp, deepspeed, fsdp2, tensor_parallel
from advisor.engines.environment import render
from advisor.engines.launch import torchrun_line
from advisor.engines.readme import readme
from advisor.engines.scripts import read_script, why_not_run
from advisor.engines.types import Engine, EngineInput, Support
from cost_models.types import Plan

#: Every engine, in the order in which they are offered.
ENGINES: tuple[Engine, ...] = (ddp, fsdp2, tensor_parallel, deepspeed)


def engines_for(plan: Plan, model: Mapping[str, Any]) -> list[Support]:
    """Which engines can express the plan, and why the others can't."""
    reasons = [(engine.TITLE, engine.supports(plan, model)) for engine in ENGINES]
    return [Support(engine=title, supported=not reason, reason=reason) for title, reason in reasons]


def _able(inp: EngineInput) -> list[Engine]:
    """Engines that can express the plan, the one it was priced for first."""
    able = [e for e in ENGINES if not e.supports(inp.plan, inp.model)]
    return sorted(able, key=lambda e: inp.plan.runtime not in e.RUNTIMES)


def plan_files(inp: EngineInput, folder: Path) -> dict[str, str]:
    """Texts of a plan's folder by file name. `folder` is where they will lie: the way to the user's script is relative to it."""
    script_path = Path(os.path.relpath(inp.script, folder)).as_posix()
    texts: dict[str, str] = {}
    for engine in _able(inp):
        texts |= engine.files(inp, script_path)
    trains = [e.TRAIN_FILE for e in _able(inp) if e.TRAIN_FILE in texts]
    trains = list(dict.fromkeys(trains))
    if trains:
        texts["launch.sh"] = render("common/launch.sh.j2", _launch_context(inp, trains))
    texts["README.md"] = readme(
        inp, texts, engines_for(inp.plan, inp.model), refusals=_refusals(inp), trains=trains, script_path=script_path
    )
    return texts


def _refusals(inp: EngineInput) -> dict[str, str]:
    """Why an able engine's train file isn't written, by train file name."""
    facts = read_script(Path(inp.script))
    reasons = {e.TRAIN_FILE: why_not_run(inp, facts, engine=e.NAME) for e in _able(inp)}
    return {name: reason for name, reason in reasons.items() if reason}


def _launch_context(inp: EngineInput, trains: list[str]) -> dict[str, Any]:
    return {
        "label": inp.plan.label(), "num_nodes": inp.num_nodes, "gpus_per_node": inp.gpus_per_node, "files": trains,
        "folder": shlex.quote(inp.folder or "."),
    }  # fmt: skip


def write_plan(inp: EngineInput, folder: Path) -> tuple[str, ...]:
    """Write a plan's folder.

    Args:
        inp: plan and script.
        folder: created if need be; files of the same names are replaced.

    Returns:
        Names written, relative to the folder.

    Raises:
        ValueError: a text does not pass its engine's own check (a fault of this package, not of the user).
    """
    texts = plan_files(inp, folder)
    for engine in _able(inp):
        problems = engine.validate(texts, inp)
        if problems:
            raise ValueError(f"{engine.TITLE} files for {inp.plan.label()}: {'; '.join(problems)}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        target = folder / name
        target.write_text(text, encoding="utf8")
        if name.endswith(".sh"):
            target.chmod(0o755)
    return tuple(texts)


def launch_line(inp: EngineInput, folder: str | PurePath = "") -> str:
    """The command that starts the plan; "" where no train file can be written.

    Args:
        inp: plan and script.
        folder: of the plan's files, as the user sees it; by default `inp.folder`.
    """
    facts = read_script(Path(inp.script))
    able = [e for e in _able(inp) if not why_not_run(inp, facts, engine=e.NAME)]
    return torchrun_line(inp, PurePath(folder or inp.folder) / able[0].TRAIN_FILE) if able else ""


def why_no_files(inp: EngineInput) -> str:
    """One sentence on why the plan has no train file; "" where it has one."""
    able = _able(inp)
    if not able:
        reasons = "; ".join(f"{s.engine}: {s.reason}" for s in engines_for(inp.plan, inp.model))
        return f"No files, as no engine here can express this plan ({reasons})."
    if launch_line(inp):
        return ""
    refusals = list(dict.fromkeys(_refusals(inp).values()))
    return f"No train file, because {'; and '.join(refusals)}."
