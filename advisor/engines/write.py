"""Writes a plan's folder: every engine's files that can express the plan, launch files, plan.json and a README."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from advisor.engines import (
    accelerate,
    colossalai,
    ddp,
    deepspeed,
    fsdp1,
    fsdp2,
    lightning,
    megatron,
    pipeline,
    tensor_parallel,
    torchtitan,
    trainer,
)
from advisor.engines.launch import launch_files
from advisor.engines.plan_json import PLAN_FILE, to_text
from advisor.engines.readme import readme
from advisor.engines.scripts import read_script, why_not_run
from advisor.engines.types import Engine, EngineInput, Support
from cost_models.types import Plan

#: Every engine, in the order in which they are offered.
ENGINES: tuple[Engine, ...] = (
    ddp, fsdp2, fsdp1, tensor_parallel, pipeline, deepspeed, accelerate, trainer, lightning, torchtitan, megatron, colossalai,
)  # fmt: skip


def engines_for(plan: Plan, model: Mapping[str, Any], *, wanted: Sequence[str] = ()) -> list[Support]:
    """Which engines can express the plan, and why the others can't; only of those wanted, where some are named."""
    reasons = [(engine.TITLE, engine.supports(plan, model)) for engine in ENGINES if engine.NAME in wanted or not wanted]
    return [Support(engine=title, supported=not reason, reason=reason) for title, reason in reasons]


def why_no_engine(plan: Plan, model: Mapping[str, Any], *, wanted: Sequence[str] = ()) -> str:
    """A clause on why no engine of those wanted writes files for the plan, in the words of the one that comes nearest; "" where one does."""
    supports = engines_for(plan, model, wanted=wanted)
    if any(s.supported for s in supports):
        return ""
    asked = [e for e in ENGINES if e.NAME in wanted or not wanted]
    priced_for = [e.TITLE for e in asked if plan.runtime in e.RUNTIMES] or [asked[0].TITLE]
    nearest = priced_for[-1] if plan.pp_degree > 1 else priced_for[0]  # of PyTorch's own, pipelines come after tensors
    reason = next(s.reason for s in supports if s.engine == nearest)
    return f"no engine {'asked for' if wanted else 'here'} writes it ({nearest}: {reason})"


def _able(inp: EngineInput) -> list[Engine]:
    """Engines that are wanted and can express the plan, the one it was priced for first."""
    able = [e for e in ENGINES if (e.NAME in inp.engines or not inp.engines) and not e.supports(inp.plan, inp.model)]
    return sorted(able, key=lambda e: inp.plan.runtime not in e.RUNTIMES)


def _engine_files(engine: Engine, inp: EngineInput, folder: Path) -> dict[str, str]:
    """An engine's texts by bare file name."""
    script_path = Path(os.path.relpath(inp.script, folder / engine.FOLDER)).as_posix()
    return engine.files(inp, script_path)


def plan_files(inp: EngineInput, folder: Path) -> dict[str, str]:
    """Texts of a plan's folder by file name. `folder` is where they will lie: the way to the user's script is relative to it."""
    script_path = Path(os.path.relpath(inp.script, folder)).as_posix()
    texts: dict[str, str] = {}
    for engine in _able(inp):
        texts |= {_placed(engine, name): text for name, text in _engine_files(engine, inp, folder).items()}
    trains = [e.TRAIN_FILE for e in _able(inp) if not e.FOLDER and e.TRAIN_FILE in texts]
    if trains:
        texts |= launch_files(inp, trains)
    texts[PLAN_FILE] = to_text(inp, script_path)
    supports = engines_for(inp.plan, inp.model)
    texts["README.md"] = readme(
        inp, texts, supports, about=_about(inp), starts=start_lines(inp), refusals=_refusals(inp), trains=trains, script_path=script_path
    )
    return texts


def _placed(engine: Engine, name: str) -> str:
    return f"{engine.FOLDER}/{name}" if engine.FOLDER else name


def _about(inp: EngineInput) -> dict[str, str]:
    """README lines by file name below the plan's folder."""
    return {_placed(engine, name): line for engine in _able(inp) for name, line in engine.ABOUT.items()}


def start_lines(inp: EngineInput, folder: str | PurePath = "") -> dict[str, str]:
    """The command that trains with each able engine, by its name; without those that can't start anything.

    Args:
        inp: plan and script.
        folder: of the plan's files, as the user sees it; by default `inp.folder`.
    """
    base = PurePath(folder or inp.folder or ".")
    lines = {engine.NAME: engine.start_line(inp, str(base / engine.FOLDER)) for engine in _able(inp)}
    return {name: line for name, line in lines.items() if line}


def _refusals(inp: EngineInput) -> dict[str, str]:
    """Why an able engine's train file isn't written, by train file name."""
    facts = read_script(Path(inp.script))
    reasons = {_placed(e, e.TRAIN_FILE): why_not_run(inp, facts, engine=e.NAME) for e in _able(inp) if e.TRAIN_FILE}
    return {name: reason for name, reason in reasons.items() if reason}


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
    for engine in _able(inp):
        problems = engine.validate(_engine_files(engine, inp, folder), inp)
        if problems:
            raise ValueError(f"{engine.TITLE} files for {inp.plan.label()}: {'; '.join(problems)}")
    texts = plan_files(inp, folder)
    for name, text in texts.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf8")
        if name.endswith(".sh"):
            target.chmod(0o755)
    return tuple(texts)


def launch_line(inp: EngineInput, folder: str | PurePath = "") -> str:
    """The command that starts the plan with the engine it was priced for, or the next that can; "" where none can.

    Args:
        inp: plan and script.
        folder: of the plan's files, as the user sees it; by default `inp.folder`.
    """
    return next(iter(start_lines(inp, folder).values()), "")


def why_no_files(inp: EngineInput) -> str:
    """One sentence on why the plan has no train file; "" where it has one."""
    if not _able(inp):
        reasons = "; ".join(f"{s.engine}: {s.reason}" for s in engines_for(inp.plan, inp.model, wanted=inp.engines))
        return f"No files, as no engine {'asked for' if inp.engines else 'here'} can express this plan ({reasons})."
    if launch_line(inp):
        return ""
    # the first engine's reason, as it would be used
    reason = next(iter(_refusals(inp).values()), "the engines that can express the plan don't run the script itself")
    return f"No train file, because {reason}."
