"""What the ranks left, held against the single process and against the plan: one Check per question."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from advisor.verify import shares
from advisor.verify.verdicts import FAILED, NOT_HERE, PASSED, Check
from advisor.words import counted
from cost_models.types import Plan

Record = Mapping[str, Any]
#: Losses over the global batch that train files print after each step, by form of script; a script prints its own as it likes.
_PRINTED = {
    "functions": re.compile(r"^step \d+ loss (\S+)", re.MULTILINE),
    "script": re.compile(r"optimizer step \d+: loss (\S+) over the global batch"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest relative difference that is still called equal."""

    losses: float
    norms: float
    parameters: float
    each_parameter: bool  # compare every parameter by itself, not all together
    words: str


_FP32 = Tolerance(losses=1e-4, norms=1e-4, parameters=1e-4, each_parameter=True, words="within 1e-4")
#: 16 bits round to 2^-8 (bf16), and Adam turns the sign of a rounded small gradient into a whole step.
_HALF = Tolerance(losses=2e-2, norms=1e-1, parameters=2e-2, each_parameter=False, words="within 2e-2, 16 bits against fp32")


def tolerance(precision: str, param_dtype: str) -> Tolerance:
    """By the precision of the products and of the script's own weights."""
    return _HALF if precision in {"bf16", "fp16", "fp8"} or param_dtype in {"bf16", "fp16"} else _FP32


def check_runs(ranks: Sequence[Record], num_steps: int, *, ends: bool = True) -> Check:
    """Whether every rank ended well and took the steps asked for."""
    broken = [i for i, rank in enumerate(ranks) if rank["code"]]
    first = next((i for i in broken if "another rank" not in (ranks[i].get("reason") or "")), None)
    if broken:
        rank = ranks[first if first is not None else broken[0]]
        return Check(name="runs", status=FAILED, detail=f"rank {first if first is not None else broken[0]} {why_ended(rank)}")
    short = [len(rank["steps"]) for rank in ranks if len(rank["steps"]) < num_steps + 1]
    if short:
        return Check(
            name="runs",
            status=FAILED if ends else NOT_HERE,
            detail=f"took {counted(min(short), 'optimizer step')} where {num_steps + 1} were wanted",
        )
    return Check(name="runs", status=PASSED, detail=f"{counted(len(ranks), 'process')}, {counted(num_steps, 'step')} and one more")


def why_ended(rank: Record) -> str:
    """What ended a rank, and the last line that it printed."""
    lines = [line.strip() for line in str(rank.get("output", "")).splitlines() if line.strip()]
    said = f": {lines[-1][:300]}" if lines else ""
    reason = rank.get("reason") or f"ended with status {rank['code']}"
    return f"{reason}{said}"


def step_losses(ranks: Sequence[Record], *, per_rank: int = 0, sums: bool = False) -> list[float]:
    """Loss of each step.

    Args:
        ranks: of one run.
        per_rank: micro-batches of a rank, whose losses are averaged; calls of the loss function before them only tried something. 0: all.
        sums: add them up instead: a script divides its losses by its accumulation itself.
    """
    found = []
    for i in range(min(len(rank["steps"]) for rank in ranks)):
        each = [loss for rank in ranks for loss in rank["steps"][i]["losses"][-per_rank:]]
        found.append(sum(each) if sums else math.fsum(each) / len(each) if each else math.nan)
    return found


def printed_losses(ranks: Sequence[Record], form: str) -> list[float]:
    """Losses over the global batch that rank 0 printed."""
    return [float(text) for text in _PRINTED[form].findall(str(ranks[0].get("output", "")))]


def check_series(name: str, found: Sequence[float], expected: Sequence[float], limit: float, words: str) -> Check:
    """Step by step, within a relative difference."""
    figures = {"found": list(found), "expected": list(expected), "limit": limit}
    if not found or not all(map(math.isfinite, found)):
        return Check(name=name, status=FAILED, detail="none were seen" if not found else "not finite", figures=figures)
    errors = [abs(f - e) / max(abs(e), 1e-12) for f, e in zip(found, expected, strict=False)]
    worst = max(range(len(errors)), key=errors.__getitem__)
    if errors[worst] > limit:
        detail = f"step {worst}: {found[worst]:.6g} instead of {expected[worst]:.6g}"
        return Check(name=name, status=FAILED, detail=detail, figures=figures)
    return Check(
        name=name, status=PASSED, detail=f"{counted(len(errors), 'step')} {words}, largest difference {errors[worst]:.1e}", figures=figures
    )


def gradient_norms(ranks: Sequence[Record], num_steps: int, tied: Sequence[Sequence[str]] = ()) -> list[float]:
    """Norm of the global gradient before each step: parts of one tensor add up over ranks, copies count once, as do tied ones."""
    one_name = {name: names[0] for names in tied for name in names}
    norms = []
    for i in range(num_steps):
        squares: dict[str, list[float]] = defaultdict(list)
        shards: dict[str, int] = {}
        for r, rank in enumerate(ranks):
            for name, value in rank["steps"][i]["squares"].items():
                own = name.startswith("flat ")  # an engine's own partition: every rank has another
                key = f"{name} of rank {r}" if own else one_name.get(name, name)
                squares[key].append(value)
                shards[key] = rank["steps"][i]["shards"][name]
        norms.append(math.fsum(sum(values) * shards[name] / len(values) for name, values in squares.items()) ** 0.5)
    return norms


def check_parameters(ranks: Sequence[Record], reference: Record, limit: Tolerance) -> Check:
    """Every parameter on every rank that holds it, and none missing."""
    found = [rank.get("differences") for rank in ranks]
    if not any(found):
        return Check(name="final parameters", status=NOT_HERE, detail="the run ended before they could be compared")
    names = {name for each in found if each for name in each}
    missing = sorted(set(reference["steps"][0]["squares"]) - names)
    unknown = sorted({name for each in found if each for name, value in each.items() if value is None})
    if missing or unknown:
        what = f"{missing[0]} is on no rank" if missing else f"{unknown[0]} is unknown to the single process or of another shape"
        return Check(name="final parameters", status=FAILED, detail=what, figures={"missing": missing, "unknown": unknown})
    worst, error = _worst(found, each=limit.each_parameter)
    left_out = max(sum(int(v["num_left_out"]) for v in each.values() if v) for each in found if each)
    figures = {"largest_difference": error, "parameter": worst, "limit": limit.parameters, "num_left_out": left_out}
    if not error <= limit.parameters:
        return Check(name="final parameters", status=FAILED, detail=f"{worst} differs by {error:.1e} of its norm", figures=figures)
    text = f"{counted(len(names), 'parameter')} {limit.words}, largest difference {error:.1e}"
    text += f"; {counted(left_out, 'element')} left out, whose gradients are rounding noise" if left_out else ""
    return Check(name="final parameters", status=PASSED, detail=text, figures=figures)


def _worst(found: Sequence[Any], *, each: bool) -> tuple[str, float]:
    """The parameter that differs most and by how much; or all together."""
    rows = [(name, v["difference_norm"], v["reference_norm"]) for one in found if one for name, v in one.items()]
    if each:
        return max(((name, d / (r or 1.0)) for name, d, r in rows), key=lambda row: row[1] if math.isfinite(row[1]) else math.inf)
    norm = math.fsum(r * r for _, _, r in rows) ** 0.5
    return "all together", math.fsum(d * d for _, d, _ in rows) ** 0.5 / (norm or 1.0)


def check_world(ranks: Sequence[Record], plan: Plan, backend: str) -> Check:
    """As many processes as the plan has, over the backend expected."""
    seen = {(rank.get("world_size"), rank.get("backend")) for rank in ranks}
    text = ", ".join(f"{size} over {name or 'nothing'}" for size, name in sorted(seen, key=str))
    good = len(seen) == 1 and all(size == plan.world_size and backend in str(name) for size, name in seen)
    return Check(
        name="world size", status=PASSED if good else FAILED, detail=text if good else f"{text} instead of {plan.world_size} over {backend}"
    )


def check_sharding(ranks: Sequence[Record], reference: Record, plan: Plan, *, tied_share: float = 0.0) -> Check:
    """Who holds which share of parameters and optimizer states.

    Args:
        ranks: what each rank recorded.
        reference: what the single process recorded.
        plan: as it was run.
        tied_share: share of the parameters that a pipeline's first and last stage each hold a copy of.
    """
    held = [rank["holdings"] for rank in ranks if "holdings" in rank]
    whole = reference["holdings"]
    if len(held) < len(ranks):
        return Check(name="sharding", status=NOT_HERE, detail="the run ended before it could be seen")
    states = [h["num_states"] / max(whole["num_states"], 1) for h in held]
    params = [h["num_local"] / max(whole["num_params"], 1) for h in held]
    limit = _largest_share(plan, whole["shapes"], in_rows=bool(held[0]["placements"]))
    problems = _sharding_problems(plan, states if whole["num_states"] else [], params, limit, tied_share if plan.pp_degree > 1 else 0.0)
    figures = {"states_share": states, "parameters_share": params, "placements": held[0]["placements"], "meshes": held[0]["meshes"]}
    share = " to ".join(dict.fromkeys(f"{share:.0%}" for share in (min(states), max(states))))
    text = f"a rank's optimizer holds {share} of the states" if whole["num_states"] else "the optimizer has no states"
    if held[0]["placements"]:
        text += f"; {', '.join(held[0]['placements'])} on a mesh of {', '.join(held[0]['meshes'])}"
    return Check(name="sharding", status=FAILED if problems else PASSED, detail="; ".join(problems) or text, figures=figures)


#: All shards together may be so much more than the whole: partitions are padded.
_PADDED = 0.1
#: For the division of two counts.
_ROUNDED = 1e-6


def _largest_share(plan: Plan, shapes: Sequence[Sequence[int]], *, in_rows: bool) -> float:
    """What a rank may hold of the states, and of the parameters where they are sharded."""
    num_shards = plan.dp_shard_degree if plan.zero_stage else 1
    if num_shards == 1:
        return 1.0
    if in_rows:
        return shares.by_rows(shapes, num_shards)
    return (shares.by_tensors if plan.zero_stage == 1 else shares.by_elements)(shapes, num_shards)


def _sharding_problems(plan: Plan, states: Sequence[float], params: Sequence[float], limit: float, copied_share: float) -> list[str]:
    sharded = plan.dp_shard_degree if plan.zero_stage else 1
    problems = _state_problems(plan, states, limit, copied_share) if states else []
    if plan.tp_degree > 1 and max(params) > 0.99:
        problems.append("no parameter is split over the tensor ranks")
    if plan.pp_degree > 1 and max(params) > 0.99:
        problems.append("a rank holds the parameters of all stages")
    if plan.zero_stage == 3 and sharded > 1 and max(params) > limit + _ROUNDED:
        problems.append(f"a rank holds {max(params):.0%} of the parameters, where at most {limit:.0%} are its share")
    return problems


def _state_problems(plan: Plan, states: Sequence[float], limit: float, copied_share: float) -> list[str]:
    copies = plan.dp_replicate_degree if plan.zero_stage else plan.dp_degree
    most = copies * plan.tp_degree  # what tensor ranks don't split they hold whole
    problems = []
    if not copies * (1 - 0.01) <= sum(states) <= most * (1 + _PADDED + copied_share):
        problems.append(f"all ranks together hold {sum(states):.2f} times the states, where {_times(copies, most)} are right")
    if plan.zero_stage == 0 and plan.tp_degree * plan.pp_degree == 1 and min(states) < 0.99:
        problems.append(f"a rank holds {min(states):.0%} of the states, and the plan shards nothing")
    if plan.pp_degree == 1 and max(states) > limit + _ROUNDED:
        problems.append(f"a rank holds {max(states):.0%} of the states, where at most {limit:.0%} are its share")
    return problems


def _times(least: float, most: float) -> str:
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"
