"""Cells: what one device executes for one layer of a plan, as flat arrays of operators. Independent of the calibration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.numbering import ragged
from cost_models.terms.compute import (
    ATTENTION,
    ATTENTION_CLASS,
    CONVOLUTION,
    ELEMENT_BYTES,
    FORWARD,
    GEMM,
    MEMORY,
    OpShapes,
    Split,
    attention_kernel_share,
    device_shapes,
    keeps_order,
    peak_flops_per_s,
)  # fmt: skip
from cost_models.terms.volumes import gather_bytes
from cost_models.traits import Runtime
from cost_models.types import Cluster, FloatArray, IntArray, OpTable, PlanTable, Workload

_UNFUSED_SOFTMAX_LAUNCHES = 4.0  # scale, mask, cast, softmax, cast back and their temporaries instead of one kernel
#: fp32 numbers a position that a cross-entropy of cut logits sums over the ranks: largest logit, sum of exponentials, the loss (`loss_parallel`).
LOSS_SUMS = 3
ADAPTER_COLUMNS = ("num_row_adapters", "num_column_adapters", "row_adapter_bytes", "column_adapter_bytes")
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Cells and their operators. A *unit* is one group of a cell's workload; its sizes are per repeat and for the cell's samples."""

    shapes: OpShapes  # per operator
    op_pair: IntArray
    op_unit: IntArray
    op_phase: IntArray
    op_selective: FloatArray  # share of an operator that selective recomputation runs again
    num_units: int
    unit_start: IntArray  # per cell: its first unit
    unit_cell: IntArray  # per unit, as all below
    forward_kernels: FloatArray  # launches
    backward_kernels: FloatArray
    selective_kernels: FloatArray  # launched again by selective recomputation
    selective_sums: FloatArray  # 1 where selective recomputation repeats the sums over tensor ranks
    selective_gathers: FloatArray  # the same of the gathers of divided sequences
    measured_host_s: FloatArray  # per kernel, from a profile; 0: not measured
    collectives: FloatArray  # tensor-parallel all-reduces in the forward pass; 0 without tensor parallelism
    edges: FloatArray  # gathers of a divided sequence where it must be whole, in the forward pass; sequence parallelism only
    in_sequence: FloatArray  # 1 where sequence parallelism divides what lies between the layers' products
    logits_bytes: FloatArray  # gathered over the vocabulary
    loss_bytes: FloatArray  # summed over the tensor ranks instead, in LOSS_SUMS calls, where a cross-entropy takes its logits cut
    whole_tensors: FloatArray  # trained parameters that every tensor rank holds whole and uses on its part of the sequence
    whole_bytes: FloatArray  # of their gradients
    num_row_adapters: FloatArray  # low-rank products that sum outputs forward
    num_column_adapters: FloatArray  # and input gradients backward
    row_adapter_bytes: FloatArray
    column_adapter_bytes: FloatArray
    boundary_bytes: FloatArray  # whole activation at the unit's output
    token_bytes: FloatArray  # sent to experts, one copy of each token, one direction; 0 without experts
    context_bytes: FloatArray  # keys and values of one context rank
    dense_params: FloatArray  # on one device
    expert_params: FloatArray
    trainable_share: FloatArray
    num_layers: FloatArray
    can_recompute: FloatArray
    is_unit: FloatArray  # sharded and gathered layer by layer; 0: part of the root
    workload: IntArray  # per cell, as all below
    cluster: IntArray
    pair: IntArray
    tp_degree: FloatArray
    cp_degree: FloatArray
    ep_degree: FloatArray
    regathers: FloatArray
    early_stop: FloatArray
    reduces_whole: FloatArray
    sequence_parallel: FloatArray
    num_experts: FloatArray
    num_active_experts: FloatArray
    routed_share: FloatArray
    once_per_node: FloatArray  # 1 where a token goes to each node once, whatever the number of its experts there
    tp_overlap: FloatArray  # 1 where tensor-parallel collectives run under products


def _joined(workloads: Sequence[Workload]) -> tuple[OpTable, IntArray, IntArray, IntArray]:
    """Operators of all workloads in one table; the group number of each; first operator and number of operators of each workload."""
    tables = [(g.ops, i) for w in workloads for i, g in enumerate(w.groups)]
    columns = {name: np.concatenate([getattr(t, name) for t, _ in tables]) for name in OpTable.__dataclass_fields__}
    group = np.repeat([i for _, i in tables], [len(t) for t, _ in tables])
    counts = np.array([sum(len(g.ops) for g in w.groups) for w in workloads])
    return OpTable(**columns), group, np.cumsum(counts) - counts, counts


def make_cells(
    *, workloads: Sequence[Workload], clusters: Sequence[Cluster], runtimes: Sequence[Runtime], plans: PlanTable, w: IntArray, c: IntArray,
    device: IntArray, root_whole: IntArray,
) -> Cells:  # fmt: skip
    """Cells of some plans.

    Args:
        workloads: distinct workloads.
        clusters: distinct clusters.
        runtimes: of the plans, by their runtime index.
        plans: one plan per cell.
        w: workload of each plan.
        c: cluster of each plan.
        device: number of each cluster's device.
        root_whole: 1 where tensor parallelism leaves what lies outside the layers whole.
    """
    table, op_group, op_start, op_count = _joined(workloads)
    at, cell = ragged(op_start[w], op_count[w])
    ops = OpTable(**{name: getattr(table, name)[at] for name in OpTable.__dataclass_fields__})
    num_groups = np.array([len(x.groups) for x in workloads])
    unit_start = np.cumsum(num_groups[w]) - num_groups[w]
    unit = unit_start[cell] + op_group[at]
    group_at, unit_cell = ragged((np.cumsum(num_groups) - num_groups)[w], num_groups[w])
    g = {name: values[group_at] for name, values in group_columns(workloads).items()}
    tp, cp, ep, micro = (getattr(plans, n).astype(np.float64) for n in ("tp_degree", "cp_degree", "ep_degree", "micro_batch"))
    samples, sequence = micro / cp, plans.sequence_parallel.astype(np.float64)
    outside = {
        "whole_outside": np.array([r.whole_outside for r in runtimes])[plans.runtime][unit_cell],
        "root_whole": root_whole[unit_cell],
    }
    sizes = unit_sizes(g, tp[unit_cell], ep[unit_cell], samples[unit_cell], **outside)
    tp_here = tensor_degree(g, tp[unit_cell], outside["root_whole"])
    num_experts = np.array([x.num_experts for x in workloads])[w][cell]
    has_maps = _has_maps(workloads)[group_at]
    expert = (ops.kind == GEMM) & (ops.op_class != ATTENTION_CLASS) & (num_experts > 1) & (ops.batch == num_experts)
    shapes = device_shapes(
        ops, Split(samples=samples[cell], tp_degree=tp_here[unit], ep_degree=ep[cell], sequence_parallel=sequence[cell] * sizes["in_sequence"][unit]),
        expert=expert.astype(np.int64), in_maps=has_maps[unit], **_rates(workloads=workloads, clusters=clusters, w=w, c=c, cell=cell, can_be_low=_is_weight_product(ops) & (g["can_recompute"][unit] > 0)),
    )  # fmt: skip
    fused = np.array([r.memory_traffic_share for r in runtimes])[plans.runtime][cell]
    in_block = (shapes.flops == 0) & (g["can_recompute"][unit] > 0)
    kernels = ops.num_kernels * np.array([r.kernels_share for r in runtimes])[plans.runtime][cell]
    repeats = _selective_passes(runtimes)[plans.runtime][unit_cell]
    measured = np.array([x.measured_host_s_per_kernel or 0.0 for x in workloads])
    kernels = kernels * _softmax_launches(workloads=workloads, runtimes=runtimes, plans=plans, w=w, ops=ops, cell=cell)
    pair = plans.runtime * (int(device.max()) + 1) + device[c]
    again = _run_again(runtimes, plans.runtime[cell], ops)
    shapes = dataclasses.replace(
        shapes, moved_bytes=shapes.moved_bytes * np.where(in_block, fused, 1.0),
        peak_flops_per_s=shapes.peak_flops_per_s * _attention_rate(runtimes, clusters, plans.runtime[cell], c[cell], ops),
    )  # fmt: skip
    return Cells(
        shapes=shapes, op_pair=pair[cell],
        op_unit=unit, op_phase=ops.phase, op_selective=again,
        num_units=len(unit_cell), unit_start=unit_start, unit_cell=unit_cell,
        **_launches(unit, ops, kernels, len(unit_cell), again), selective_sums=repeats[:, 0], selective_gathers=repeats[:, 1],
        measured_host_s=measured[w][unit_cell],
        **sizes, workload=w, cluster=c, pair=pair,
        tp_degree=tp, cp_degree=cp, ep_degree=ep, sequence_parallel=sequence, **_of_workload(workloads, w), **_of_runtime(runtimes, plans.runtime),
    )  # fmt: skip


def _has_maps(workloads: Sequence[Workload]) -> BoolArray:
    """Per group of layers: whether memory-bound operators lie between convolutions, or in a model that `keeps_order`."""
    in_order = [keeps_order(x.groups) for x in workloads]
    return np.array([o or bool((g.ops.kind == CONVOLUTION).any()) for x, o in zip(workloads, in_order, strict=True) for g in x.groups])


def _of_workload(workloads: Sequence[Workload], w: IntArray) -> dict[str, FloatArray]:
    return {
        name: np.array([float(getattr(x, name)) for x in workloads])[w] for name in ("num_experts", "num_active_experts", "routed_share")
    }


def _of_runtime(runtimes: Sequence[Runtime], runtime: IntArray) -> dict[str, FloatArray]:
    traits = {
        "regathers": [r.regathers_weight_gradient for r in runtimes], "early_stop": [r.early_stop for r in runtimes],
        "reduces_whole": [r.reduces_whole_gradients for r in runtimes], "once_per_node": [r.dispatches_once_per_node for r in runtimes],
        "tp_overlap": [r.tp_overlap for r in runtimes],
    }  # fmt: skip
    return {name: np.array(values)[runtime] for name, values in traits.items()}


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


def _attention_rate(
    runtimes: Sequence[Runtime], clusters: Sequence[Cluster], runtime: IntArray, cluster: IntArray, ops: OpTable
) -> FloatArray:
    """Factor on the peak rate of fused attention where the runtime's kernels are of an older GPU family; 1 of other operators."""
    share = np.array([[attention_kernel_share(r.attention_kernels, x.device.family) for x in clusters] for r in runtimes])
    return np.where(ops.kind == ATTENTION, share[runtime, cluster], 1.0)


def _is_weight_product(ops: OpTable) -> BoolArray:
    return np.asarray((ops.kind == GEMM) & (ops.op_class != ATTENTION_CLASS))


def _run_again(runtimes: Sequence[Runtime], runtime: IntArray, ops: OpTable) -> FloatArray:
    """Share of each operator that selective recomputation runs again."""
    mode = np.array([r.selective for r in runtimes])[runtime]
    share = np.array([r.selective_share for r in runtimes])[runtime]
    products = np.where(_is_weight_product(ops), share, np.where(ops.kind == ATTENTION, 0.0, 1.0))
    attention = (ops.op_class == ATTENTION_CLASS).astype(np.float64)
    again = np.where(mode == "share", share, np.where(mode == "products", products, attention))
    return np.where(ops.phase == FORWARD, again, 0.0)


def _selective_passes(runtimes: Sequence[Runtime]) -> FloatArray:
    """Whether selective recomputation repeats sums over tensor ranks, and gathers of divided sequences."""
    return np.array([[float(r.selective == "share"), float(r.selective != "attention")] for r in runtimes])


def _launches(unit: IntArray, ops: OpTable, kernels: FloatArray, num_units: int, again: FloatArray) -> dict[str, FloatArray]:
    per_phase = np.bincount(unit * 3 + ops.phase, weights=kernels, minlength=3 * num_units).astype(np.float64).reshape(-1, 3)
    return {
        "forward_kernels": per_phase[:, 0], "backward_kernels": per_phase[:, 1],
        "selective_kernels": np.bincount(unit, weights=again * kernels, minlength=num_units).astype(np.float64),
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


def group_columns(workloads: Sequence[Workload]) -> dict[str, FloatArray]:
    """Sizes of the groups of all workloads, one after the other, for one sample."""
    names = (
        "num_params",
        "num_trainable_params",
        "num_tp_params",
        "num_expert_params",
        "boundary_bytes",
        "num_tp_collectives",
        *ADAPTER_COLUMNS,
        "can_recompute",
        "is_unit",
    )
    out = {name: np.array([float(getattr(g, name)) for w in workloads for g in w.groups]) for name in names}
    whole = [
        [(1.0, p.num_elements * w.grad_bytes) for p in g.param_shapes if p.trainable and p.tp_split == "none"]
        for w in workloads
        for g in w.groups
    ]
    out["whole_tensors"], out["whole_bytes"] = (np.array([sum(t[i] for t in tensors) for tensors in whole]) for i in range(2))
    has_head = np.array([float(w.logits_bytes > 0 and g is w.groups[-1] and g.num_tp_params > 0) for w in workloads for g in w.groups])
    tokens, cuts = np.array([(w.tokens_per_sample, float(w.cuts_loss)) for w in workloads for _ in w.groups]).T
    logits = np.array([w.vocab_size * gather_bytes(w) for w in workloads for _ in w.groups])
    out["logits_bytes"], out["loss_bytes"] = tokens * logits * has_head * (1.0 - cuts), 4.0 * LOSS_SUMS * tokens * has_head * cuts
    out["num_layers"] = np.array([float(g.num_layers) for w in workloads for g in w.groups])
    sends = [2.0 * w.tokens_per_sample * w.hidden_size * (g.num_expert_params > 0) for w in workloads for g in w.groups]
    out["token_bytes"] = np.array(sends)
    has_attention = [bool((g.ops.op_class == ATTENTION_CLASS).any()) for w in workloads for g in w.groups]
    kv = [4.0 * w.tokens_per_sample * w.hidden_size * w.num_kv_heads / max(w.num_heads, 1) for w in workloads for _ in w.groups]
    out["context_bytes"] = np.array(kv) * np.array(has_attention)
    return out


def tensor_degree(g: dict[str, FloatArray], tp: FloatArray, root_whole: FloatArray | IntArray | float) -> FloatArray:
    """Over how many ranks each group is divided."""
    return np.where((g["is_unit"] == 0) & (np.asarray(root_whole) > 0), 1.0, tp)


def unit_sizes(
    g: dict[str, FloatArray], tp: FloatArray, ep: FloatArray, samples: FloatArray, *, whole_outside: FloatArray | float,
    root_whole: FloatArray | IntArray | float,
) -> dict[str, FloatArray]:  # fmt: skip
    """What one device holds and communicates of each group.

    Args:
        g: columns of `group_columns`.
        tp: tensor degree.
        ep: expert degree.
        samples: of a micro-batch on one context rank.
        whole_outside: 1 where sequences and logits are whole outside the layers.
        root_whole: 1 where what lies outside the layers is not divided.
    """
    tp_here, joins = tensor_degree(g, tp, root_whole), (g["is_unit"] == 0) & (np.asarray(whole_outside) > 0)
    split, experts = g["num_tp_params"] - g["num_expert_params"], g["num_expert_params"] / (tp * ep)
    is_bank = np.asarray(ep) > 1  # without expert parallelism experts are reduced and gathered with everything else
    return {
        "collectives": np.where(tp_here > 1, g["num_tp_collectives"], 0.0),
        "whole_tensors": np.where((tp_here > 1) & ~joins, g["whole_tensors"], 0.0),
        "whole_bytes": np.where((tp_here > 1) & ~joins, g["whole_bytes"], 0.0),
        "edges": np.where(joins & (tp > 1), g["num_tp_collectives"], 0.0), "in_sequence": np.where(joins, 0.0, 1.0),
        **{name: np.where(joins & (tp_here > 1), g[name], 0.0) * samples for name in ("logits_bytes", "loss_bytes")},
        **{name: np.where(tp_here > 1, g[name], 0.0) * (samples if "bytes" in name else 1.0) for name in ADAPTER_COLUMNS},
        "boundary_bytes": g["boundary_bytes"] * samples,
        "token_bytes": g["token_bytes"] * samples, "context_bytes": g["context_bytes"] * samples / tp,
        "dense_params": np.maximum(split, 0.0) / tp_here + (g["num_params"] - np.maximum(g["num_tp_params"], g["num_expert_params"]))
        + np.where(is_bank, 0.0, experts),
        "expert_params": np.where(is_bank, experts, 0.0), "num_layers": g["num_layers"], "can_recompute": g["can_recompute"], "is_unit": g["is_unit"],
        "trainable_share": g["num_trainable_params"] / np.maximum(g["num_params"], 1.0),
    }  # fmt: skip
