"""The collectives that a run was seen to make, held against those that its plan was priced by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from advisor.verify.verdicts import FAILED, MEASURED, NOT_HERE, PASSED, Check
from cost_models.collectives import charged
from cost_models.types import Plan, Workload

#: All-reduces of losses, norms and counters are smaller than any gradient bucket.
_BOOKKEEPING_BYTES = 64
#: Bytes and calls may be this far off; more by what stands once at the ends of a model, which weighs more where layers are few.
_SHARE, _SHARE_OF_A_LAYER = 0.05, 0.5
#: Calls that buffers of a second dtype take (batch normalization counts batches in integers); their bytes are charged.
_MORE_BROADCASTS = 1
#: Engines whose collectives are PyTorch's own and priced one by one. The others choose theirs by backend and size.
_EXACT = ("ddp", "fsdp2", "tensor_parallel", "pipeline")

_WHY_NOT_ENGINE = "this engine chooses its collectives by backend and size"
_WHY_NOT_UNITS = "without repeated layers the price takes every module for a sharding unit"

Totals = dict[tuple[str, int], tuple[float, float]]  # calls and bytes by kind and group size


def seen(rank: Mapping[str, Any]) -> Totals:
    """Calls and bytes of one rank's step, without bookkeeping."""
    found: Totals = defaultdict(lambda: (0.0, 0.0))
    for row in rank.get("collectives") or ():
        if row["ranks"] > 1 and (row["kind"] != "all-reduce" or row["bytes"] > _BOOKKEEPING_BYTES):
            key = row["kind"], _group_size(row["kind"], row["ranks"])
            found[key] = (found[key][0] + row["count"], found[key][1] + row["count"] * row["bytes"])
    return dict(found)


def priced(workload: Workload, plan: Plan, stage: int | None = None) -> Totals:
    """What the cost model charges one rank of a pipeline stage (the fullest by default) for a step."""
    found: Totals = defaultdict(lambda: (0.0, 0.0))
    for charge in charged(workload, plan, stage=stage):
        key = charge.kind, _group_size(charge.kind, charge.ranks)
        found[key] = (found[key][0] + charge.count, found[key][1] + charge.bytes)
    return dict(found)


def _group_size(kind: str, num_ranks: int) -> int:
    """A message goes from one rank to another, whichever group it is sent in."""
    return 2 if kind == "send" else num_ranks


def check_collectives(ranks: Sequence[Mapping[str, Any]], workload: Workload, plan: Plan, *, engine: str) -> Check:
    """Kind, group size, calls and bytes of a step on rank 0 against what its pipeline stage is charged.

    What is charged and not made, or made less or more of, fails; what is made beside it is said. Engines that choose their collectives by
    backend and size are only measured, and so are the sharding units of a model without repeated layers.
    """
    if not any("collectives" in rank for rank in ranks):
        return Check(name="collectives", status=NOT_HERE, detail="the run ended before they could be counted")
    found, expected = seen(ranks[0]), priced(workload, plan, 0 if plan.pp_degree > 1 else None)
    num_layers = sum(group.num_repeats for group in workload.groups if group.can_recompute)
    # without repeated layers FSDP's units are modules of many parameters, and priced as if they were layers
    exact = engine in _EXACT and (num_layers > 0 or plan.zero_stage < 2)
    problems = [text for key in expected if (text := _problem(key, found.get(key), expected[key], max(num_layers, 1)))]
    extra = [f"{found[key][0]:.0f} {_name(key)} ({_size(found[key][1])})" for key in found if key not in expected]
    figures = {
        _name(key): {"seen": list(found.get(key, ())), "charged": list(expected.get(key, ()))} for key in sorted({*found, *expected})
    }
    made = ", ".join(f"{found[key][0]:.0f} {key[0]} ({_size(found[key][1])})" for key in expected if key in found)
    text = "; ".join(problems) or made or "none charged"
    text += f"; not charged: {', '.join(extra)}" if extra else ""
    if problems and not exact:
        text += f"; not judged: {_WHY_NOT_UNITS if engine in _EXACT else _WHY_NOT_ENGINE}"
    status = PASSED if not problems else FAILED if exact else MEASURED
    return Check(name="collectives", status=status, detail=text, figures=figures)


def _problem(key: tuple[str, int], found: tuple[float, float] | None, expected: tuple[float, float], num_layers: int) -> str:
    if found is None:
        return f"{expected[0]:.0f} {_name(key)} ({_size(expected[1])}) charged, none seen"
    most = 1 + _SHARE + _SHARE_OF_A_LAYER / num_layers
    more = (_MORE_BROADCASTS if key[0] == "broadcast" else 0, 0)
    if all((1 - _SHARE) * e <= f <= most * e + m for f, e, m in zip(found, expected, more, strict=True)):
        return ""
    return f"{found[0]:.0f} {_name(key)} of {_size(found[1])} where {expected[0]:.0f} of {_size(expected[1])} were charged"


def _name(key: tuple[str, int]) -> str:
    return key[0] if key[0] == "send" else f"{key[0]} among {key[1]}"


def _size(num_bytes: float) -> str:
    if num_bytes < 2**10:
        return f"{num_bytes:.0f} B"
    return f"{num_bytes / 2**20:.3g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.3g} KiB"
