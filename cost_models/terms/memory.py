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
from cost_models.terms.memory_cells import make_cells
from cost_models.terms.memory_step import CHUNK, PRICED, StepJob, in_flight, step_bytes
from cost_models.terms.memory_traits import MemoryConstants, MemoryTraits, memory_traits
from cost_models.types import MEMORY_PARTS, Cluster, FloatArray, PlanTable, Workload

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

    def part(self, part: slice) -> RawMemory:
        """Some of the plans."""
        other = {f.name: getattr(self, f.name)[part] for f in fields(self) if f.name != "bytes"}
        return RawMemory(bytes={name: values[part] for name, values in self.bytes.items()}, **other)


def memory_costs(
    workload: Workload, cluster: Cluster, plans: PlanTable, calibration: Calibration | None = None, *, rank: str = "fullest",
    traits_of: Callable[[str], MemoryTraits] = memory_traits,
) -> MemoryCosts:  # fmt: skip
    """Memory of every plan of one workload.

    Args:
        workload: model and step.
        cluster: for the device's memory and the number of ranks per node.
        plans: what to price.
        calibration: fitted constants; None: the shipped ones.
        rank: pipeline stage whose memory is wanted: "fullest", or "first", "last", "ends" to compare with a published figure.
        traits_of: where a runtime's habits come from.
    """
    constants = _constants(calibration)
    return finish(_raw(workload, cluster, plans, constants, rank=rank, traits_of=traits_of), constants)


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
    other = {name: np.zeros(len(plans)) for name in ("num_groups", "reserved_factor", "measured", "limit_bytes")}
    for (_, _, rank), members in groups.items():
        index = np.array(members, dtype=np.int64)
        raw = _raw(workloads[members[0]], clusters[members[0]], plans.take(index), constants, rank=rank, traits_of=traits_of)
        for name in PRICED:
            priced[name][index] = raw.bytes[name]
        for name, values in other.items():
            values[index] = getattr(raw, name)
    return RawMemory(bytes=priced, **other)


def finish(raw: RawMemory, constants: MemoryConstants) -> MemoryCosts:
    """Allocated, reserved and driver's view of every plan."""
    size = len(raw.num_groups)
    if size <= CHUNK:
        return _finish(raw, constants)
    names = [f.name for f in fields(MemoryCosts) if f.name != "parts"]
    parts = {name: np.empty(size) for name in MEMORY_PARTS}
    columns = {name: np.empty(size) for name in names}
    for start in range(0, size, CHUNK):
        part = slice(start, start + CHUNK)
        got = _finish(raw.part(part), constants)
        for name in MEMORY_PARTS:
            parts[name][part] = got.parts[name]
        for name in names:
            columns[name][part] = getattr(got, name)
    return MemoryCosts(parts=parts, **columns)


def _finish(raw: RawMemory, constants: MemoryConstants) -> MemoryCosts:
    """Reserve, context, load and save added to the parts.

    The allocator's unused blocks, and freed tensors that wait for another stream, are given back when an allocation fails: they fill
    a device but never overfill it.
    """
    parts = {name: raw.bytes[name] for name in MEMORY_PARTS if name != "reserve"}
    parts["temporaries"] = parts["temporaries"] + constants.floor_bytes
    context = constants.context_bytes + constants.group_bytes * raw.num_groups
    allocated = np.sum(list(parts.values()), axis=0)
    least = constants.least_reserved_factor
    hard = allocated * least + raw.bytes["pooled"] + context
    load, save = raw.bytes["load"] * least + context, raw.bytes["save"] * least + context
    over = np.maximum(np.maximum(load, save) - hard, 0.0) / least  # load or save need more than the step
    allocated, hard = allocated + over, hard + over * least
    factor = np.where(np.isnan(raw.reserved_factor), constants.reserved_factor, raw.reserved_factor)
    unused = allocated * np.maximum(factor - least, 0.0)
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
    columns = {name: getattr(plans, name) for name in ("num_microbatches", "pp_degree", "virtual_stages", "schedule")}
    return in_flight(columns, stage)


def _filled(hard: FloatArray, elastic: FloatArray, limit: FloatArray) -> FloatArray:
    """Memory that must be there, and reclaimable memory as far as there is room."""
    return hard + np.minimum(elastic, np.maximum(limit - hard, 0.0))


def _raw(
    workload: Workload, cluster: Cluster, plans: PlanTable, constants: MemoryConstants, *, rank: str,
    traits_of: Callable[[str], MemoryTraits],
) -> RawMemory:  # fmt: skip
    traits = [traits_of(name) for name in plans.runtime_names]
    job = StepJob(
        cells=make_cells(workload, plans, traits, rank=rank), num_params=workload.num_params, input_bytes=workload.input_bytes,
        resident_bytes=workload.resident_bytes, gpus_per_node=cluster.gpus_per_node, activation_scale=constants.activation_scale,
    )  # fmt: skip
    degrees = (plans.dp_replicate_degree, plans.dp_shard_degree, plans.tp_degree, plans.cp_degree, plans.pp_degree)
    own = np.array([np.nan if t.reserved_factor is None else t.reserved_factor for t in traits])
    return RawMemory(
        bytes=step_bytes(job, plans), num_groups=np.sum([d > 1 for d in degrees], axis=0).astype(np.float64),
        reserved_factor=own[plans.runtime], measured=np.array([float(t.measured) for t in traits])[plans.runtime],
        limit_bytes=np.full(len(plans), _FULL * cluster.device.memory_bytes),
    )  # fmt: skip


def _constants(calibration: Calibration | None) -> MemoryConstants:
    return MemoryConstants.from_mapping((calibration or load_calibration()).memory)
