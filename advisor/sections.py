"""Sections of the report made from the stages' values: plain mappings with units in their names."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from advisor.options import PlanOptions
from advisor.report.report import PlanEntry, RejectedEntry, ScalingPoint
from advisor.search import Candidate, Request, SearchResult, Size

if TYPE_CHECKING:
    import cost_models
    from advisor.profiling.schema import StepProfile
    from cost_models.types import Cluster, Plan

#: Parts of a step that are communication on the critical path.
COMMUNICATION = ("tp_communication", "pipeline_p2p", "dp_communication", "fsdp_communication")


def inputs_section(step: StepProfile, options: PlanOptions, global_batch: int) -> dict[str, Any]:
    """What was asked, by which versions, when."""
    asked = {k: v for k, v in dataclasses.asdict(options).items() if v is not None}
    return {
        "script": step.meta.script,
        "entry": step.meta.entry,
        "form": step.meta.form,
        "options": asked,
        "global_batch": global_batch,
        "objective": options.objective,
        "max_memory_share": options.max_memory_share,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"parallel-advisor": _version(), "python": platform.python_version(), **step.meta.versions},
    }


def _version() -> str:
    try:
        return importlib.metadata.version("parallel-advisor")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def profile_section(step: StepProfile) -> dict[str, Any]:
    """Where the step's numbers come from."""
    meta = step.meta
    return {
        "source": meta.source, "device": meta.device, "framework": meta.framework, "step_time_s": meta.step_time_s, "idle_s": meta.idle_s,
        "peak_memory_bytes": meta.peak_memory_bytes, "saved_bytes": meta.saved_bytes, "accumulation": meta.accumulation,
        "num_operators": len(step.operators), "flops": float(step.operators["flops"].sum()), "hazards": list(meta.hazards),
    }  # fmt: skip


def memory_section(alone: Candidate, step: StepProfile, cluster: Cluster) -> dict[str, Any]:
    """Peak memory of the script as it is on one GPU, without any parallelism; parts sum to the peak."""
    parts = {f"{name}_bytes": value for name, value in alone.breakdown_bytes.items()}
    return {
        "peak_memory_bytes": alone.estimate["peak_memory_bytes"], "high_memory_bytes": alone.estimate["high_memory_bytes"],
        "load_memory_bytes": alone.estimate["load_memory_bytes"], "save_memory_bytes": alone.estimate["save_memory_bytes"],
        "device_memory_bytes": cluster.device.memory_bytes, "micro_batch": alone.plan.micro_batch, "measured_bytes": step.meta.peak_memory_bytes,
        "breakdown_bytes": dict(alone.breakdown_bytes), **parts,
    }  # fmt: skip


def plan_entries(
    request: Request, result: SearchResult, starts: Mapping[int, Mapping[str, str]], why_no_launch: str, check_lines: Mapping[int, str]
) -> tuple[PlanEntry, ...]:
    """Ranked plans.

    Args:
        request: what was asked.
        result: what was found.
        starts: by rank of each plan with files, the commands that start it by engine, the one it was priced for first.
        why_no_launch: a sentence on why nothing starts the first plan; empty where something does.
        check_lines: by rank, the command that checks a plan.
    """
    silent = _what_to_do_instead(result, starts, why_no_launch)
    return tuple(
        PlanEntry(
            rank=i,
            label=c.plan.label(),
            plan=plan_mapping(c.plan),
            estimate=estimate_mapping(c, request),
            reasons=(*c.reasons, *(silent if i == 1 else [])),
            folder=f"plan-{i}" if i in starts else "",
            check=check_lines.get(i, ""),
            no_files=c.no_files,
            **_launches(starts.get(i, {})),
        )
        for i, c in enumerate(result.candidates, start=1)
    )


def _launches(starts: Mapping[str, str]) -> dict[str, str]:
    """The line to paste, what it needs beside PyTorch, and if it needs something the line of an engine that doesn't."""
    from advisor.engines.launch import PACKAGES

    engine = next(iter(starts), "")
    needs = PACKAGES.get(engine, "")
    plain = next((line for name, line in starts.items() if name not in PACKAGES), "") if needs else ""
    return {"launch": starts.get(engine, ""), "launch_needs": needs, "launch_plain": plain}


def _what_to_do_instead(result: SearchResult, starts: Mapping[int, Mapping[str, str]], why_no_launch: str) -> list[str]:
    """Sentences for a first plan that nothing starts."""
    if not why_no_launch:
        return []
    own = " Its files are for your own loop, and plan-1/README.md says how." if not result.candidates[0].no_files else ""
    first = min((rank for rank, lines in starts.items() if lines), default=None)
    return [why_no_launch + own + (f" Plan {first} is the best one that starts as it is." if first else "")]


def plan_mapping(plan: Plan) -> dict[str, Any]:
    """The fields of a plan, with its world size and global batch."""
    return {**dataclasses.asdict(plan), "world_size": plan.world_size, "global_batch": plan.global_batch}


def estimate_mapping(candidate: Candidate, request: Request) -> dict[str, Any]:
    """Price of a plan, with rates that follow from it."""
    step_s, workload = candidate.estimate["step_time_s"], request.workload
    samples_per_s = candidate.plan.global_batch / step_s
    exposed = sum(candidate.breakdown_s.get(name, 0.0) for name in COMMUNICATION)
    return {
        **candidate.estimate,
        "samples_per_s": samples_per_s,
        "tokens_per_s": samples_per_s * workload.tokens_per_sample if workload.sample_unit == "tokens" else None,
        "communication_share": exposed / step_s,
        "available_bytes": request.available_bytes,
        "breakdown_s": dict(candidate.breakdown_s),
        "breakdown_bytes": dict(candidate.breakdown_bytes),
    }


def rejected_entries(result: SearchResult) -> tuple[RejectedEntry, ...]:
    """What can't be had, and why."""
    return tuple(
        RejectedEntry(
            label=r.plan.label(), plan=plan_mapping(r.plan), reason=r.reason, needed_bytes=r.needed_bytes, available_bytes=r.available_bytes
        )
        for r in result.rejected
    )


def scaling_points(sizes: Sequence[Size]) -> tuple[ScalingPoint, ...]:
    """The best plan of each cluster size, or how far the closest one is over."""
    return tuple(_point(size) for size in sizes)


def smallest_sizes(sizes: Sequence[Size]) -> dict[str, int | None]:
    """Fewest GPUs, of the sizes looked at, on which each strategy fits."""
    smallest: dict[str, int | None] = {}
    for size in sorted(sizes, key=lambda s: s.num_gpus):
        for name in size.families:
            alone = "single GPU + offload" if name.endswith("+ offload") else "single GPU"
            smallest.setdefault(alone if size.num_gpus == 1 else name, size.num_gpus)
    return smallest


def _point(size: Size) -> ScalingPoint:
    if size.best is None:
        closest = size.closest
        over = (closest.needed_bytes or 0.0) - (closest.available_bytes or 0.0) if closest else None
        return ScalingPoint(
            num_gpus=size.num_gpus, label=closest.plan.label() if closest else "", step_time_s=None, low_s=None, high_s=None,
            samples_per_s=None, peak_memory_bytes=closest.needed_bytes if closest else None, short_by_bytes=over,
        )  # fmt: skip
    price = size.best.estimate
    return ScalingPoint(
        num_gpus=size.num_gpus, label=size.best.plan.label(), step_time_s=price["step_time_s"], low_s=price["low_s"], high_s=price["high_s"],
        samples_per_s=size.best.plan.global_batch / price["step_time_s"], peak_memory_bytes=price["peak_memory_bytes"], short_by_bytes=None,
    )  # fmt: skip


def accuracy_section(calibration: cost_models.Calibration | None, file: str | None) -> Mapping[str, Any]:
    """How wrong the prices are, on measured runs that the fit had not seen; `file` is the user's calibration, where one was given."""
    if calibration is None:
        return {}
    named = {"file": str(file)} if file else {}
    return {"calibration": calibration.name, **named, **calibration.data, **calibration.error, **calibration.interval}
