"""Flatten plans of many workloads into arrays: cells, their operators, pipeline stages and communication groups.

A plan's price has few distinct ingredients. A *cell* is what one device executes for one layer (workload, device, runtime, tensor,
context and expert degree, micro-batch, sequence parallelism); a *layout* adds pipeline stages and recomputation; a *ring* is a set of
communication groups. Everything here is independent of the calibration, so that a fit packs once and prices often.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.stages import stage_split
from cost_models.terms.compute import ATTENTION_CLASS, FORWARD, GEMM, MEMORY, OpShapes, Split, device_shapes, peak_flops_per_s
from cost_models.traits import PIPELINE_CUTS, Runtime, load_runtime
from cost_models.types import RECOMPUTES, Cluster, FloatArray, IntArray, OpTable, PlanTable, Workload

ELEMENT_BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5}
FULL, SELECTIVE = RECOMPUTES.index("full"), RECOMPUTES.index("selective")
_TABLE_LIMIT = 1 << 22
_UNFUSED_SOFTMAX_LAUNCHES = 4.0  # scale, mask, cast, softmax, cast back and their temporaries instead of one kernel
BoolArray = npt.NDArray[np.bool_]


def distinct(*columns: IntArray) -> tuple[IntArray, IntArray]:
    """Distinct rows of integer columns, without sorting where the values are small.

    Returns:
        Index of one row for each distinct one, and for each row the number of its distinct one.
    """
    length = len(columns[0])
    code, size = np.zeros(length, dtype=np.int64), 1
    for column in columns:
        low, high = int(column.min()), int(column.max())
        if low == high:
            continue
        dense, span = _dense(column - low, high - low + 1)
        code, size = _dense(code * span + dense, size * span)
    first = np.empty(size, dtype=np.int64)
    first[code] = np.arange(length)
    return first, code


def _dense(code: IntArray, size: int) -> tuple[IntArray, int]:
    """Renumber codes below `size` to 0, 1, 2 ... without gaps."""
    if size <= 8:
        present = np.bincount(code, minlength=size) > 0
    elif size <= _TABLE_LIMIT:
        present = np.zeros(size, dtype=bool)
        present[code] = True
    else:
        values, inverse = np.unique(code, return_inverse=True)
        return inverse, len(values)
    count = int(present.sum())
    if count == size:
        return code, size
    return (np.cumsum(present) - 1)[code], count


def ragged(starts: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Concatenated ranges start, start + 1, ... of given lengths, and the number of the range each element is from."""
    owner = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - (ends - counts)[owner] + starts[owner], owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Cells and their operators. A *unit* is one group of a cell's workload; its sizes are per repeat and for the cell's samples."""

    shapes: OpShapes  # per operator
    op_pair: IntArray
    op_unit: IntArray
    op_phase: IntArray
    op_attention: BoolArray  # forward operators of attention
    num_units: int
    unit_start: IntArray  # per cell: its first unit
    unit_cell: IntArray  # per unit, as all below
    forward_kernels: FloatArray  # launches
    backward_kernels: FloatArray
    attention_kernels: FloatArray  # of attention's forward
    selective_share: FloatArray  # of the forward pass that selective recomputation runs again; 0: attention
    measured_host_s: FloatArray  # per kernel, from a profile; 0: not measured
    collectives: FloatArray  # tensor-parallel all-reduces in the forward pass; 0 without tensor parallelism
    boundary_bytes: FloatArray  # whole activation at the unit's output
    all_to_all_bytes: FloatArray  # tokens sent to experts, one direction
    context_bytes: FloatArray  # keys and values of one context rank
    dense_params: FloatArray  # on one device
    expert_params: FloatArray
    trainable_share: FloatArray
    num_layers: FloatArray
    can_recompute: FloatArray
    workload: IntArray  # per cell, as all below
    cluster: IntArray
    pair: IntArray
    tp_degree: FloatArray
    cp_degree: FloatArray
    ep_degree: FloatArray
    regathers: FloatArray
    sequence_parallel: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Pipeline stages of each layout. `entry_*` list the non-empty (stage, group) pairs."""

    cell: IntArray  # per layout
    num_ranks: IntArray
    virtual_stages: FloatArray
    rank_start: IntArray  # per layout: its first rank
    rank_layout: IntArray  # per rank
    entry_rank: IntArray
    entry_unit: IntArray
    entry_count: FloatArray
    entry_full: FloatArray  # count where the forward pass runs again in full
    entry_selective: FloatArray
    boundary_unit: IntArray  # per layout: unit with the largest output at a cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Rings:
    """Distinct data-parallel groups, from one representative plan each."""

    pair: IntArray
    cluster: IntArray
    shard_ranks: FloatArray  # data-shard x context
    replicate_ranks: FloatArray
    data_ranks: FloatArray  # both
    expert_ranks: FloatArray  # ranks that hold equal experts
    tp_degree: FloatArray
    ep_degree: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """All that pricing needs but the calibration."""

    workloads: tuple[Workload, ...]
    clusters: tuple[Cluster, ...]
    runtimes: tuple[Runtime, ...]
    pairs: tuple[tuple[str, str, str], ...]  # (runtime as calibrated, GPU family, GPU)
    plans: PlanTable
    workload: IntArray | None  # per plan; None: all use the first
    cluster: IntArray | None
    cells: Cells
    layouts: Layouts
    rings: Rings
    layout: IntArray  # per plan
    ring: IntArray  # per plan


def pack(
    workloads: Sequence[Workload],
    clusters: Sequence[Cluster],
    plans: PlanTable,
    workload: IntArray | None = None,
    cluster: IntArray | None = None,
) -> Packed:
    """Flatten plans.

    Args:
        workloads: distinct workloads.
        clusters: distinct clusters.
        plans: what to price.
        workload: index of each plan's workload; None: all use the first.
        cluster: index of each plan's cluster.

    Raises:
        ValueError: no plans, an unknown runtime, or a device without a rate for the dtype.
    """
    if len(plans) == 0:
        raise ValueError("no plans to price")
    zeros = np.zeros(len(plans), dtype=np.int64)
    w, c = (zeros if index is None else index for index in (workload, cluster))
    runtimes = tuple(load_runtime(name) for name in plans.runtime_names)
    devices = list(dict.fromkeys((x.device.family, x.device.name) for x in clusters))
    pairs = tuple((r.calibrated_as or r.name, *d) for r in runtimes for d in devices)
    device = np.array([devices.index((x.device.family, x.device.name)) for x in clusters])
    keys = (w, c, plans.runtime, plans.tp_degree, plans.cp_degree, plans.ep_degree, plans.micro_batch, plans.sequence_parallel)
    first, cell_of_plan = distinct(*keys)
    cells = _cells(
        workloads=workloads, clusters=clusters, runtimes=runtimes, plans=plans.take(first), w=w[first], c=c[first], device=device
    )
    layout_first, layout = distinct(cell_of_plan, plans.pp_degree, plans.virtual_stages, plans.recompute)
    layouts = _layouts(workloads, runtimes, cells, plans.take(layout_first), cell_of_plan[layout_first])
    ring_keys = (c, plans.runtime, plans.dp_replicate_degree, plans.dp_shard_degree, plans.tp_degree, plans.cp_degree, plans.ep_degree)
    ring_first, ring = distinct(*ring_keys)
    rings = _rings(plans.take(ring_first), c[ring_first], device)
    return Packed(
        workloads=tuple(workloads), clusters=tuple(clusters), runtimes=runtimes, pairs=pairs, plans=plans,
        workload=workload, cluster=cluster, cells=cells, layouts=layouts,
        rings=rings, layout=layout, ring=ring,
    )  # fmt: skip


def _rings(plans: PlanTable, cluster: IntArray, device: IntArray) -> Rings:
    num_devices = int(device.max()) + 1
    f = {
        name: getattr(plans, name).astype(np.float64)
        for name in ("dp_replicate_degree", "dp_shard_degree", "tp_degree", "cp_degree", "ep_degree")
    }
    shard = f["dp_shard_degree"] * f["cp_degree"]
    data = shard * f["dp_replicate_degree"]
    return Rings(
        pair=plans.runtime * num_devices + device[cluster], cluster=cluster, shard_ranks=shard, replicate_ranks=f["dp_replicate_degree"],
        data_ranks=data, expert_ranks=np.maximum(data / f["ep_degree"], 1.0), tp_degree=f["tp_degree"], ep_degree=f["ep_degree"],
    )  # fmt: skip


def _joined(workloads: Sequence[Workload]) -> tuple[OpTable, IntArray, IntArray, IntArray]:
    """Operators of all workloads in one table; the group number of each; first operator and number of operators of each workload."""
    tables = [(g.ops, i) for w in workloads for i, g in enumerate(w.groups)]
    columns = {name: np.concatenate([getattr(t, name) for t, _ in tables]) for name in OpTable.__dataclass_fields__}
    group = np.repeat([i for _, i in tables], [len(t) for t, _ in tables])
    counts = np.array([sum(len(g.ops) for g in w.groups) for w in workloads])
    return OpTable(**columns), group, np.cumsum(counts) - counts, counts


def _cells(
    *, workloads: Sequence[Workload], clusters: Sequence[Cluster], runtimes: Sequence[Runtime], plans: PlanTable, w: IntArray, c: IntArray,
    device: IntArray,
) -> Cells:  # fmt: skip
    table, op_group, op_start, op_count = _joined(workloads)
    at, cell = ragged(op_start[w], op_count[w])
    ops = OpTable(**{name: getattr(table, name)[at] for name in OpTable.__dataclass_fields__})
    num_groups = np.array([len(x.groups) for x in workloads])
    unit_start = np.cumsum(num_groups[w]) - num_groups[w]
    unit = unit_start[cell] + op_group[at]
    group_at, unit_cell = ragged((np.cumsum(num_groups) - num_groups)[w], num_groups[w])
    g = {name: values[group_at] for name, values in _group_columns(workloads).items()}
    tp, cp, ep, micro = (getattr(plans, n).astype(np.float64) for n in ("tp_degree", "cp_degree", "ep_degree", "micro_batch"))
    samples, sequence = micro / cp, plans.sequence_parallel.astype(np.float64)
    num_experts = np.array([x.num_experts for x in workloads])[w][cell]
    expert = (ops.kind == GEMM) & (ops.op_class != ATTENTION_CLASS) & (num_experts > 1) & (ops.batch == num_experts)
    shapes = device_shapes(
        ops, Split(samples=samples[cell], tp_degree=tp[cell], ep_degree=ep[cell], sequence_parallel=sequence[cell]),
        expert=expert.astype(np.int64), **_rates(workloads=workloads, clusters=clusters, w=w, c=c, cell=cell, can_be_low=_is_weight_product(ops) & (g["can_recompute"][unit] > 0)),
    )  # fmt: skip
    fused = np.array([r.memory_traffic_share for r in runtimes])[plans.runtime][cell]
    in_block = (shapes.flops == 0) & (g["can_recompute"][unit] > 0)
    kernels = ops.num_kernels * np.array([r.kernels_share for r in runtimes])[plans.runtime][cell]
    selective = np.array([r.selective_share if r.selective == "share" else 0.0 for r in runtimes])
    measured = np.array([x.measured_host_s_per_kernel or 0.0 for x in workloads])
    kernels = kernels * _softmax_launches(workloads=workloads, runtimes=runtimes, plans=plans, w=w, ops=ops, cell=cell)
    pair = plans.runtime * (int(device.max()) + 1) + device[c]
    return Cells(
        shapes=dataclasses.replace(shapes, moved_bytes=shapes.moved_bytes * np.where(in_block, fused, 1.0)), op_pair=pair[cell],
        op_unit=unit, op_phase=ops.phase, op_attention=(ops.op_class == ATTENTION_CLASS) & (ops.phase == FORWARD),
        num_units=len(unit_cell), unit_start=unit_start, unit_cell=unit_cell,
        **_launches(unit, ops, kernels, len(unit_cell)), selective_share=selective[plans.runtime][unit_cell], measured_host_s=measured[w][unit_cell],
        **_unit_sizes(g, tp[unit_cell], ep[unit_cell], samples[unit_cell]), workload=w, cluster=c, pair=pair,
        tp_degree=tp, cp_degree=cp, ep_degree=ep, regathers=np.array([r.regathers_weight_gradient for r in runtimes])[plans.runtime],
        sequence_parallel=sequence,
    )  # fmt: skip


def _softmax_launches(
    *, workloads: Sequence[Workload], runtimes: Sequence[Runtime], plans: PlanTable, w: IntArray, ops: OpTable, cell: IntArray
) -> FloatArray:  # fmt: skip
    """Factor on the launches of unfused softmax where the runtime's fused kernel refuses the shape and single operators run.

    Megatron-LM's FusedScaleMaskSoftmax.is_kernel_available: heads x samples of a device must be a multiple of 4.
    """
    multiple = np.array([r.fused_softmax_multiple for r in runtimes])[plans.runtime]
    heads = np.array([float(x.num_heads) for x in workloads])[w] * plans.micro_batch / plans.tp_degree
    refused = (multiple > 0) & (heads % np.maximum(multiple, 1.0) > 0)
    softmax = (ops.kind == MEMORY) & (ops.op_class == ATTENTION_CLASS)
    return np.where(softmax & refused[cell], _UNFUSED_SOFTMAX_LAUNCHES, 1.0)


def _is_weight_product(ops: OpTable) -> BoolArray:
    return np.asarray((ops.kind == GEMM) & (ops.op_class != ATTENTION_CLASS))


def _launches(unit: IntArray, ops: OpTable, kernels: FloatArray, num_units: int) -> dict[str, FloatArray]:
    per_phase = np.bincount(unit * 3 + ops.phase, weights=kernels, minlength=3 * num_units).reshape(-1, 3)
    attention = np.where((ops.op_class == ATTENTION_CLASS) & (ops.phase == FORWARD), kernels, 0.0)
    return {
        "forward_kernels": per_phase[:, 0], "backward_kernels": per_phase[:, 1],
        "attention_kernels": np.bincount(unit, weights=attention, minlength=num_units),
    }  # fmt: skip


def _rates(
    *, workloads: Sequence[Workload], clusters: Sequence[Cluster], w: IntArray, c: IntArray, cell: IntArray, can_be_low: BoolArray
) -> dict[str, Any]:  # fmt: skip
    """Peak rates per operator. Low precision is for weight products of repeated blocks: attention and head stay in 16 bits."""
    low = np.array([x.compute_dtype in ("fp8", "fp4") for x in workloads])
    plain = [x.compute_dtype if x.compute_dtype not in ("fp8", "fp4") else "bf16" for x in workloads]
    used = {(int(i), int(j)) for i, j in zip(w, c, strict=True)}
    peaks = np.zeros((3, len(workloads), len(clusters)))
    for i, j in used:
        device = clusters[j].device
        peaks[:, i, j] = (peak_flops_per_s(device, plain[i]), peak_flops_per_s(device, workloads[i].compute_dtype),
                          peak_flops_per_s(device, plain[i], convolution=True))  # fmt: skip
    wo, co = w[cell], c[cell]
    in_low = low[wo] & can_be_low
    elements = np.array([ELEMENT_BYTES[d] for d in plain])
    scalar = np.array([[x.compute_dtype == "fp32" and (i, j) in used for j in range(len(clusters))] for i, x in enumerate(workloads)])
    scalar_convolution = scalar & (peaks[2] == peaks[0])
    return {
        "peaks": (np.where(in_low, peaks[1, wo, co], peaks[0, wo, co]), peaks[2, wo, co]), "low_precision": in_low.astype(np.int64),
        "scalar": (scalar[wo, co], scalar_convolution[wo, co]),
        "memory_bytes_per_s": np.array([x.device.memory_bytes_per_s for x in clusters])[co],
        "num_sms": np.array([float(x.device.num_multiprocessors) for x in clusters])[co], "element_bytes": elements[wo],
    }  # fmt: skip


def _group_columns(workloads: Sequence[Workload]) -> dict[str, FloatArray]:
    names = (
        "num_params",
        "num_trainable_params",
        "num_tp_params",
        "num_expert_params",
        "boundary_bytes",
        "num_tp_collectives",
        "can_recompute",
    )
    out = {name: np.array([float(getattr(g, name)) for w in workloads for g in w.groups]) for name in names}
    out["num_layers"] = np.array([float(g.num_layers) for w in workloads for g in w.groups])
    sends = [
        2.0 * w.tokens_per_sample * w.num_active_experts * w.hidden_size * (g.num_expert_params > 0) for w in workloads for g in w.groups
    ]
    out["all_to_all_bytes"] = np.array(sends)
    has_attention = [bool((g.ops.op_class == ATTENTION_CLASS).any()) for w in workloads for g in w.groups]
    kv = [4.0 * w.tokens_per_sample * w.hidden_size * w.num_kv_heads / max(w.num_heads, 1) for w in workloads for _ in w.groups]
    out["context_bytes"] = np.array(kv) * np.array(has_attention)
    return out


def _unit_sizes(g: dict[str, FloatArray], tp: FloatArray, ep: FloatArray, samples: FloatArray) -> dict[str, FloatArray]:
    split = g["num_tp_params"] - g["num_expert_params"]
    return {
        "collectives": np.where(tp > 1, g["num_tp_collectives"], 0.0), "boundary_bytes": g["boundary_bytes"] * samples,
        "all_to_all_bytes": g["all_to_all_bytes"] * samples, "context_bytes": g["context_bytes"] * samples / tp,
        "dense_params": np.maximum(split, 0.0) / tp + (g["num_params"] - np.maximum(g["num_tp_params"], g["num_expert_params"])),
        "expert_params": g["num_expert_params"] / (tp * ep), "num_layers": g["num_layers"], "can_recompute": g["can_recompute"],
        "trainable_share": g["num_trainable_params"] / np.maximum(g["num_params"], 1.0),
    }  # fmt: skip


def _layouts(workloads: Sequence[Workload], runtimes: Sequence[Runtime], cells: Cells, plans: PlanTable, cell: IntArray) -> Layouts:
    cut = np.array([PIPELINE_CUTS.index(r.pipeline_cut) for r in runtimes])[plans.runtime]
    first, which = distinct(cells.workload[cell], plans.pp_degree, plans.virtual_stages, cut)
    templates = [_template(workloads[cells.workload[cell[i]]], int(plans.pp_degree[i]), int(plans.virtual_stages[i]), PIPELINE_CUTS[cut[i]])
                 for i in first]  # fmt: skip
    sizes = np.array([len(t[0]) for t in templates])
    at, layout = ragged((np.cumsum(sizes) - sizes)[which], sizes[which])
    rank, group, count = (np.concatenate([t[i] for t in templates])[at] for i in range(3))
    rank_start = np.cumsum(plans.pp_degree) - plans.pp_degree
    unit = cells.unit_start[cell][layout] + group
    again = count * cells.can_recompute[unit]
    mode = plans.recompute[layout]
    boundary = np.array([t[3] for t in templates])[which]
    return Layouts(
        cell=cell, num_ranks=plans.pp_degree, virtual_stages=plans.virtual_stages.astype(np.float64), rank_start=rank_start,
        rank_layout=np.repeat(np.arange(len(cell)), plans.pp_degree), entry_rank=rank_start[layout] + rank, entry_unit=unit,
        entry_count=count.astype(np.float64), entry_full=np.where(mode == FULL, again, 0.0),
        entry_selective=np.where(mode == SELECTIVE, again, 0.0), boundary_unit=cells.unit_start[cell] + boundary,
    )  # fmt: skip


def _template(workload: Workload, num_ranks: int, virtual_stages: int, cut: str) -> tuple[IntArray, IntArray, IntArray, int]:
    """Rank, group and count of the non-empty parts of each pipeline rank, and the group with the largest output at a cut."""
    split = stage_split(workload, num_ranks * virtual_stages, cut=cut)
    counts = split.counts.reshape(virtual_stages, num_ranks, -1).sum(axis=0)
    rank, group = np.nonzero(counts)
    outputs = np.array([g.boundary_bytes for g in workload.groups])
    largest = int(split.boundary_group[np.argmax(outputs[split.boundary_group])]) if len(split.boundary_group) else 0
    return rank.astype(np.int64), group.astype(np.int64), counts[rank, group], largest
