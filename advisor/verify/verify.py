"""Verifies an advice: reads its plans, shrinks them, runs their files, and says what holds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from advisor.engines import ENGINES, EngineInput, read_plan, why_no_files
from advisor.engines.checks import normalizes_batches
from advisor.engines.plan_json import PLAN_FILE
from advisor.engines.scripts import read_script
from advisor.engines.types import Engine
from advisor.errors import AdvisorError, ScriptError
from advisor.measure.local_gpus import local_gpus
from advisor.report.output import add_file
from advisor.verify import compare, starts
from advisor.verify.cells import run_cells
from advisor.verify.engine_run import (
    REFERENCE,
    Run,
    comparable,
    engine_cells,
    engine_checks,
    priced_plan,
    reference_cell,
    steps_compared,
    write_files,
)
from advisor.verify.facts import Facts, look
from advisor.verify.memory import why_too_large
from advisor.verify.predict import Prediction, measured_here, predict
from advisor.verify.shrink import Shrunk, shrink, usual_processes
from advisor.verify.verdicts import FAILED, NOT_HERE, Check, EngineVerdict, PlanVerdict
from cost_models.types import Cluster

RESULT_FILE = "verify.json"
_PLAN_FOLDER = r"plan-(\d+)"
#: A step without compared parameters, one with counted collectives, two that are timed.
LEAST_STEPS = 4
_CELL_LIMIT_S, _LOOK_LIMIT_S = 300.0, 300.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be verified, and how."""

    engine: str = ""  # its NAME; "" for all that the plan has files for
    num_processes: int | None = None
    num_steps: int = LEAST_STEPS
    args: tuple[str, ...] = ()  # of the script, instead of the plan's
    progress: Progress = lambda _: None
    measured: dict[int, Cluster | None] = field(default_factory=dict)  # this machine, by number of processes; filled as plans need it


def verify_advice(folder: Path, request: Request, plan: int | None = None) -> list[PlanVerdict]:
    """Run an advice's plans and write each one's verify.json.

    Args:
        folder: of an advice, or of one of its plans.
        request: engine, processes and steps.
        plan: rank of the only plan wanted.

    Raises:
        AdvisorError: no advice, no such plan, an engine that can't express it, or processes can't be run at all.
    """
    verdicts = []
    folder, plan = _advice_of(folder, plan)
    folders = _plan_folders(folder, plan)
    having = [one for one in folders if _has_files(one, request.engine)]
    for plan_folder in having or folders[:1]:  # where no plan has the engine, the first says why
        verdict = verify_plan(plan_folder, request)
        add_file(folder, f"{plan_folder.name}/{RESULT_FILE}", json.dumps(verdict.to_json(), indent=1) + "\n")
        verdicts.append(verdict)
    return verdicts


def _advice_of(folder: Path, plan: int | None) -> tuple[Path, int | None]:
    """The advice and the rank of its plan, where a plan's folder is given."""
    named = folder if folder.name else folder.resolve()
    if not (found := re.fullmatch(_PLAN_FOLDER, named.name)) or not (named / PLAN_FILE).is_file():
        return folder, plan
    number = int(found[1])
    if plan not in {None, number}:
        raise AdvisorError(
            f"{folder} is the folder of plan {number}, not of plan {plan}.",
            hint=f"Run `advise verify {named.parent} --plan {plan}` for that one.",
        )
    return named.parent, number


def _plan_folders(folder: Path, plan: int | None) -> list[Path]:
    if not folder.is_dir():
        raise AdvisorError(f"{folder} is not a folder.", hint="Give the folder that `advise` wrote, such as advice.")
    numbered = {int(m[1]): p for p in folder.iterdir() if (m := re.fullmatch(_PLAN_FOLDER, p.name)) and p.is_dir()}
    if not numbered:
        raise AdvisorError(f"{folder} holds no plans.", hint="Give the folder that `advise` wrote, such as advice.")
    if plan is not None and plan not in numbered:
        have = ", ".join(map(str, sorted(numbered)))
        raise AdvisorError(f"{folder} has no files for plan {plan}; it has them for {have}.", hint="`advise --plans K` writes more.")
    return [numbered[k] for k in sorted(numbered) if plan in (None, k)]


def _has_files(folder: Path, engine: str) -> bool:
    """Whether a plan has files for the engine asked for; a plan that can't be read says so when it is run."""
    try:
        advised = read_plan(folder.resolve())
    except (OSError, ValueError):
        return True
    return not engine or any(engine == e.NAME for e in _able(advised))


def _able(inp: EngineInput) -> list[Engine]:
    """Engines that the plan's folder has files for."""
    return [e for e in ENGINES if (not inp.engines or e.NAME in inp.engines) and not e.supports(inp.plan, inp.model)]


def verify_plan(folder: Path, request: Request) -> PlanVerdict:
    """Run one plan's files.

    Raises:
        AdvisorError: the folder or the script can't be read, or processes can't be run at all.
    """
    try:
        advised = read_plan(folder.resolve())
    except (OSError, ValueError) as error:
        raise AdvisorError(f"{error}.", hint="`advise` writes plan.json into each plan's folder; run it again.") from error
    if advised.form in {"functions", "script"} and not Path(advised.script).is_file():
        raise AdvisorError(
            f"The plan's script {advised.script} is not there any more.", hint="Run `advise` again with the script's new place."
        )
    engines = _engines(advised, request.engine)
    num_processes, on_gpu = _processes(advised, request)
    found = _Verified(folder, advised, request, num_processes, on_gpu)
    if not engines:
        return dataclasses.replace(found.verdict(None, []), reason=why_no_files(advised))
    if advised.form not in {"functions", "script"}:
        return found.refused(engines, "only a trace is known, not the script")
    with tempfile.TemporaryDirectory(prefix="advise-verify-", ignore_cleanup_errors=True) as scratch:
        return found.run(engines, Path(scratch))


def _engines(inp: EngineInput, name: str) -> list[Engine]:
    """Those that the plan's folder has files for, or the one asked for."""
    able = _able(inp)
    if not name:
        return able
    if all(name != e.NAME for e in able):
        engine = next(e for e in ENGINES if name == e.NAME)
        why = engine.supports(inp.plan, inp.model) or "no files were written for it"
        raise AdvisorError(
            f"{engine.TITLE} has no files for {inp.plan.label()}: {why}.", hint="Leave --engine out to verify those that have."
        )
    return [e for e in able if name == e.NAME]


def _processes(inp: EngineInput, request: Request) -> tuple[int, bool]:
    """How many processes at most, and whether each gets a GPU."""
    gpus = local_gpus()
    num_gpus = gpus.count if gpus is not None else 0
    wanted = request.num_processes or usual_processes(inp.plan, **({"most": num_gpus} if num_gpus > 1 else {}))
    return wanted, num_gpus >= wanted > 0 and (num_gpus > 1 or wanted == 1)


class _Verified:
    """One plan on its way to a verdict."""

    def __init__(self, folder: Path, advised: EngineInput, request: Request, num_processes: int, on_gpu: bool) -> None:
        self.folder, self.advised, self.request = folder, advised, request
        self.num_processes, self.on_gpu, self.num_steps = num_processes, on_gpu, request.num_steps

    def refused(self, engines: Sequence[Engine], why: str, shrunk: Shrunk | None = None) -> PlanVerdict:
        """No engine can be run, for one reason."""
        checks = (Check(name="runs", status=NOT_HERE, detail=why),)
        return self.verdict(shrunk, [EngineVerdict(engine=e.NAME, title=e.TITLE, checks=checks) for e in engines])

    def verdict(self, shrunk: Shrunk | None, engines: Sequence[EngineVerdict]) -> PlanVerdict:
        return PlanVerdict(
            folder=str(self.folder), label=self.advised.plan.label(), shrunk_label=shrunk.plan.label() if shrunk else "",
            num_processes=shrunk.plan.world_size if shrunk else 0, backend="nccl" if self.on_gpu else "gloo",
            num_steps=self.num_steps, changes=shrunk.changes if shrunk else (), engines=tuple(engines),
        )  # fmt: skip

    def run(self, engines: Sequence[Engine], scratch: Path) -> PlanVerdict:
        args = self.request.args or self.advised.script_args
        is_whole = self.advised.form == "script" and not self.on_gpu  # nothing is taken out of it before it is trained
        if not self.request.args and (why := why_too_large(self.advised, self.num_processes, trained=is_whole)):
            return self.refused(engines, why)
        try:
            shrunk, facts = self._look(scratch, args)
        except ScriptError as error:
            return self.refused(engines, f"the script takes no step here: {starts.with_hint(error.message)}")
        if why := why_too_large(facts.inp, shrunk.plan.world_size, trained=not self.on_gpu):
            return self.refused(engines, why, shrunk)
        run = Run(
            facts=facts, removed_blocks=shrunk.removed_blocks, folder=scratch, num_steps=self.request.num_steps, limit_s=_CELL_LIMIT_S,
            on_gpu=self.on_gpu, why_not_comparable=comparable(facts.inp),
        )  # fmt: skip
        return self.verdict(shrunk, self._engines(engines, run))

    def _look(self, scratch: Path, args: Sequence[str]) -> tuple[Shrunk, Facts]:
        """The shrunk plan and model; whole where a model can't do without some of its layers."""
        self.request.progress("looking at the shrunk model")
        shrunk = self._shrunk(can_cut=self.advised.form == "functions")
        try:
            return shrunk, self._facts(shrunk, scratch, args)
        except ScriptError as error:
            if not shrunk.removed_blocks:
                raise
            whole = self._shrunk(can_cut=False)
            kept = f"all layers kept, as the model takes no step without some of them ({error.message})"
            return dataclasses.replace(whole, changes=(*whole.changes, kept)), self._facts(whole, scratch, args)

    def _facts(self, shrunk: Shrunk, scratch: Path, args: Sequence[str]) -> Facts:
        return look(self.advised, shrunk, scratch, args=args, timeout_s=_LOOK_LIMIT_S, progress=self.request.progress)

    def _shrunk(self, *, can_cut: bool) -> Shrunk:
        meta, loads = self.advised.meta, "DataLoader" in read_script(Path(self.advised.script)).names
        return shrink(
            self.advised.plan, self.advised.model, self.num_processes, can_cut=can_cut, accumulation=max(meta.accumulation, 1)
            if self.advised.form == "script" else 1, keeps_batch=self.advised.form == "script" and not loads,
            normalizes=normalizes_batches(self.advised),
        )  # fmt: skip

    def _engines(self, engines: Sequence[Engine], run: Run) -> list[EngineVerdict]:
        """Files of all, then one start of the processes for those that can run."""
        written = {e.NAME: self._written(e, run) for e in engines}
        able = [e for e in engines if all(c.name == "files" and c.status != FAILED for c in written[e.NAME])]
        records = {}
        if able:
            cells = [reference_cell(run), *(cell for e in able for cell in engine_cells(e, run))]
            records = run_cells(
                cells, run.folder, num_processes=run.inp.plan.world_size, on_gpu=self.on_gpu,
                imports=starts.heavy_imports([e.NAME for e in able]), progress=lambda name: self.request.progress(f"running {name}"),
            )  # fmt: skip
            alone = records[REFERENCE][0]
            self.num_steps = (0 if alone["code"] else steps_compared(run.num_steps, alone)) or run.num_steps
        predictions = self._predictions(able, run)
        verdicts = []
        for engine in engines:
            checks = list(written[engine.NAME])
            if engine in able:
                checks += self._checks(engine, run, records, predictions.get(engine.NAME))
            verdicts.append(EngineVerdict(engine=engine.NAME, title=engine.TITLE, checks=tuple(checks)))
        return verdicts

    def _checks(self, engine: Engine, run: Run, records: dict[str, list[dict[str, object]]], predicted: Prediction | None) -> list[Check]:
        alone = records[REFERENCE][0]
        if alone["code"]:
            why = starts.with_hint(compare.why_ended(alone))
            return [Check(name="runs", status=NOT_HERE, detail=f"one process alone fails: {why}")]
        if not alone["steps"]:
            return [Check(name="runs", status=NOT_HERE, detail="one process alone takes no optimizer step")]
        return engine_checks(engine, run, records, predicted)

    def _written(self, engine: Engine, run: Run) -> list[Check]:
        why = engine.supports(run.inp.plan, run.inp.model) or starts.why_not_here(engine, run.inp, on_gpu=self.on_gpu)
        if why:
            return [Check(name="runs", status=NOT_HERE, detail=why)]
        try:
            found = write_files(engine, run, self.advised, self.folder)
        except ValueError as error:
            return [Check(name="files", status=FAILED, detail=str(error))]
        return [found]

    def _predictions(self, engines: Sequence[Engine], run: Run) -> dict[str, Prediction]:
        if not engines:
            return {}
        cluster = self._cluster(run)
        if cluster is None:
            return {}
        found = {}
        for engine in engines:
            with contextlib.suppress(ValueError):  # an arithmetic that this machine has no rate for
                found[engine.NAME] = predict(run.facts.workload, priced_plan(engine, run.inp.plan), cluster)
        return found

    def _cluster(self, run: Run) -> Cluster | None:
        count, measured = run.inp.plan.world_size, self.request.measured
        if count not in measured:
            self.request.progress("measuring this machine")
            measured[count] = None
            with contextlib.suppress(AdvisorError):
                measured[count] = measured_here(count, on_gpu=self.on_gpu, progress=self.request.progress)
        return measured[count]
