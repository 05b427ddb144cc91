"""Peak device memory of a training step, as a walk over the lifetimes of what is in it.

Four moments of a step can be the fullest: the loss (all activations in flight, logits), the backward pass of the heaviest layer
(activations, that layer recomputed, its temporaries), the end of the backward pass (gradients), and the optimizer step. With load
and save they make the peak of a rank; of a pipeline's stages, all that can be the fullest are priced. Micro-batches in flight:
Narayanan et al. 2021 (1F1B, interleaving), Huang et al. 2019 (GPipe); ZeRO's division of states: Rajbhandari et al. 2020.

Ignored: fragmentation that depends on the order of allocations (a factor stands for it), memory held by the data loader or by
callbacks, and imbalance between the experts of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models.calibrate_io import Calibration, load_calibration
from cost_models.terms.memory_cells import CELL_COLUMNS, Cells, make_cells
from cost_models.terms.memory_traits import MemoryConstants, memory_traits
from cost_models.types import MEMORY_PARTS, SCHEDULES, Cluster, FloatArray, IntArray, PlanTable, Workload

BoolArray = npt.NDArray[np.bool_]
_CHUNK = 16384  # plans priced at once: working arrays stay in the processor's cache
_GPIPE, _INTERLEAVED = SCHEDULES.index("gpipe"), SCHEDULES.index("interleaved")
_FULL = 0.95  # share of a device's memory that reclaimable blocks may fill
_INPUT_COPIES = 2.0  # the batch in use and the next one


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
class _Job:
    """What all plans of a table share."""

    workload: Workload
    gpus_per_node: int
    cells: Cells
    constants: MemoryConstants


def memory_costs(
    workload: Workload, cluster: Cluster, plans: PlanTable, calibration: Calibration | None = None, *, rank: str = "fullest"
) -> MemoryCosts:
    """Memory of every plan of one workload.

    Args:
        workload: model and step.
        cluster: for the number of ranks per node.
        plans: what to price.
        calibration: fitted constants; None: the shipped ones.
        rank: pipeline stage whose memory is wanted: "fullest", or "first", "last", "ends" to compare with a published figure.

    Returns:
        Bytes by part on that rank.
    """
    constants = MemoryConstants.from_mapping((calibration or load_calibration()).memory)
    cells = make_cells(workload, plans, rank=rank)
    traits = [memory_traits(name) for name in plans.runtime_names]
    factor = np.array([constants.reserved_factor if t.reserved_factor is None else t.reserved_factor for t in traits])[plans.runtime]
    margin = np.array([constants.high_factor if t.measured else constants.unmeasured_high_factor for t in traits])[plans.runtime]
    job = _Job(workload=workload, gpus_per_node=cluster.gpus_per_node, cells=cells, constants=constants)
    out = {name: np.zeros(len(plans)) for name in (*MEMORY_PARTS, "load", "save", "host", "held", "held_at_worst")}
    for start in range(0, len(plans), _CHUNK):
        rows = np.arange(start, min(start + _CHUNK, len(plans)))
        priced = _chunk(job, plans.take(rows), cells.code[rows])
        for name, values in priced.items():
            out[name][rows] = values
    high = _High(factor=margin, bytes=constants.high_bytes, limit_bytes=_FULL * cluster.device.memory_bytes)
    return _costs(out, factor, _context(plans, constants), high)


def memory_costs_rows(
    workloads: Sequence[Workload], clusters: Sequence[Cluster], plans: PlanTable, calibration: Calibration | None = None,
    *, ranks: Sequence[str] | None = None,
) -> MemoryCosts:  # fmt: skip
    """Memory where row i has its own workload and cluster (and, with `ranks`, its own pipeline stage).

    Raises:
        ValueError: the sequences differ in length.
    """
    if not len(workloads) == len(clusters) == len(plans):
        raise ValueError(f"{len(workloads)} workloads, {len(clusters)} clusters and {len(plans)} plans do not match")
    groups: dict[tuple[int, int, str], list[int]] = {}
    for i, (workload, cluster) in enumerate(zip(workloads, clusters, strict=True)):
        groups.setdefault((id(workload), id(cluster), ranks[i] if ranks else "fullest"), []).append(i)
    names = ("peak", "allocated", "reserved", "high", "load", "save", "host_bytes")
    columns = {name: np.zeros(len(plans)) for name in names}
    parts = {name: np.zeros(len(plans)) for name in MEMORY_PARTS}
    for (_, _, rank), members in groups.items():
        index = np.array(members, dtype=np.int64)
        got = memory_costs(workloads[members[0]], clusters[members[0]], plans.take(index), calibration, rank=rank)
        for name in names:
            columns[name][index] = getattr(got, name)
        for name in MEMORY_PARTS:
            parts[name][index] = got.parts[name]
    return MemoryCosts(parts=parts, **columns)


def num_in_flight(plans: PlanTable, stage: FloatArray) -> FloatArray:
    """Micro-batches (interleaved: their share of the stage's layers) whose activations a stage holds at once.

    GPipe holds all m, 1F1B min(m, pp - stage), interleaving with v chunks min(m v, 2 (pp - stage - 1) + (v - 1) pp + 1) / v.
    """
    m, pp, v = plans.num_microbatches, plans.pp_degree, np.maximum(plans.virtual_stages, 1)
    left = np.maximum(pp - stage, 1.0)
    chunks = np.minimum(m * v, 2 * (left - 1) + (v - 1) * pp + 1) / v
    flight = np.where(plans.schedule == _GPIPE, m, np.where((plans.schedule == _INTERLEAVED) & (v > 1), chunks, np.minimum(m, left)))
    return np.where(pp > 1, flight, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _High:
    """How the cautious end is made."""

    factor: FloatArray
    bytes: float
    limit_bytes: float  # of the device: reclaimable blocks fill no more


def _costs(out: dict[str, FloatArray], factor: FloatArray, context: FloatArray, cautious: _High) -> MemoryCosts:
    """Allocated, reserved and driver's view from the parts.

    Freed tensors that wait for another stream are given back when an allocation fails, so they fill a device but never overfill it.
    """
    allocated = sum((out[name] for name in MEMORY_PARTS if name != "reserve"), np.zeros(len(factor)))
    reserved = allocated * factor + out["reserve"]
    load, save = (out[name] * factor + context for name in ("load", "save"))
    over = np.maximum(np.maximum(load, save) - (reserved + context), 0.0)  # load or save above the step: gathered or whole parameters
    allocated, reserved = allocated + over / factor, reserved + over
    high = (reserved + context) * cautious.factor + cautious.bytes
    high = high + np.minimum(out["held_at_worst"], np.maximum(cautious.limit_bytes - high, 0.0))
    reserved = reserved + np.minimum(out["held"], np.maximum(cautious.limit_bytes - reserved - context, 0.0))
    parts = {name: out[name] for name in MEMORY_PARTS}
    parts["gathered"] = parts["gathered"] + over / factor
    parts["reserve"] = reserved - allocated + context
    peak = reserved + context
    return MemoryCosts(
        parts=parts,
        peak=peak,
        allocated=allocated,
        reserved=reserved,
        high=np.maximum(high, peak),
        load=load,
        save=save,
        host_bytes=out["host"],
    )


def _context(plans: PlanTable, constants: MemoryConstants) -> FloatArray:
    """CUDA context, and buffers of each process group with more than one rank."""
    degrees = (plans.dp_replicate_degree, plans.dp_shard_degree, plans.tp_degree, plans.cp_degree, plans.pp_degree)
    return constants.context_bytes + constants.group_bytes * sum((d > 1).astype(np.float64) for d in degrees)  # type: ignore[return-value]


def _chunk(job: _Job, plans: PlanTable, code: IntArray) -> dict[str, FloatArray]:
    """Parts at the fullest moment of the fullest stage, for some plans."""
    cells = job.cells
    best = _stage(job, plans, code, 0)
    for candidate in range(1, cells.num_candidates):
        more = np.flatnonzero(cells.candidates[code] > candidate)
        if not len(more):
            break
        other = _stage(job, plans.take(more), code[more], candidate)
        larger = other["total"] > best["total"][more]
        for name, values in best.items():
            values[more[larger]] = other[name][larger]
    best.pop("total")
    return best


def _stage(job: _Job, plans: PlanTable, code: IntArray, candidate: int) -> dict[str, FloatArray]:
    """The same for one candidate stage of each plan."""
    workload, cells = job.workload, job.cells
    block = cells.sums[candidate].take(code, axis=0).T
    c = dict(zip(CELL_COLUMNS, block, strict=True))
    states = _states(plans, c)
    flight = num_in_flight(plans, c["stage"])
    parts = states | _step_parts(job, plans, c, flight)
    moments = _moments(parts, plans, c)
    totals = np.array([sum(m.values()) for m in moments])
    fullest = totals.argmax(axis=0)
    out = {name: np.choose(fullest, [m.get(name, np.zeros(len(plans))) for m in moments]) for name in MEMORY_PARTS}
    out["total"] = totals.max(axis=0)
    pooled = (c["pools_gradients"] > 0) & (plans.zero_stage >= 2)
    out["reserve"] = np.where(pooled, parts["gradients"] - out["gradients"], 0.0)
    out["held"], out["held_at_worst"] = parts["held"], parts["held_at_worst"]
    whole = c["param_bytes"] * c["params"]
    lasting = parts["parameters"] + parts["optimizer"]
    gathered16 = c["saves_gathered"] * c["compute_bytes"] * workload.num_params
    sharded = (plans.zero_stage >= np.where(c["zero2_gathers"] > 0, 2, 3)) & (plans.dp_shard_degree > 1)
    out["load"] = np.where(sharded, parts["parameters"] + c["param_bytes"] * c["unit"], np.where(plans.offload > 0, 0.0, whole))
    out["save"] = lasting + np.where(sharded, np.maximum(gathered16, c["compute_bytes"] * c["unit"]), 0.0)
    built = c["builds_on_host"] * 4.0 * workload.num_params * job.gpus_per_node
    out["host"] = np.maximum(built, parts["offloaded"] * job.gpus_per_node)
    return out


def _states(plans: PlanTable, c: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Parameters, gradients, optimizer states and buffers of one stage, after sharding.

    ZeRO divides optimizer states from stage 1, gradients from 2, parameters at 3, among data-shard and context ranks; experts among
    those of them that hold the same experts.
    """
    shard = (plans.dp_shard_degree * plans.cp_degree).astype(np.float64)
    expert_shard = np.maximum(shard / plans.ep_degree, 1.0)
    zero, data = plans.zero_stage, plans.dp_replicate_degree * plans.dp_shard_degree > 1
    offload = plans.offload > 0

    def sharded(dense: FloatArray, expert: FloatArray, stage: int | FloatArray) -> FloatArray:
        cut = zero >= stage
        return dense / np.where(cut, shard, 1.0) + expert / np.where(cut, expert_shard, 1.0)

    all_p, all_e = c["params"] - c["experts"], c["experts"]
    train_p, train_e = c["trainable"] - c["trainable_experts"], c["trainable_experts"]
    gathers2 = (c["zero2_gathers"] > 0) & (zero == 2)
    trained1 = sharded(train_p, train_e, 1)
    parameters = c["param_bytes"] * sharded(all_p, all_e, np.where(gathers2, 2, 3))
    gradients = c["grad_bytes"] * sharded(train_p, train_e, 2)
    optimizer = (c["master_bytes"] + c["state_bytes"] + np.where(zero >= 1, c["sharded_grad_bytes"], 0.0)) * trained1
    everything = offload & (c["offloads_parameters"] > 0) & (zero >= 2)
    offloaded = np.where(offload, optimizer, 0.0) + np.where(everything, parameters + gradients, 0.0)
    buffers = np.where((zero > 0) & data, np.where(zero == 2, 2.0, 1.0), 0.0) * np.minimum(c["comm_buffer_bytes"], 4.0 * c["trainable"])
    return {
        "parameters": np.where(everything, 0.0, parameters),
        "gradients": np.where(everything, 0.0, gradients),
        "optimizer": np.where(offload, 0.0, optimizer),
        "buckets": np.where(data, c["bucket_copies"], 0.0) * gradients + buffers,
        "step": np.where(offload, 0.0, c["step_copies"] * c["param_bytes"] * trained1),
        "offloaded": offloaded,
    }


def _step_parts(job: _Job, plans: PlanTable, c: Mapping[str, FloatArray], flight: FloatArray) -> dict[str, FloatArray]:
    """What a step adds to the states: activations, logits, gathered layers, temporaries."""
    constants, micro = job.constants, plans.micro_batch.astype(np.float64)
    accumulates = plans.num_microbatches > 1
    zero3 = (plans.zero_stage >= 3) & (plans.dp_shard_degree * plans.cp_degree > 1)
    zero2 = (plans.zero_stage == 2) & (c["zero2_gathers"] > 0) & (plans.dp_shard_degree > 1)
    gathered = np.where(
        zero3, c["compute_bytes"] * (c["gathered_units"] * c["unit"] + c["root"]) + c["unit_grad_bytes"] * c["unit_trainable"], 0.0
    )
    gathered = gathered + np.where(zero2, c["compute_bytes"] * c["params"] + c["unit_grad_bytes"] * c["unit_trainable"], 0.0)
    casts = (c["autocast_copies"] > 0) & ~zero3 & ~zero2
    gathered = gathered + np.where(casts, np.maximum(c["param_bytes"] - c["compute_bytes"], 0.0) / 2 * c["params"], 0.0)
    scale = constants.activation_scale * micro
    boundary = np.where(plans.pp_degree > 1, c["boundary_copies"] * c["boundary"], 0.0)
    split = np.where(plans.tp_degree > 1, micro * c["boundary"], 0.0)
    copies = np.where(plans.schedule == _GPIPE, flight, 1.0) + np.where(accumulates, c["carried_logits_share"], 0.0)
    return {
        "activations": scale * (flight * c["kept"] + flight * boundary),
        "recomputed": scale * c["again"],
        "logits": micro * c["logits"] * copies,
        "temporaries": micro * c["temporary"],
        "held": np.where(_holds(plans, job.cells.held), split * c["held_outputs"], 0.0),
        "held_at_worst": split * c["held_outputs"],
        "gathered": gathered + split * c["gather_buffers"],
        "inputs": _INPUT_COPIES * micro * c["is_first"] * job.workload.input_bytes,
        "floor": np.full(len(plans), constants.floor_bytes),
    }


def _holds(plans: PlanTable, held: Mapping[int, tuple[Mapping[str, int], ...]]) -> BoolArray:
    """Plans in which a runtime was seen to hold freed tensors (`held_where`)."""
    out = np.zeros(len(plans), dtype=np.bool_)
    for runtime, alternatives in held.items():
        data = plans.dp_replicate_degree * plans.dp_shard_degree
        columns = {"pp_degree": plans.pp_degree, "tp_degree": plans.tp_degree, "dp_degree": data}
        columns["num_gpus"] = data * plans.tp_degree * plans.cp_degree * plans.pp_degree
        for bounds in alternatives:
            inside = plans.runtime == runtime
            for name, bound in bounds.items():
                column = columns[name[4:]]
                inside &= column >= bound if name.startswith("min_") else column <= bound
            out |= inside
    return out


def _moments(parts: Mapping[str, FloatArray], plans: PlanTable, c: Mapping[str, FloatArray]) -> tuple[dict[str, FloatArray], ...]:
    """Parts at the loss, in the heaviest layer's backward, at the end of backward, and in the optimizer step."""
    lasting = {name: parts[name] for name in ("parameters", "optimizer", "buckets")}
    gradients = parts["gradients"]
    held = np.where((c["keeps_gradients"] > 0) | (plans.num_microbatches > 1), gradients, 0.0)
    floor = parts["floor"]
    work = parts["temporaries"]
    saved = {name: parts[name] for name in ("activations", "gathered", "inputs")}
    loss = lasting | saved | {"gradients": held, "logits": parts["logits"], "temporaries": floor}
    layer = lasting | saved | {"gradients": held, "recomputed": parts["recomputed"], "temporaries": floor + work}
    last = lasting | {
        "gradients": gradients, "gathered": parts["gathered"], "recomputed": parts["recomputed"], "temporaries": floor + work,
        "inputs": parts["inputs"],
    }  # fmt: skip
    step = lasting | {"gradients": gradients, "temporaries": floor + parts["step"], "inputs": parts["inputs"]}
    return loss, layer, last, step
