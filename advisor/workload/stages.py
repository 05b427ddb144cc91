"""Which modules a plan puts on which pipeline stage: the cut that the plan's price is based on, by module names."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.profiling.schema import StepProfile
from advisor.workload.assign import Part
from advisor.workload.layout import find_layout
from cost_models.stages import stage_split
from cost_models.traits import load_runtime
from cost_models.types import Plan, Workload


def stage_modules(profile: StepProfile, workload: Workload, plan: Plan, parts: Sequence[Part] | None = None) -> list[list[str]]:
    """Module paths of each stage in execution order; interleaved plans have `pp_degree * virtual_stages` of them, dealt out in turn.

    Args:
        profile: the step.
        workload: what `shape` made of it.
        plan: with its degrees and its runtime, which says how layers are cut.
        parts: of the profile's layout, where they are known from another plan.

    Returns:
        Paths of modules, and names of parameters that belong to none of them.

    Raises:
        ValueError: the workload isn't the profile's.
    """
    parts = find_layout(profile).parts if parts is None else parts
    if len(parts) != len(workload.groups):
        raise ValueError(f"the profile has {len(parts)} parts, the workload {len(workload.groups)}")
    split = stage_split(workload, plan.pp_degree * plan.virtual_stages, cut=load_runtime(plan.runtime).pipeline_cut)
    pieces = [iter(_pieces(part)) for part in parts]
    return [
        [name for held, times in zip(pieces, counts, strict=True) for _ in range(times) for name in next(held)] for counts in split.counts
    ]


def _pieces(part: Part) -> list[list[str]]:
    """Names of each repeat of a part; what lies in no unit is with the first."""
    found = [[unit.path for unit in repeat if unit.path] for repeat in part.segment.repeats]
    units = [path for paths in found for path in paths]
    loose = [p.name for p in part.parameters if not any(p.name.startswith(f"{path}.") for path in units)]
    return [loose + found[0], *found[1:]]
