"""One engine of a plan: its files for the shrunk plan, the cells that run them, and the checks of what those left."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.engines import EngineInput, plan_files, write_plan
from advisor.engines.plan_json import PLAN_FILE
from advisor.engines.scripts import build_function, read_script
from advisor.engines.types import Engine
from advisor.verify import charges, compare, starts
from advisor.verify.edits import carried_over
from advisor.verify.facts import Facts
from advisor.verify.predict import Prediction
from advisor.verify.verdicts import FAILED, MEASURED, NOT_HERE, PASSED, Check
from advisor.words import counted
from cost_models.types import Plan

REFERENCE = "one process alone"
#: Optimizers for scripts that declare none, by the profile's name.
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "rmsprop": "RMSprop", "adagrad": "Adagrad"}
#: Steps before and after the one at which a rank is killed.
_STEPS_AFTER_KILL = 2
_TOO_SHORT = "the script takes 1 optimizer step, and at least 2 can be compared: give it arguments for more after --, such as -- --steps 8"

_OWN_RESTARTS = "an unmodified script resumes by its own code: its counters, the schedules that follow them and what it writes can't be set from outside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all engines of a plan share."""

    facts: Facts
    removed_blocks: tuple[str, ...]
    folder: Path  # for files and records
    num_steps: int
    limit_s: float  # of each cell
    on_gpu: bool
    why_not_comparable: str = ""  # why the numbers of ranks and single process must differ

    @property
    def inp(self) -> EngineInput:
        return self.facts.inp

    @property
    def backend(self) -> str:
        return "nccl" if self.on_gpu else "gloo"


def reference_cell(run: Run) -> dict[str, Any]:
    """The single process."""
    inp, plan = run.inp, run.inp.plan
    kind = _OPTIMIZERS.get(inp.optimizer or inp.meta.optimizer, "AdamW")
    return run_cell(run, REFERENCE) | {
        "alone": True, "optimizer": kind, "micro_batch": plan.micro_batch, "num_micro_batches": plan.dp_degree * plan.num_microbatches,
        "num_data_ranks": plan.dp_degree, "seed": inp.seed, "args": list(inp.script_args), "script_batch": inp.meta.batch_size,
        "batch": plan.global_batch // max(inp.meta.accumulation, 1),
    }  # fmt: skip


def run_cell(run: Run, name: str) -> dict[str, Any]:
    inp = run.inp
    return {
        "name": name, "form": inp.form, "script": inp.script, "entry": build_function(inp), "removed_blocks": list(run.removed_blocks),
        "num_steps": run.num_steps, "limit_s": run.limit_s, "reference": str(run.folder / "reference.npz"), "stop": inp.form == "script",
        "after": "" if name == REFERENCE else REFERENCE,
    }  # fmt: skip


def write_files(engine: Engine, run: Run, advised: EngineInput, plan_folder: Path) -> Check:
    """Check the files that lie in the plan's folder, and write those of the shrunk plan, with the user's changes, into the run's folder."""
    texts = plan_files(dataclasses.replace(advised, engines=(engine.NAME,)), plan_folder.resolve())
    given = json.loads((plan_folder / PLAN_FILE).read_text(encoding="utf8"))["script"]  # as the user wrote it; it stands in comments
    names = _names(engine, texts)
    present = {name: (plan_folder / name).read_text(encoding="utf8") for name in names if (plan_folder / name).is_file()}
    missing = sorted(set(names) - set(present))
    if missing:
        return Check(name="files", status=FAILED, detail=f"{', '.join(missing)} missing in {plan_folder}")
    bare = {name.removeprefix(f"{engine.FOLDER}/" if engine.FOLDER else ""): text for name, text in present.items()}
    problems = engine.validate(bare, dataclasses.replace(advised, folder=advised.folder or str(plan_folder)))
    if problems:
        return Check(name="files", status=FAILED, detail="; ".join(problems))
    target = run.folder / engine.NAME
    write_plan(dataclasses.replace(run.inp, engines=(engine.NAME,)), target)
    carried: list[str] = []
    lost: list[str] = []
    for name, text in present.items():
        if text in {names[name], names[name].replace(advised.script, given)}:
            continue
        fresh = target / name
        merged = carried_over(names[name], text, fresh.read_text(encoding="utf8")) if fresh.is_file() else None
        (lost if merged is None else carried).append(name)
        if merged is not None:
            fresh.write_text(merged, encoding="utf8")
    if lost:
        detail = f"{', '.join(lost)} changed where the plan's size stands; run as the advisor writes it"
        return Check(name="files", status=NOT_HERE, detail=detail)
    return Check(
        name="files", status=PASSED, detail=f"valid; your changes of {', '.join(carried)} are run too" if carried else "valid, unchanged"
    )


def _names(engine: Engine, texts: Mapping[str, str]) -> dict[str, str]:
    """The engine's own files of a plan's folder: Python and configuration, not what starts them."""
    home = f"{engine.FOLDER}/" if engine.FOLDER else ""
    common = {"README.md", "plan.json", "launch.sh"}
    return {name: text for name, text in texts.items() if name.startswith(home) and name not in common and not name.startswith("launch/")}


def engine_cells(engine: Engine, run: Run) -> list[dict[str, Any]]:
    """The run of an engine; then, where its train file writes checkpoints, one that loses a rank and one that goes on."""
    started = starts.start(engine, run.inp, run.folder / engine.NAME, run.num_steps)
    cells = [run_cell(run, engine.NAME) | started]
    if run.inp.form == "functions" and run.inp.plan.world_size > 1 and starts.takes_checkpoints(Path(started["file"])):
        folder = str(run.folder / f"{engine.NAME}-checkpoints")
        args = [*started["args"], "--checkpoint", folder, "--checkpoint-every", "1"]
        lost = {"rank": run.inp.plan.world_size - 1, "step": run.num_steps - _STEPS_AFTER_KILL + 1}
        cells += [
            run_cell(run, _killed(engine)) | started | {"args": args, "kill": lost},
            run_cell(run, _resumed(engine)) | started | {"args": args},
        ]
    return cells


def _killed(engine: Engine) -> str:
    return f"{engine.NAME} losing a rank"


def _resumed(engine: Engine) -> str:
    return f"{engine.NAME} resumed"


def engine_checks(engine: Engine, run: Run, records: Mapping[str, Sequence[compare.Record]], predicted: Prediction | None) -> list[Check]:
    """All checks of an engine's run."""
    ranks, reference, inp = records[engine.NAME], records[REFERENCE][0], run.inp
    wanted, run = run.num_steps, dataclasses.replace(run, num_steps=steps_compared(run.num_steps, reference))
    if not run.num_steps:
        return [Check(name="runs", status=NOT_HERE, detail=_TOO_SHORT)]
    ran = compare.check_runs(ranks, run.num_steps, ends=inp.form == "functions")
    if ran.status != PASSED:
        return [ran]
    if run.num_steps < wanted:
        taken = f"the script takes {counted(run.num_steps + 1, 'step')}, of which {run.num_steps} can be compared"
        ran = dataclasses.replace(ran, detail=f"{counted(len(ranks), 'process')}; {taken}")
    plan = priced_plan(engine, inp.plan)
    return [
        ran, *numbers(run, ranks, reference), compare.check_world(ranks, plan, run.backend),
        compare.check_sharding(ranks, reference, plan, tied_share=tied_share(run.facts)),
        charges.check_collectives(ranks, run.facts.workload, plan, engine=engine.NAME), *_measured(ranks, predicted), *_resume(engine, run, records, reference),
    ]  # fmt: skip


def steps_compared(wanted: int, reference: compare.Record) -> int:
    """All that are wanted, or all but one of those that a shorter script takes: parameters are looked at before the last."""
    return min(wanted, max(len(reference["steps"]) - 1, 0))


def priced_plan(engine: Engine, plan: Plan) -> Plan:
    """The plan with the runtime that this engine is priced by."""
    if not engine.RUNTIMES or plan.runtime in engine.RUNTIMES:
        return plan
    return dataclasses.replace(plan, runtime=engine.RUNTIMES[0])


def numbers(run: Run, ranks: Sequence[compare.Record], reference: compare.Record) -> list[Check]:
    """Losses, gradient norms and parameters against the single process."""
    if run.why_not_comparable:
        names = ("losses", "gradient norms", "final parameters")
        return [Check(name=name, status=NOT_HERE, detail=run.why_not_comparable) for name in names]
    limit = compare.tolerance(run.inp.precision, run.inp.meta.param_dtype)
    return [
        _losses(run, ranks, reference, limit), _norms(run, ranks, reference, limit), compare.check_parameters(ranks, reference, limit),
    ]  # fmt: skip


def _norms(run: Run, ranks: Sequence[compare.Record], reference: compare.Record, limit: compare.Tolerance) -> Check:
    if any(rank.get("hides_gradients") for rank in ranks):
        return Check(name="gradient norms", status=NOT_HERE, detail="DeepSpeed lays gradients that ranks share and others into one tensor")
    tied = run.inp.model.get("tied") or ()
    found, expected = (compare.gradient_norms(one, run.num_steps, tied) for one in (ranks, [reference]))
    return compare.check_series("gradient norms", found, expected, limit.norms, limit.words)


def _losses(run: Run, ranks: Sequence[compare.Record], reference: compare.Record, limit: compare.Tolerance) -> Check:
    """What the train file printed, and what its loss function returned; both must be right where both are there."""
    expected = compare.step_losses([reference], sums=run.inp.form == "script")[: run.num_steps]
    printed = compare.printed_losses(ranks, run.inp.form)[: run.num_steps]
    per_rank = run.inp.plan.num_microbatches
    returned = compare.step_losses(ranks, per_rank=per_rank)[: run.num_steps] if run.inp.form == "functions" else []
    checks = [compare.check_series("losses", found, expected, limit.losses, limit.words) for found in (printed, returned) if found]
    checks = checks or [compare.check_series("losses", [], expected, limit.losses, limit.words)]
    return next((check for check in checks if check.status == FAILED), checks[-1])


def _measured(ranks: Sequence[compare.Record], predicted: Prediction | None) -> list[Check]:
    """Seconds and bytes beside those predicted."""
    times = [step["seconds"] for step in ranks[0]["steps"][1:] if "seconds" in step and not step["counted"]]
    peak = max(rank.get("peak_bytes", 0) for rank in ranks)
    if predicted is None:
        why = "this machine could not be measured, so nothing is predicted"
        return [Check(name=name, status=NOT_HERE, detail=why) for name in ("step time", "peak memory")]
    time_s = min(times, default=0.0)
    timed = Check(name="step time", status=MEASURED, figures={"measured_s": time_s, "predicted_s": predicted.step_time_s},
                  detail=f"{time_s * 1e3:.3g} ms, predicted {predicted.step_time_s * 1e3:.3g} ms: {_ratio(time_s, predicted.step_time_s)}")  # fmt: skip
    return [
        timed if times else Check(name="step time", status=NOT_HERE, detail="the script takes too few steps to time one"),
        Check(name="peak memory", status=MEASURED, figures={"measured_bytes": peak, "predicted_bytes": predicted.memory_bytes},
              detail=f"{peak / 2**20:.3g} MiB, predicted {predicted.memory_bytes / 2**20:.3g} MiB: {_ratio(peak, predicted.memory_bytes)}"),
    ]  # fmt: skip


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f} times" if predicted > 0 else "nothing predicted"


def _resume(engine: Engine, run: Run, records: Mapping[str, Sequence[compare.Record]], reference: compare.Record) -> list[Check]:
    """Whether a run that lost a rank goes on from its last checkpoint with the losses of the single process."""
    if _resumed(engine) not in records:
        form = _OWN_RESTARTS if run.inp.form == "script" else "its train file takes no --checkpoint"
        return [
            Check(name="resume", status=NOT_HERE, detail=form if run.inp.plan.world_size > 1 else "one process alone can't lose a rank")
        ]
    ranks, total = records[_resumed(engine)], run.num_steps + 1
    ran = compare.check_runs(ranks, 0)
    if ran.status != PASSED:
        return [dataclasses.replace(ran, name="resume", detail=f"the second start failed: {ran.detail}")]
    taken = len(ranks[0]["steps"])
    if taken >= total:
        return [Check(name="resume", status=FAILED, detail="it started again from the first step: no checkpoint was found")]
    limit = compare.tolerance(run.inp.precision, run.inp.meta.param_dtype)
    expected = compare.step_losses([reference])[total - taken : total]
    found = compare.step_losses(ranks, per_rank=run.inp.plan.num_microbatches)
    check = compare.check_series("resume", found, expected, limit.losses, limit.words)
    if check.status == PASSED:
        lost = f"rank {run.inp.plan.world_size - 1} killed after {counted(run.num_steps - _STEPS_AFTER_KILL + 1, 'step')}"
        check = dataclasses.replace(check, detail=f"{lost}, resumed at step {total - taken}; {check.detail}")
    return [check]


def comparable(inp: EngineInput) -> str:
    """Why ranks can't compute what a single process computes; "" where they must."""
    from advisor.engines.checks import draws, normalizes_batches

    if inp.form == "functions":
        return ""
    facts = read_script(Path(inp.script))
    if "DataLoader" not in facts.names and draws(facts):
        return "the script draws its own batches, differently on each rank"
    if normalizes_batches(inp) and inp.plan.dp_degree > 1:
        return "batch normalization sees a micro-batch on each rank and the whole batch in the script alone"
    return ""


def tied_share(facts: Facts) -> float:
    """Share of the parameters that a pipeline's two ends each hold a copy of."""
    return facts.workload.tied_params / max(facts.workload.num_params, 1.0)
