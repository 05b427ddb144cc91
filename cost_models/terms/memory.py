"""Peak device memory of a training step, as a walk over the lifetimes of what is in it.

States, gradients and buckets after sharding, micro-batches in flight, logits, gathered layers and temporaries at the fullest of four
moments (`memory_step`), on the fullest pipeline stage (`memory_stages`); then the allocator's reserve and what lies outside it. Load and
save are two more moments. Runtimes differ by the traits in `runtimes/*.memory.toml` (`memory_traits`).

Ignored: fragmentation that depends on the order of allocations (a factor stands for it), memory held by the data loader or by
callbacks, and imbalance between the experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from cost_models.calibrate_io import Calibration, load_calibration
from cost_models.numbering import distinct
from cost_models.terms.memory_cells import make_cells
from cost_models.terms.memory_step import CHUNK, PRICED, StageSizes, StepJob, chunks_in_flight, stage_sizes, step_bytes
from cost_models.terms.memory_traits import MemoryConstants, MemoryTraits, memory_traits
from cost_models.terms.volumes import shard_padding
from cost_models.traits import load_runtime
from cost_models.traits import runtime_names as known_runtimes
from cost_models.types import MEMORY_PARTS, Cluster, FloatArray, IntArray, Plan, PlanTable, Workload

_PER_PLAN = ("num_groups", "reserved_factor", "measured", "limit_bytes", "is_accelerator")  # of RawMemory, beside its bytes
_FULL = 0.95  # share of a device's memory that reclaimable memory may fill


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCosts:
    """Bytes on the fullest rank, arrays of len(plans)."""

    parts: Mapping[str, FloatArray]  # keys MEMORY_PARTS; they sum to `peak`
    peak: FloatArray  # as the driver sees it: reserved and the runtime's context
    allocated: FloatArray  # tensors alive (torch.cuda.max_memory_allocated)
    reserved: FloatArray  # held by the caching allocator (torch.cuda.max_memory_reserved)
    high: FloatArray  # cautious upper end of `peak`; decides whether a plan fits
    load: FloatArray  # while the model is built and sharded
    save: FloatArray  # while a checkpoint is written
    host_bytes: FloatArray  # host memory needed per NODE by offloaded states or by building the model


@dataclass(frozen=True, slots=True, kw_only=True)
class RawMemory:
    """Bytes before the constants of allocator and driver are applied: lets a fit try constants without pricing again."""

    bytes: Mapping[str, FloatArray]  # keys PRICED
    num_groups: FloatArray  # process groups with more than one rank
    reserved_factor: FloatArray  # the runtime's own, NaN: the constant
    measured: FloatArray  # 1 where the runtime was compared with published figures
    limit_bytes: FloatArray  # of the device, what reclaimable memory may fill
    is_accelerator: FloatArray  # 0: processes on CPUs, which have no driver's context and no caching allocator


def memory_costs(
    workload: Workload, cluster: Cluster, plans: PlanTable, calibration: Calibration | None = None, *, rank: str = "fullest",
    traits_of: Callable[[str], MemoryTraits] = memory_traits, kinds: tuple[IntArray, IntArray] | None = None,
) -> MemoryCosts:  # fmt: skip
    """Memory of every plan of one workload.

    Args:
        workload: model and step.
        cluster: for the device's memory and the number of ranks per node.
        plans: what to price.
        calibration: fitted constants; None: the shipped ones.
        rank: pipeline stage whose memory is wanted: "fullest", or "first", "last", "ends" to compare with a published figure.
        traits_of: where a runtime's habits come from.
        kinds: plans that differ in nothing but their number of micro-batches: one of each kind, and each plan's kind. None: found here.
    """
    constants = _constants(calibration)
    shared = _shared(workload, cluster, plans, constants, rank=rank, traits_of=traits_of, kinds=kinds or _kinds(plans))
    names = [f.name for f in fields(MemoryCosts) if f.name != "parts"]
    parts = {name: np.empty(len(plans)) for name in MEMORY_PARTS}
    columns = {name: np.empty(len(plans)) for name in names}
    for start in range(0, len(plans), CHUNK):
        part = slice(start, start + CHUNK)
        got = finish(_raw(shared, part), constants)
        for name in MEMORY_PARTS:
            parts[name][part] = got.parts[name]
        for name in names:
            columns[name][part] = getattr(got, name)
    return MemoryCosts(parts=parts, **columns)


def memory_costs_rows(
    workloads: Sequence[Workload], clusters: Sequence[Cluster], plans: PlanTable, calibration: Calibration | None = None,
    *, ranks: Sequence[str] | None = None, traits_of: Callable[[str], MemoryTraits] = memory_traits,
) -> MemoryCosts:  # fmt: skip
    """Memory where row i has its own workload and cluster (and, with `ranks`, its own pipeline stage).

    Raises:
        ValueError: the sequences differ in length.
    """
    constants = _constants(calibration)
    return finish(raw_rows(workloads, clusters, plans, constants, ranks=ranks, traits_of=traits_of), constants)


def raw_rows(
    workloads: Sequence[Workload], clusters: Sequence[Cluster], plans: PlanTable, constants: MemoryConstants, *,
    ranks: Sequence[str] | None = None, traits_of: Callable[[str], MemoryTraits] = memory_traits,
) -> RawMemory:  # fmt: skip
    """The first half of `memory_costs_rows`; `finish` is the second. Rows that share workload and cluster objects are priced together.

    Raises:
        ValueError: the sequences differ in length.
    """
    if not len(workloads) == len(clusters) == len(plans):
        raise ValueError(f"{len(workloads)} workloads, {len(clusters)} clusters and {len(plans)} plans do not match")
    groups: dict[tuple[int, int, str], list[int]] = {}
    for i, (workload, cluster) in enumerate(zip(workloads, clusters, strict=True)):
        groups.setdefault((id(workload), id(cluster), ranks[i] if ranks else "fullest"), []).append(i)
    priced = {name: np.zeros(len(plans)) for name in PRICED}
    other = {name: np.zeros(len(plans)) for name in _PER_PLAN}
    for (_, _, rank), members in groups.items():
        index = np.array(members, dtype=np.int64)
        alone = np.arange(len(index))
        shared = _shared(
            workloads[members[0]], clusters[members[0]], plans.take(index), constants, rank=rank, traits_of=traits_of, kinds=(alone, alone)
        )
        raw = _raw(shared, slice(None))
        for name in PRICED:
            priced[name][index] = raw.bytes[name]
        for name, values in other.items():
            values[index] = getattr(raw, name)
    return RawMemory(bytes=priced, **other)


def finish(raw: RawMemory, constants: MemoryConstants) -> MemoryCosts:
    """Allocated, reserved and driver's view of every plan: reserve, context, load and save added to the parts.

    The allocator's unused blocks, and freed tensors that wait for another stream, are given back when an allocation fails: they fill
    a device but never overfill it.
    """
    parts = {name: raw.bytes[name] for name in MEMORY_PARTS if name != "reserve"}
    parts["temporaries"] = parts["temporaries"] + constants.floor_bytes
    context = raw.is_accelerator * (constants.context_bytes + constants.group_bytes * raw.num_groups)
    allocated = np.sum(list(parts.values()), axis=0)
    least = constants.least_reserved_factor
    hard = allocated * least + raw.bytes["pooled"] + context
    load, save = raw.bytes["load"] * least + context, raw.bytes["save"] * least + context
    over = np.maximum(np.maximum(load, save) - hard, 0.0) / least  # load or save need more than the step
    allocated, hard = allocated + over, hard + over * least
    factor = np.where(np.isnan(raw.reserved_factor), constants.reserved_factor, raw.reserved_factor)
    unused = raw.is_accelerator * allocated * np.maximum(factor - least, 0.0)
    margin = np.where(raw.measured > 0, constants.high_factor, constants.unmeasured_high_factor)
    peak = _filled(hard, unused + raw.bytes["held"], raw.limit_bytes)
    high = _filled(hard * margin + constants.high_bytes, unused * margin + raw.bytes["held_at_worst"], raw.limit_bytes)
    parts |= {"gathered": parts["gathered"] + over, "reserve": peak - allocated}
    return MemoryCosts(
        parts={name: parts[name] for name in MEMORY_PARTS}, peak=peak, allocated=allocated, reserved=peak - context,
        high=np.maximum(high, peak), load=load, save=save, host_bytes=raw.bytes["host"],
    )  # fmt: skip


def num_in_flight(plans: PlanTable, stage: FloatArray) -> FloatArray:
    """Micro-batches whose activations a pipeline stage (0: the first) holds at once; interleaved: their share of the stage's layers."""
    columns = {name: getattr(plans, name) for name in ("pp_degree", "virtual_stages", "schedule")}
    most, chunks = chunks_in_flight(columns, stage)
    return np.asarray(np.minimum(plans.num_microbatches * chunks, most) / chunks, dtype=np.float64)


def _filled(hard: FloatArray, elastic: FloatArray, limit: FloatArray) -> FloatArray:
    """Memory that must be there, and reclaimable memory as far as there is room."""
    return hard + np.minimum(elastic, np.maximum(limit - hard, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What plans of one workload share: figures of each kind of them."""

    sizes: StageSizes
    kind: IntArray  # of each plan
    num_microbatches: IntArray  # of each plan
    num_groups: FloatArray  # per kind, as below
    reserved_factor: FloatArray
    measured: FloatArray
    limit_bytes: float
    is_accelerator: float


def _kinds(plans: PlanTable) -> tuple[IntArray, IntArray]:
    return distinct(*(getattr(plans, f.name) for f in fields(Plan) if f.name != "num_microbatches"))


def _shared(
    workload: Workload, cluster: Cluster, plans: PlanTable, constants: MemoryConstants, *, rank: str,
    traits_of: Callable[[str], MemoryTraits], kinds: tuple[IntArray, IntArray],
) -> _Shared:  # fmt: skip
    traits = [traits_of(name) for name in plans.runtime_names]
    first, kind = kinds
    one = plans.take(first)
    job = StepJob(
        cells=make_cells(workload, one, traits, rank=rank), num_params=workload.num_params, input_bytes=workload.input_bytes,
        resident_bytes=workload.resident_bytes, gpus_per_node=cluster.gpus_per_node, activation_scale=constants.activation_scale,
        tokens_per_sample=workload.tokens_per_sample, padding=_padding(workload, one),
    )  # fmt: skip
    degrees = (one.dp_replicate_degree, one.dp_shard_degree, one.tp_degree, one.cp_degree, one.pp_degree)
    own = np.array([np.nan if t.reserved_factor is None else t.reserved_factor for t in traits])
    return _Shared(
        sizes=stage_sizes(job, one), kind=kind, num_microbatches=plans.num_microbatches,
        num_groups=np.sum([d > 1 for d in degrees], axis=0).astype(np.float64), reserved_factor=own[one.runtime],
        measured=np.array([float(t.measured) for t in traits])[one.runtime], limit_bytes=_FULL * cluster.device.memory_bytes,
        is_accelerator=float(cluster.device.family != "cpu"),
    )  # fmt: skip


def _padding(workload: Workload, plans: PlanTable) -> FloatArray:
    """Factors on what is sharded, of the layers and of the root, for each plan."""
    runtimes = [load_runtime(name) if name in known_runtimes() else None for name in plans.runtime_names]
    first, which = distinct(plans.runtime, plans.dp_shard_degree, plans.cp_degree, plans.tp_degree)
    shards = plans.take(first)
    rows = zip(shards.runtime, shards.dp_shard_degree * shards.cp_degree, shards.tp_degree, strict=True)
    factors = [shard_padding(workload, r, float(n), float(tp)) if (r := runtimes[i]) else (1.0, 1.0) for i, n, tp in rows]
    return np.array(factors)[which]


def _raw(shared: _Shared, part: slice) -> RawMemory:
    """Bytes of some plans."""
    kind = shared.kind[part]
    return RawMemory(
        bytes=step_bytes(shared.sizes, kind, shared.num_microbatches[part]), num_groups=shared.num_groups.take(kind),
        reserved_factor=shared.reserved_factor.take(kind), measured=shared.measured.take(kind),
        limit_bytes=np.full(len(kind), shared.limit_bytes), is_accelerator=np.full(len(kind), shared.is_accelerator),
    )  # fmt: skip


def _constants(calibration: Calibration | None) -> MemoryConstants:
    return MemoryConstants.from_mapping((calibration or load_calibration()).memory)
