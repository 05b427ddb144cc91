"""Price all legal plans, keep the ones that fit, put them in order, and remember why the others are not there."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

import cost_models
from advisor.search.reasons import MEMORY_WORDS, reasons_against
from advisor.search.space import Space, legal_plans
from advisor.search.types import Candidate, Rejected, SearchResult
from advisor.search.written import WhyNoFiles, Written, all_written
from cost_models.types import Cluster, Estimates, FloatArray, IntArray, Plan, PlanTable, Workload

BoolArray = npt.NDArray[np.bool_]

OBJECTIVES = ("throughput", "memory", "gpus")
#: Plans this close in predicted time are equal for us (the prices themselves are further off); the simplest goes first.
TIE_SHARE = 0.05
#: Data-parallel plans run a script as it is; splitting its layers asks for work on the model. Up to this gap, which is about the error
#: of the prices on unseen sources, the plan that runs as it is goes first and the faster one is listed with its gain.
AS_IT_IS_SHARE = 0.15
#: Peaks this close are equal when memory is the objective; the fastest goes first.
MEMORY_TIE_SHARE = 0.01
#: Strategy families that a report must have a word on, in the order people try them.
FAMILIES = ("DDP", "ZeRO-1", "ZeRO-2", "FSDP", "HSDP", "tensor parallel", "pipeline parallel", "tensor and pipeline parallel")
_SCALARS = ("step_time_s", "low_s", "high_s", "peak_memory_bytes", "allocated_memory_bytes", "high_memory_bytes", "load_memory_bytes", "save_memory_bytes", "host_memory_bytes", "mfu")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked of a search."""

    workload: Workload
    cluster: Cluster
    global_batch: int
    objective: str = "throughput"
    max_memory_share: float = 0.95  # of the device's memory that a plan's cautious estimate may take
    calibration: cost_models.Calibration | None = None
    space: Space = field(default_factory=Space)
    tp_reason: str = ""  # why the model has no tensor-parallel split, where it has none
    pp_reason: str = ""  # why it has no pipeline stages
    why_no_files: WhyNoFiles = all_written  # why no engine has files for a plan; such plans are shown but don't lead

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, not {self.objective!r}")
        if self.global_batch < 1:
            raise ValueError(f"the global batch must be at least 1, not {self.global_batch}")
        if not 0 < self.max_memory_share <= 1:
            raise ValueError(f"the share of memory must be in (0, 1], not {self.max_memory_share}")

    @property
    def available_bytes(self) -> float:
        return self.cluster.device.memory_bytes * self.max_memory_share


def search(request: Request, *, num_candidates: int = 10) -> SearchResult:
    """Every legal plan priced; the best of each strategy, best first.

    Args:
        request: workload, cluster, batch and objective.
        num_candidates: strategies to return at most.

    Returns:
        Candidates (empty when nothing fits) and one rejected plan per strategy family that has no candidate.
    """
    start = time.perf_counter()
    plans = legal_plans(request.workload, request.cluster, global_batch=request.global_batch, space=request.space)
    if not len(plans):
        return SearchResult(candidates=(), rejected=_illegal(request), num_priced=0, search_time_s=time.perf_counter() - start)
    prices = cost_models.estimate(request.workload, request.cluster, plans, request.calibration)
    fits = prices.high_memory_bytes <= request.available_bytes
    if request.cluster.host_memory_bytes:
        fits &= prices.host_memory_bytes <= request.cluster.host_memory_bytes
    order = _order(plans, prices, fits, request.objective)
    chosen = _ranked(plans, prices, order, num_candidates, request)
    candidates = tuple(_candidate(plans, prices, i, no_files=reason) for i, reason in chosen.items())
    candidates = tuple(_with_reasons(c, candidates, request) for c in candidates)
    rejected = _rejected(plans, prices, fits, request)
    elapsed = time.perf_counter() - start
    return SearchResult(candidates=candidates, rejected=rejected, num_priced=len(plans), search_time_s=elapsed)


def price(request: Request, plan: Plan) -> Candidate:
    """One plan, priced whether it fits or not."""
    table = PlanTable.from_plans([plan])
    return _candidate(table, cost_models.estimate(request.workload, request.cluster, table, request.calibration), 0)


def complexity(plans: PlanTable) -> IntArray:
    """How much a plan asks of its user: sharding, offload, recomputation, tensors, stages. Decides between equal times."""
    steps = np.select([plans.zero_stage == 0, plans.zero_stage == 3, plans.zero_stage == 1], [0, 2, 1], 2)
    steps = steps + (plans.dp_replicate_degree > 1) * (plans.zero_stage == 3) + 4 * (plans.tp_degree > 1) + 6 * (plans.pp_degree > 1)
    steps = steps + plans.recompute + 3 * plans.offload + (plans.virtual_stages > 1) + (plans.tp_degree > 8) * 2
    return np.asarray(steps, np.int64)


def family(plan: Plan) -> str:
    """Strategy family of a plan, one of FAMILIES."""
    if plan.tp_degree > 1 and plan.pp_degree > 1:
        return FAMILIES[7]
    if plan.tp_degree > 1:
        return FAMILIES[5]
    if plan.pp_degree > 1:
        return FAMILIES[6]
    if plan.zero_stage == 3 and plan.dp_replicate_degree > 1:
        return "HSDP"
    return ("DDP", "ZeRO-1", "ZeRO-2", "FSDP")[plan.zero_stage]


def _families(plans: PlanTable) -> IntArray:
    tp, pp = plans.tp_degree > 1, plans.pp_degree > 1
    hybrid = (plans.zero_stage == 3) & (plans.dp_replicate_degree > 1)
    return np.select([tp & pp, tp, pp, hybrid], [7, 5, 6, 4], plans.zero_stage).astype(np.int64)


def _order(plans: PlanTable, prices: Estimates, fits: BoolArray, objective: str) -> IntArray:
    """Indices of fitting plans, best first.

    By time, near-equal times to the simplest plan; by memory, near-equal peaks (a hundredth) to the fastest.
    """
    index = np.flatnonzero(fits)
    if not len(index):
        return index
    time_s, peak = prices.step_time_s[index], prices.high_memory_bytes[index]
    steps = complexity(plans)[index]
    if objective == "memory":
        # classes of a hundredth, so that a plan ten times slower never leads for a few bytes
        by_memory: IntArray = index[np.lexsort((steps, time_s, np.floor(np.log(peak / peak.min()) / MEMORY_TIE_SHARE)))]
        return by_memory
    order = np.lexsort((peak, steps, time_s))
    near = order[time_s[order] <= time_s[order[0]] * (1 + TIE_SHARE)]
    lead = near[np.lexsort((time_s[near], steps[near]))][0]
    as_it_is = ((plans.tp_degree == 1) & (plans.pp_degree == 1))[index]
    close = order[as_it_is[order] & (time_s[order] <= time_s[order[0]] * (1 + AS_IT_IS_SHARE))]
    if not as_it_is[lead] and len(close):
        lead = close[0]
    by_time: IntArray = index[np.concatenate([[lead], order[order != lead]])]
    return by_time


def _ranked(plans: PlanTable, prices: Estimates, order: IntArray, limit: int, request: Request) -> dict[int, str]:
    """Plans to show, best first, with why one has no files. The first has some, unless none of them has."""
    chosen = _distinct(plans, order, limit, objective=request.objective)
    measure = prices.high_memory_bytes if request.objective == "memory" else prices.step_time_s
    files = Written(plans=plans, order=order, strategy=_strategies(plans), measure=measure, why=request.why_no_files, share=AS_IT_IS_SHARE)
    found = files.chosen(chosen)
    if list(found) == chosen and not any(found.values()):
        return found

    def ordered(some: list[int]) -> list[int]:
        index = np.isin(np.arange(len(plans)), some)
        return [int(i) for i in _order(plans, prices, index, request.objective)]

    lead = ordered([i for i, reason in found.items() if not reason] or list(found))[:1]
    others = ordered(list(found)) if request.objective == "memory" else sorted(found, key=lambda i: float(measure[i]))
    return {i: found[i] for i in [*lead, *others]}


def _strategies(plans: PlanTable) -> IntArray:
    """Numbers that are equal for plans of one strategy: neighbours differ in micro-batch, schedule or recomputation only."""
    degrees = (plans.tp_degree << 24) + (plans.pp_degree << 8)
    return np.asarray((_families(plans) << 48) + degrees + (plans.offload << 4) + plans.zero_stage, np.int64)


def _distinct(plans: PlanTable, order: IntArray, limit: int, *, objective: str) -> list[int]:
    """The best plans of different strategies, in order.

    A family shows two at most. Offloading only ever buys memory, so where a family fits without it, it is shown without (unless memory
    is what is asked for).
    """
    families = _families(plans)
    if objective != "memory":
        roomy = np.unique(families[order[plans.offload[order] == 0]])
        order = order[(plans.offload[order] == 0) | ~np.isin(families[order], roomy)]
    _, first = np.unique(_strategies(plans)[order], return_index=True)
    chosen = [int(i) for i in order[np.sort(first)]]
    rank_in_family = [sum(families[j] == families[i] for j in chosen[:k]) for k, i in enumerate(chosen)]
    leads = [k for k, rank in enumerate(rank_in_family) if rank == 0]  # the best of each family is always shown
    seconds = [k for k, rank in enumerate(rank_in_family) if rank == 1][: max(0, limit - len(leads))]
    return [chosen[k] for k in sorted({*leads, *seconds})] if limit > 1 else chosen[:limit]


def _candidate(plans: PlanTable, prices: Estimates, i: int, *, no_files: str = "") -> Candidate:
    return Candidate(
        plan=plans.plan(i),
        estimate={name: float(getattr(prices, name)[i]) for name in _SCALARS},
        breakdown_s=_row(prices.breakdown_s, i),
        breakdown_bytes=_row(prices.breakdown_bytes, i),
        no_files=no_files,
    )


def _row(columns: Mapping[str, FloatArray], i: int) -> dict[str, float]:
    return {name: float(values[i]) for name, values in columns.items()}


def _with_reasons(candidate: Candidate, ranked: Sequence[Candidate], request: Request) -> Candidate:
    reasons = reasons_against(candidate, ranked, objective=request.objective, available_bytes=request.available_bytes)
    return dataclasses.replace(candidate, reasons=reasons)


def _rejected(plans: PlanTable, prices: Estimates, fits: BoolArray, request: Request) -> tuple[Rejected, ...]:
    """For each family without a fitting plan: the plan that comes closest, and how far it is over."""
    families, out = _families(plans), []
    for number, name in enumerate(FAMILIES):
        index = np.flatnonzero(families == number)
        if not len(index):
            reason = _why_illegal(name, request)
            if reason:
                out.append(Rejected(plan=_example(name, request.cluster), reason=reason))
        elif not fits[index].any():
            i = int(index[np.argmin(prices.high_memory_bytes[index])])
            out.append(_too_big(_candidate(plans, prices, i), request))
    return tuple(out)


def _too_big(candidate: Candidate, request: Request) -> Rejected:
    needed, parts = candidate.estimate["high_memory_bytes"], candidate.breakdown_bytes
    largest = max(parts, key=lambda name: parts[name])
    reason = f"does not fit: {parts[largest] / 2**30:.3g} GiB for {MEMORY_WORDS.get(largest, largest)} alone"
    return Rejected(plan=candidate.plan, reason=reason, needed_bytes=needed, available_bytes=request.available_bytes)


def _why_illegal(name: str, request: Request) -> str:
    """Why a family has no legal plan at all; empty where it is pointless to say so (hybrid sharding in one node, one GPU)."""
    workload, world = request.workload, request.cluster.num_gpus
    if world == 1:
        return ""
    tensor, stages = "tensor" in name, "pipeline" in name
    if tensor and stages and not (workload.can_tensor_parallel and workload.can_pipeline):
        return ""  # said by the two families it is made of
    if tensor and stages and world < 4:
        return ""  # two of each make four
    if tensor and not workload.can_tensor_parallel:
        return "not possible: " + (request.tp_reason or "no column- and row-parallel pairs of linear layers in the repeated blocks")
    if stages and not workload.can_pipeline:
        return "not possible: " + (request.pp_reason or "the model is no chain of layers that hands on one tensor")
    if tensor or stages:
        return f"no legal degree: heads, layers and the global batch of {request.global_batch} don't divide over {world} GPUs"
    if name == "HSDP":
        return ""
    return f"the global batch of {request.global_batch} does not divide over {world} data ranks"


def _example(name: str, cluster: Cluster) -> Plan:
    """A plan that stands for a family without legal plans."""
    world = cluster.num_gpus
    if "tensor" in name and "pipeline" in name:
        return Plan(tp_degree=2, pp_degree=max(2, world // 2), schedule="1f1b")
    if "pipeline" in name:
        return Plan(pp_degree=world, schedule="1f1b")
    if "tensor" in name:
        return Plan(tp_degree=world)
    stage = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2}.get(name, 3)
    return Plan(dp_shard_degree=world, zero_stage=stage) if stage else Plan(dp_replicate_degree=world)


def _illegal(request: Request) -> tuple[Rejected, ...]:
    reasons = ((name, _why_illegal(name, request)) for name in FAMILIES)
    return tuple(Rejected(plan=_example(name, request.cluster), reason=reason) for name, reason in reasons if reason)
