"""Joins the stages' values: from a profile and options to a situation, from a search's result to a report."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cost_models
from advisor import emulation
from advisor.errors import AdvisorError, NoPlanError
from advisor.options import PlanOptions, ProfileOptions
from advisor.search import Request, SearchResult, Size, Space, fewest_gpus, price, scaling, search, sizes_around
from advisor.sections import (
    accuracy_section,
    inputs_section,
    memory_section,
    plan_entries,
    profile_section,
    rejected_entries,
    scaling_points,
    smallest_sizes,
)
from cost_models.types import Cluster, Plan, Workload

if TYPE_CHECKING:
    from advisor.profiling.schema import StepProfile
    from advisor.report.report import Report

#: How far beyond the asked cluster the report looks for scaling and for what would fit.
_SCALE_FACTOR, _MOST_GPUS = 8, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Profile, workload and cluster, with everything that was assumed on the way."""

    step: StepProfile
    workload: Workload
    model: dict[str, Any]  # report.json's "model"
    stages: Callable[[Plan], dict[str, Any]]  # what a plan's pipeline adds to it for the engines
    options: PlanOptions
    request: Request
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...] = ()  # what must not be overlooked

    @property
    def cluster(self) -> Cluster:
        return self.request.cluster

    def in_precision(self, precision: str) -> Workload:
        """The workload in another precision than asked for."""
        from advisor.workload import shape

        return shape(self.step, precision=precision, optimizer=self.options.optimizer)


def check_cluster(options: PlanOptions) -> None:
    """Raise early, before the script is run, on hardware that doesn't exist or lacks the precision asked for."""
    emulation.check_precision(_cluster(options)[0].device, options.precision)


def situation(step: StepProfile, options: PlanOptions, progress: Callable[[str], None]) -> Situation:
    """Shape the workload, resolve (and where it is this machine, measure) the cluster, fix the global batch."""
    from advisor.measure.here import is_here, with_measurements
    from advisor.workload import model_summary, shape

    cluster, assumptions = _cluster(options)
    warnings: tuple[str, ...] = ()
    if options.gpu is None and options.cluster is None and not is_here(None, None):
        warnings, assumptions = (f"Assumed cluster: {assumptions[0]}.",), assumptions[1:]
    if is_here(options.gpu, options.cluster):
        progress("measuring this machine's device")
        cluster, notes = with_measurements(cluster, progress)
        assumptions = (*assumptions, *notes)
    workload = shape(step, precision=options.precision, optimizer=options.optimizer)
    model = model_summary(step, workload)
    emulation.check_precision(cluster.device, workload.compute_dtype)
    batch, notes = _global_batch(step, options, cluster)
    assumptions = (*assumptions, *notes)
    stages = _stages(step, workload)
    request = Request(
        workload=workload, cluster=cluster, global_batch=batch, objective=options.objective,
        max_memory_share=options.max_memory_share, calibration=read_calibration(options.calibration),
        space=Space(accumulation=max(1, step.meta.accumulation) if step.meta.form == "script" else 1),
        tp_reason=model["tp_reason"], pp_reason=model["pp_reason"], why_no_files=_why_no_files(model, stages, options),
    )  # fmt: skip
    return Situation(
        step=step,
        workload=workload,
        model=model,
        stages=stages,
        options=options,
        request=request,
        assumptions=assumptions,
        warnings=warnings,
    )


def _why_no_files(model: dict[str, Any], stages: Callable[[Plan], dict[str, Any]], options: PlanOptions) -> Callable[[Plan], str]:
    """Asks the engines, of those wanted, why none has files for a plan."""
    from advisor.engines import why_no_engine

    return lambda plan: why_no_engine(plan, {**model, **stages(plan)}, wanted=options.engine)


def _stages(step: StepProfile, workload: Workload) -> Callable[[Plan], dict[str, Any]]:
    """What a plan's pipeline adds to the model that the engines see: the modules of each stage, as the plan's price has them."""
    from advisor.workload.layout import find_layout
    from advisor.workload.stages import stage_modules

    found: dict[tuple[int, int, str], list[list[str]]] = {}
    parts = find_layout(step).parts

    def stages(plan: Plan) -> dict[str, Any]:
        if plan.pp_degree == 1:
            return {}
        key = (plan.pp_degree, plan.virtual_stages, plan.runtime)
        if key not in found:
            found[key] = stage_modules(step, workload, plan, parts)
        return {"stages": found[key]}

    return stages


def _cluster(options: PlanOptions) -> tuple[Cluster, tuple[str, ...]]:
    from advisor.measure.cluster import resolve_cluster

    return resolve_cluster(
        gpu=options.gpu, gpus_per_node=options.gpus_per_node, nodes=options.nodes, intra=options.intra, inter=options.inter,
        file=options.cluster,
    )  # fmt: skip


def _global_batch(step: StepProfile, options: PlanOptions, cluster: Cluster) -> tuple[int, tuple[str, ...]]:
    """Samples per optimizer step: as given, else the script's own on each GPU, which is then an assumption."""
    if options.global_batch is not None:
        return options.global_batch, ()
    meta = step.meta
    batch = meta.batch_size * meta.accumulation * cluster.num_gpus
    if batch < 1:
        raise AdvisorError("The step that was seen had an empty batch.", hint="Give the script data, or a --global-batch.")
    own = f"the script's own {meta.batch_size}" + (f", {meta.accumulation} times accumulated," if meta.accumulation > 1 else "")
    where = f"on each of {cluster.num_gpus:,} GPUs" if cluster.num_gpus > 1 else "on the one GPU"
    return batch, (f"global batch {batch:,}: {own} {where} (--global-batch says otherwise)",)


def read_calibration(path: str | None) -> cost_models.Calibration:
    """A calibration file, or the shipped one.

    Raises:
        AdvisorError: the file is none.
    """
    try:
        return cost_models.load_calibration(path)
    except (OSError, ValueError) as error:
        why = str(error).removeprefix(f"{path} is not a calibration file: ")
        raise AdvisorError(f"{path} is no calibration ({why}).", hint="Make one with `advise calibrate RUNS.csv -o FILE`.") from error


def searched(case: Situation) -> SearchResult:
    """The search the options ask for; with the objective "gpus", on the fewest GPUs that fit."""
    if case.options.objective != "gpus":
        return search(case.request)
    size = fewest_gpus(case.request, most=case.cluster.num_gpus)
    if size is None or size.best is None:
        return search(case.request)
    from advisor.search import resized

    return search(dataclasses.replace(case.request, cluster=resized(case.cluster, size.num_gpus)))


def no_plan(case: Situation, result: SearchResult) -> NoPlanError:
    """The error that says by how much nothing fits, and what would."""
    cluster, batch = case.cluster, case.request.global_batch
    where = f"{cluster.num_gpus} x {cluster.device.name}"
    sized = [r for r in result.rejected if r.needed_bytes is not None]
    if not sized:
        why = "; ".join(f"{r.reason}" for r in result.rejected[:1]) or f"{batch} samples don't divide"
        return NoPlanError(f"No legal plan for {where}: {why}.", hint=f"Give a --global-batch that {cluster.num_gpus} divides.")
    closest = min(sized, key=lambda r: r.needed_bytes or 0.0)
    needed, have = (closest.needed_bytes or 0.0) / 2**30, (closest.available_bytes or 0.0) / 2**30
    hint = _what_would_fit(case)
    return NoPlanError(
        f"No plan fits {where}: the smallest, {closest.plan.label()}, needs {needed:.3g} GiB a GPU and {have:.3g} GiB are available "
        f"({needed - have:.3g} GiB too much).",
        hint=hint,
    )


def _what_would_fit(case: Situation) -> str:
    size = fewest_gpus(case.request, most=_MOST_GPUS)
    if size and size.best:
        gib = size.best.estimate["high_memory_bytes"] / 2**30
        return f"{size.num_gpus} of these GPUs would do: {size.best.plan.label()} at {gib:.3g} GiB a GPU."
    return f"Not even {_MOST_GPUS} of these GPUs would do: take GPUs with more memory, a smaller batch or shorter sequences."


def report(
    case: Situation, result: SearchResult, seeing: ProfileOptions, out: Path | None
) -> tuple[Report, Callable[[Path], Sequence[str]]]:
    """The report, and what writes the files of its first plans into a folder."""
    from advisor.classify.hotspots import hotspots
    from advisor.measure.cluster import cluster_mapping
    from advisor.report.report import Report
    from advisor.rulebook import collect_facts, evaluate, load_rules

    spots = hotspots(case.step, case.workload, case.cluster, case.request.calibration)
    facts = collect_facts(meta=case.step.meta, hotspots=spots, workload=case.workload, cluster=case.cluster, result=result)
    alone = price(case.request, Plan(micro_batch=case.workload.traced_batch, runtime="torch-ddp"))
    files = _PlanFiles(case=case, result=result, seeing=seeing, out=out)
    sizes = _sizes(case)
    built = Report(
        inputs=inputs_section(case.step, case.options, case.request.global_batch),
        model=case.model,
        profile=profile_section(case.step),
        hotspots=spots,
        memory=memory_section(alone, case.step, case.cluster),
        cluster=cluster_mapping(case.cluster),
        plans=plan_entries(case.request, result, files.starts(), files.why_no_launch(), files.check_lines()),
        rejected=rejected_entries(result),
        findings=evaluate(load_rules(), facts),
        scaling=scaling_points(sizes),
        smallest_num_gpus=smallest_sizes(sizes),
        accuracy=accuracy_section(case.request.calibration, case.options.calibration),
        assumptions=(*case.assumptions, *result.notes),
        warnings=(*case.warnings, *emulation.warning(case.request, result, case.in_precision), *case.step.meta.warnings),
        operators=case.step.operators,
    )
    return built, files.write


def _sizes(case: Situation) -> tuple[Size, ...]:
    most = min(_MOST_GPUS, max(case.cluster.num_gpus * _SCALE_FACTOR, case.cluster.gpus_per_node))
    return scaling(case.request, sizes_around(case.cluster, most=most))


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanFiles:
    """Writes the engines' files of the first plans."""

    case: Situation
    result: SearchResult
    seeing: ProfileOptions
    out: Path | None

    def _input(self, rank: int) -> Any:
        from advisor.engines import EngineInput

        case, plan = self.case, self.result.candidates[rank - 1].plan
        return EngineInput(
            plan=plan, script=case.step.meta.script, script_args=tuple(self.seeing.args), form=case.step.meta.form,
            entry=case.step.meta.entry, meta=case.step.meta, model={**case.model, **case.stages(plan)},
            num_nodes=max(1, plan.world_size // case.cluster.gpus_per_node),
            gpus_per_node=min(case.cluster.gpus_per_node, plan.world_size), gpu=case.cluster.device.name, precision=case.workload.compute_dtype,
            folder=str((self.out or Path("advice")) / f"plan-{rank}"), engines=tuple(case.options.engine),
        )  # fmt: skip

    def _inputs(self) -> dict[int, Any]:
        """Engine inputs by rank: the best plans that some engine, of those wanted, has files for."""
        able = [rank for rank, c in enumerate(self.result.candidates, start=1) if not c.no_files]
        return {rank: self._input(rank) for rank in able[: self.case.options.plans]}

    def why_no_launch(self) -> str:
        """Why the first plan can't be launched by a file written here; empty where it can."""
        from advisor.engines import why_no_files

        return why_no_files(self._input(1))

    def starts(self) -> dict[int, dict[str, str]]:
        """The command lines by engine of each plan with files, by rank; paths as the user will see them."""
        from advisor.engines import start_lines

        out = self.out or Path("advice")
        return {rank: start_lines(inp, out / f"plan-{rank}") for rank, inp in self._inputs().items()}

    def check_lines(self) -> dict[int, str]:
        """The command that runs a plan's files on a few processes here, by rank, where something can be launched."""
        out = shlex.quote(str(self.out or Path("advice")))
        return {rank: f"advise verify {out} --plan {rank}" for rank, lines in self.starts().items() if lines}

    def write(self, folder: Path) -> list[str]:
        """Write `plan-1/` and so on below a folder; names relative to it."""
        from advisor.engines import write_plan

        names: list[str] = []
        for rank, inp in self._inputs().items():
            names += [f"plan-{rank}/{name}" for name in write_plan(inp, folder / f"plan-{rank}")]
        return names
