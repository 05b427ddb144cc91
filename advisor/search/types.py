"""What a search returns: priced candidates in order, and what was rejected with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cost_models.types import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A legal plan that fits, with its price (floats of cost_models.types.Estimates at this plan)."""

    plan: Plan
    estimate: Mapping[str, float]  # step_time_s low_s high_s peak_memory_bytes allocated_... high_memory_bytes load_... save_... mfu
    breakdown_s: Mapping[str, float]
    breakdown_bytes: Mapping[str, float]
    reasons: tuple[str, ...] = ()  # binding term against the best plan, first
    no_files: str = ""  # clause on why no engine has files for it; "" where one has


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A plan that was not taken. Bytes are None where memory is not the reason."""

    plan: Plan
    reason: str
    needed_bytes: float | None = None
    available_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    candidates: tuple[Candidate, ...]  # best first, distinct strategies (not 50 neighbours of one plan)
    rejected: tuple[Rejected, ...]  # one per strategy family that has no candidate (DDP, ZeRO-1..3, TP, PP, offload)
    num_priced: int
    search_time_s: float
    notes: tuple[str, ...] = ()  # e.g. 'tensor parallelism left out: no column/row pairs in "UNet"'
