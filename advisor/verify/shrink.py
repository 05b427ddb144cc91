"""How a plan for many GPUs becomes one for a few local processes: every kind of parallelism stays as long as there are processes for it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cost_models.types import Plan

#: Degrees in the order in which they are kept, and what they are called.
_KINDS = (
    ("pp_degree", "pipeline stages"), ("tp_degree", "tensor parallelism"), ("dp_shard_degree", "sharding"),
    ("dp_replicate_degree", "replicas"), ("cp_degree", "context parallelism"), ("ep_degree", "expert parallelism"),
)  # fmt: skip
#: Most processes taken without being asked.
_USUAL_PROCESSES = 4
#: Samples of a micro-batch: enough for batch normalization to be well conditioned.
_MICRO_BATCH, _NORMALIZED_MICRO_BATCH = 2, 8
_LEAST_BLOCKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """A plan that fits a few processes, and what is cut from the model."""

    plan: Plan
    removed_blocks: tuple[str, ...] = ()  # module paths
    changes: tuple[str, ...] = ()  # in words


def usual_processes(plan: Plan, most: int = _USUAL_PROCESSES) -> int:
    """Processes that hold every kind of parallelism of the plan twice, as far as `most` allows."""
    kinds = sum(getattr(plan, name) > 1 for name, _ in _KINDS)
    return min(2 ** max(kinds, 1), most, plan.world_size) if plan.world_size > 1 else 1


def shrink_plan(plan: Plan, num_processes: int, *, accumulation: int = 1, keeps_batch: bool = False, normalizes: bool = False) -> Plan:
    """The plan on at most `num_processes`.

    Args:
        plan: as it was advised.
        num_processes: at most so many.
        accumulation: backward passes of the script itself per optimizer step; micro-batches stay a multiple of them.
        keeps_batch: the script draws batches of its own size, so the micro-batch must stay.
        normalizes: the model has batch normalization.
    """
    degrees = _degrees(plan, num_processes)
    shards = degrees["dp_shard_degree"] > 1
    small = dataclasses.replace(
        plan, **degrees, zero_stage=plan.zero_stage if shards or plan.dp_shard_degree == 1 else 0,
        virtual_stages=min(plan.virtual_stages, 2) if degrees["pp_degree"] > 1 else 1,
        schedule=plan.schedule if degrees["pp_degree"] > 1 else "none",
        sequence_parallel=plan.sequence_parallel and degrees["tp_degree"] > 1,
        micro_batch=plan.micro_batch if keeps_batch else min(plan.micro_batch, _NORMALIZED_MICRO_BATCH if normalizes else _MICRO_BATCH),
    )  # fmt: skip
    least = 2 * small.pp_degree if small.pp_degree > 1 else 2
    turns = min(max(plan.num_microbatches // accumulation, 1), least)
    if small.pp_degree > 1:
        turns = max(turns // small.pp_degree, 1) * small.pp_degree
    return dataclasses.replace(small, num_microbatches=turns * accumulation)


def _degrees(plan: Plan, num_processes: int) -> dict[str, Any]:
    """Each kind at its smallest factor while processes are left, then data parallelism with what remains."""
    left = num_processes
    degrees: dict[str, Any] = dict.fromkeys((name for name, _ in _KINDS), 1)
    for name, _ in _KINDS:
        wanted = getattr(plan, name)
        least = _smallest_factor(wanted)
        if wanted > 1 and least <= left:
            degrees[name] = least
            left //= least
    for name in ("dp_shard_degree", "dp_replicate_degree"):
        while degrees[name] > 1 and left >= 2 and degrees[name] * 2 <= getattr(plan, name):
            degrees[name] *= 2
            left //= 2
    return degrees


def _smallest_factor(degree: int) -> int:
    return next((k for k in range(2, degree + 1) if degree % k == 0), 1)


def shrink(plan: Plan, model: Mapping[str, Any], num_processes: int, *, can_cut: bool, **how: Any) -> Shrunk:
    """The plan on at most `num_processes`, and the blocks that can go.

    Args:
        plan: as it was advised.
        model: the report's "model".
        num_processes: at most so many.
        can_cut: layers may be taken out (the functions form).
        **how: further arguments of `shrink_plan`.
    """
    small = shrink_plan(plan, num_processes, **how)
    removed = _removed(model, max(_LEAST_BLOCKS, small.pp_degree * small.virtual_stages)) if can_cut else ()
    return Shrunk(plan=small, removed_blocks=removed, changes=tuple(_changes(plan, small, model, removed)))


def _removed(model: Mapping[str, Any], num_kept: int) -> tuple[str, ...]:
    """Blocks behind the first `num_kept` of each run of equal ones."""
    removed: list[str] = []
    paths = [str(path) for path in model.get("block_paths") or ()]
    for group in model.get("layer_groups") or ():
        name, repeats = str(group["name"]), int(group["num_repeats"])
        run = [path for path in paths if re.fullmatch(re.escape(name).replace(r"\*", r"\d+"), path)]
        if name.endswith(".*") and repeats > 1:
            kept = max(num_kept, len(run) - repeats + 1)
            removed += run[kept:]
    return tuple(removed)


def _changes(plan: Plan, small: Plan, model: Mapping[str, Any], removed: tuple[str, ...]) -> list[str]:
    found = []
    for name, words in _KINDS:
        before, after = getattr(plan, name), getattr(small, name)
        if after == 1 < before:
            found.append(f"{words} {before} left out: too few processes")
        elif after != before:
            found.append(f"{words} {before} -> {after}")
    for name, words in (
        ("virtual_stages", "chunks per stage"),
        ("micro_batch", "micro-batch"),
        ("num_microbatches", "micro-batches per step"),
    ):
        before, after = getattr(plan, name), getattr(small, name)
        if before != after:
            found.append(f"{words} {before} -> {after}")
    if removed:
        total = len(model["block_paths"])
        found.append(f"layers {total} -> {total - len(removed)}")
    return found
