"""From packed plans and a calibration to seconds: cells, then pipeline stages, then plans. Array arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cost_models.calibrate_io import Calibration
from cost_models.pack import Cells, Packed
from cost_models.quirks import quirk_seconds, stalled_transfers
from cost_models.terms import communication, compute, optimizer, pipeline
from cost_models.types import TIME_PARTS, FloatArray, IntArray, PlanTable

Constants = dict[str, FloatArray]
_CHUNK = 1 << 14  # plans priced together: their arrays stay in the processor's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """Seconds per repeat of each unit, one micro-batch."""

    compute_s: FloatArray  # forward and backward
    forward_s: FloatArray
    selective_s: FloatArray  # run again by selective recomputation
    link_s: FloatArray  # tensor, context and expert collectives
    full_link_s: FloatArray  # of it again under full recomputation
    host_s: FloatArray
    full_host_s: FloatArray
    selective_host_s: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """The slowest pipeline rank of each layout, one micro-batch; and what the others add to the fill."""

    compute_s: FloatArray
    recompute_s: FloatArray
    link_s: FloatArray
    host_s: FloatArray
    busy_s: FloatArray  # the slowest rank, device and host blended
    others_s: FloatArray
    num_layers: FloatArray  # of the slowest rank
    blocks: FloatArray  # repeated layers of the slowest rank
    boundary_bytes: FloatArray
    dense_params: FloatArray  # largest over the ranks, on one device
    expert_params: FloatArray
    trainable_share: FloatArray


def price(packed: Packed, calibration: Calibration, *, anchors: FloatArray | None = None) -> dict[str, FloatArray]:
    """Seconds of every plan by part.

    Args:
        packed: plans as arrays.
        calibration: constants.
        anchors: factor on compute and host seconds per workload, from a measured step; None: no correction.

    Returns:
        Arrays of len(plans) for each name of TIME_PARTS.
    """
    constants = calibration.table(packed.pairs)
    units = _price_units(packed, constants, np.ones(len(packed.workloads)) if anchors is None else anchors)
    ranks = _price_ranks(packed, units)
    rings = _price_rings(packed, constants)
    out = {name: np.empty(len(packed.plans)) for name in TIME_PARTS}
    for start in range(0, len(packed.plans), _CHUNK):
        part = slice(start, start + _CHUNK)
        for name, values in _price_plans(packed, constants, ranks, rings, part).items():
            out[name][part] = values
    return out


def _at(constants: Constants, pair: IntArray) -> Constants:
    """Constants of each element; a single pair stays an array of one, which broadcasts."""
    return constants if len(next(iter(constants.values()))) == 1 else {name: values[pair] for name, values in constants.items()}


def _machine(packed: Packed, cluster: IntArray) -> communication.Machine:
    def of(values: list[float]) -> FloatArray:
        return np.array(values) if len(values) == 1 else np.array(values)[cluster]

    c = packed.clusters
    return communication.Machine(
        gpus_per_node=of([float(x.gpus_per_node) for x in c]), intra_bytes_per_s=of([x.intra.bytes_per_s for x in c]),
        inter_bytes_per_s=of([x.inter.bytes_per_s for x in c]), intra_latency_s=of([x.intra.latency_s for x in c]),
        inter_latency_s=of([x.inter.latency_s for x in c]),
        over_pcie=of([float(x.intra.kind == "pcie") for x in c]),
    )  # fmt: skip


def _price_units(packed: Packed, constants: Constants, anchors: FloatArray) -> _Units:
    cells = packed.cells
    anchor = anchors[cells.workload[cells.unit_cell]]
    op_s = compute.shape_seconds(cells.shapes, constants, cells.op_pair)
    per_phase = np.bincount(cells.op_unit * 3 + cells.op_phase, weights=op_s, minlength=3 * cells.num_units).reshape(-1, 3)
    forward, backward = per_phase[:, 0] * anchor, per_phase[:, 1] * anchor
    attention = np.bincount(cells.op_unit[cells.op_attention], weights=op_s[cells.op_attention], minlength=cells.num_units) * anchor
    k = _at(constants, cells.pair[cells.unit_cell])
    share = cells.selective_share
    link, full_link = _links(packed, k)
    launch = np.where(cells.measured_host_s > 0, cells.measured_host_s, k["host_s_per_kernel"])
    calls = cells.collectives * k["host_s_per_collective"]
    return _Units(
        compute_s=forward + backward, forward_s=forward, selective_s=np.where(share > 0, share * forward, attention),
        link_s=link, full_link_s=full_link, host_s=(launch * (cells.forward_kernels + cells.backward_kernels) + 2 * calls) * anchor,
        full_host_s=(launch * cells.forward_kernels + calls) * anchor,
        selective_host_s=launch * np.where(share > 0, share * cells.forward_kernels, cells.attention_kernels) * anchor,
    )  # fmt: skip


def _links(packed: Packed, k: Mapping[str, FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Seconds per unit of tensor, context and expert collectives: forward and backward, and again under full recomputation.

    An all-reduce is two ring passes; sequence-parallel runtimes gather the input once more for the weight gradient. Context
    parallelism passes keys and values round a ring, three times (forward, backward, their gradient), 30% of it exposed.
    """
    cells: Cells = packed.cells
    of = cells.unit_cell
    machine = _machine(packed, cells.cluster[of])
    tp, cp = cells.tp_degree[of], cells.cp_degree[of]
    one = communication.ring(machine, k, tp, np.ones_like(tp)).seconds(cells.boundary_bytes)
    again = cells.regathers[of] * cells.sequence_parallel[of]
    tensor = one * cells.collectives * (4.0 + again)
    experts = 2.0 * communication.all_to_all_s(machine, k, cells.all_to_all_bytes, cells.ep_degree[of], tp)
    context = 0.9 * np.where(cp > 1, communication.ring(machine, k, cp, tp).seconds(cells.context_bytes * cp), 0.0)
    return tensor + 2.0 * experts + context, one * cells.collectives * 2.0 + experts


def _price_ranks(packed: Packed, units: _Units) -> _Ranks:
    layouts, cells = packed.layouts, packed.cells
    unit, rank = layouts.entry_unit, layouts.entry_rank
    count, full, selective = layouts.entry_count, layouts.entry_full, layouts.entry_selective
    num_ranks = len(layouts.rank_layout)

    def total(values: FloatArray) -> FloatArray:
        return np.bincount(rank, weights=values, minlength=num_ranks)

    work = total(count * units.compute_s[unit])
    again = total(full * units.forward_s[unit] + selective * units.selective_s[unit])
    link = total(count * units.link_s[unit] + full * units.full_link_s[unit])
    host = total(count * units.host_s[unit] + full * units.full_host_s[unit] + selective * units.selective_host_s[unit])
    busy = pipeline.blend(work + again + link, host)
    slowest = pipeline.slowest_rank(busy, layouts.rank_layout, layouts.rank_start)
    at = slowest.rank
    dense, expert = total(count * cells.dense_params[unit]), total(count * cells.expert_params[unit])
    trainable = total(count * (cells.dense_params * cells.trainable_share)[unit]) / np.maximum(dense, 1.0)
    return _Ranks(
        compute_s=work[at], recompute_s=again[at], link_s=link[at], host_s=host[at], busy_s=busy[at], others_s=slowest.others_s,
        num_layers=total(count * cells.num_layers[unit])[at], blocks=total(count * cells.can_recompute[unit])[at],
        boundary_bytes=cells.boundary_bytes[layouts.boundary_unit], dense_params=np.maximum.reduceat(dense, layouts.rank_start),
        expert_params=np.maximum.reduceat(expert, layouts.rank_start), trainable_share=trainable[at],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _RingCosts:
    shard: communication.Ring
    replicate: communication.Ring
    data: communication.Ring  # both together
    experts: communication.Ring
    inside_s_per_byte: FloatArray  # transfers between pipeline stages
    across_s_per_byte: FloatArray


def _price_rings(packed: Packed, constants: Constants) -> _RingCosts:
    rings = packed.rings
    k, machine = _at(constants, rings.pair), _machine(packed, rings.cluster)
    near = np.zeros(len(rings.pair))
    return _RingCosts(
        shard=communication.ring(machine, k, rings.shard_ranks, rings.tp_degree),
        replicate=communication.ring(machine, k, rings.replicate_ranks, rings.tp_degree * rings.shard_ranks),
        data=communication.ring(machine, k, rings.data_ranks, rings.tp_degree),
        experts=communication.ring(machine, k, rings.expert_ranks, rings.tp_degree * rings.ep_degree),
        inside_s_per_byte=communication.transfer_s_per_byte(machine, k, near) + near,
        across_s_per_byte=communication.transfer_s_per_byte(machine, k, near + 1) + near,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Figures of each plan's workload, runtime and cluster; arrays of one element where all plans share them."""

    hidden_size: FloatArray
    gather_bytes: FloatArray  # per parameter element gathered
    param_bytes: FloatArray
    grad_bytes: FloatArray
    state_bytes: FloatArray
    update_bytes: FloatArray  # device traffic per updated parameter
    optimizer_kernels: FloatArray
    input_bytes: FloatArray
    dp_overlap: FloatArray
    zero_overlap: FloatArray
    reduce_bytes: FloatArray
    fsdp_reduce_bytes: FloatArray
    fsdp_gathers: FloatArray
    every_micro_batch: FloatArray
    accumulate_bytes: FloatArray
    memory_bytes_per_s: FloatArray
    host_bytes_per_s: FloatArray
    gpus_per_node: FloatArray


def _columns(packed: Packed, part: slice) -> _Columns:
    def per(values: list[float], index: IntArray | None) -> FloatArray:
        array = np.array(values)
        return array if len(array) == 1 or index is None else array[index[part]]

    w, r, c = packed.workloads, packed.runtimes, packed.clusters
    i, j, n = packed.workload, packed.cluster, packed.plans.runtime
    state = [x.optimizer.state_bytes_per_param for x in w]
    update = optimizer.optimizer_bytes_per_param(
        np.array(state), np.array([x.master_bytes for x in w]), np.array([x.param_bytes for x in w]), np.array([x.grad_bytes for x in w])
    )
    return _Columns(
        hidden_size=per([x.hidden_size for x in w], i), gather_bytes=per([4.0 if x.compute_dtype in ("fp32", "tf32") else 2.0 for x in w], i),
        param_bytes=per([x.param_bytes for x in w], i), grad_bytes=per([x.grad_bytes for x in w], i), state_bytes=per(state, i),
        update_bytes=per(update.tolist(), i), optimizer_kernels=per([x.optimizer.num_kernels for x in w], i),
        input_bytes=per([x.input_bytes for x in w], i), dp_overlap=per([x.dp_overlap for x in r], n),
        zero_overlap=per([x.zero_overlap for x in r], n), reduce_bytes=per([x.gradient_reduce_bytes for x in r], n),
        fsdp_reduce_bytes=per([x.fsdp_reduce_bytes for x in r], n), fsdp_gathers=per([x.fsdp_gathers for x in r], n),
        every_micro_batch=per([x.reduces_every_micro_batch for x in r], n), accumulate_bytes=per([x.accumulate_bytes_per_param for x in r], n),
        memory_bytes_per_s=per([x.device.memory_bytes_per_s for x in c], j), host_bytes_per_s=per([x.host_bytes_per_s for x in c], j),
        gpus_per_node=per([float(x.gpus_per_node) for x in c], j),
    )  # fmt: skip


def _price_plans(packed: Packed, constants: Constants, ranks: _Ranks, rings: _RingCosts, part: slice) -> dict[str, FloatArray]:
    plans = slice_plans(packed.plans, part)
    at, ring = packed.layout[part], packed.ring[part]
    x, k = _columns(packed, part), _at(constants, packed.rings.pair[ring])
    memory_rate = x.memory_bytes_per_s * k["memory_rate_share"]
    num_micro = plans.num_microbatches.astype(np.float64)
    shard_ranks, data_ranks = packed.rings.shard_ranks[ring], packed.rings.data_ranks[ring]
    dense, expert, trainable = ranks.dense_params[at], ranks.expert_params[at], ranks.trainable_share[at]
    full_shard = (plans.zero_stage >= 3) & (shard_ranks > 1)
    work, again, link, host = ranks.compute_s[at], ranks.recompute_s[at], ranks.link_s[at], ranks.host_s[at]
    work = work + x.accumulate_bytes * (dense + expert) * trainable / memory_rate
    gathers = _sharding_s(x, rings, ring, ranks.num_layers[at], dense + expert, trainable)
    sharding = np.where(full_shard, communication.exposed_sharding_s(gathers, work + again, k), 0.0)
    quirks = quirk_seconds(packed.runtimes, plans, gpus_per_node=x.gpus_per_node, hidden_size=x.hidden_size)
    if quirks is not None:
        host = host + quirks.layer_floor_s * ranks.blocks[at]
    host = host + k["host_s_per_micro_batch"]
    device = work + again + link + sharding
    busy = pipeline.blend(device, host)
    transfers = _transfers_s(plans, x, k, rings, ring, ranks.boundary_bytes[at], num_micro)
    if quirks is not None:
        transfers = transfers + quirks.transfer_s * stalled_transfers(plans)
    shards = np.where(plans.zero_stage >= 1, shard_ranks, 1.0)
    reduction = _reduction_s(plans, x, k, rings, ring, (dense * trainable, expert * trainable), shard_ranks, busy)
    updated = (dense + expert) * trainable
    update = optimizer.optimizer_s(updated / shards, k["optimizer_traffic"] * x.update_bytes, memory_rate)
    unsharded = np.where(plans.zero_stage < 2, updated - updated / shards, 0.0) * 2 * x.grad_bytes / memory_rate
    on_host = plans.offload > 0
    offload = optimizer.offload_s(updated / shards, x.grad_bytes, x.param_bytes, x.state_bytes + 4.0, x.host_bytes_per_s,
                                  k["cpu_optimizer_bytes_per_s"])  # fmt: skip
    parts = {
        "compute": num_micro * work, "host_overhead": num_micro * (busy - device), "recompute": num_micro * again,
        "tp_communication": num_micro * link,
        "pipeline_bubble": ranks.others_s[at] * (busy / ranks.busy_s[at]) / plans.virtual_stages,
        "pipeline_p2p": transfers, "dp_communication": reduction, "fsdp_communication": num_micro * sharding,
        "optimizer": np.where(on_host, 0.0, np.maximum(update + unsharded, x.optimizer_kernels * k["host_s_per_kernel"])),
        "offload": np.where(on_host, offload, 0.0), "data_loading": num_micro * plans.micro_batch * x.input_bytes / x.host_bytes_per_s,
    }  # fmt: skip
    nodes = np.ceil(data_ranks * plans.tp_degree * plans.pp_degree / x.gpus_per_node)
    total = sum(parts.values())
    parts["fixed"] = k["step_s"] + total * optimizer.straggler_share(nodes, k["straggler_share"])
    return parts


def slice_plans(plans: PlanTable, part: slice) -> PlanTable:
    """Some consecutive plans, without copying."""
    columns = {name: getattr(plans, name)[part] for name in PlanTable.__dataclass_fields__ if name != "runtime_names"}
    return PlanTable(**columns, runtime_names=plans.runtime_names)


def _sharding_s(
    x: _Columns, rings: _RingCosts, ring: IntArray, num_layers: FloatArray, params: FloatArray, trainable: FloatArray
) -> FloatArray:  # fmt: skip
    """FSDP traffic of one micro-batch: parameters gathered for forward and backward, gradients scattered, module by module."""
    latency, s_per_byte = rings.shard.latency_s[ring], rings.shard.s_per_byte[ring]
    num_bytes = params * (x.fsdp_gathers * x.gather_bytes + trainable * x.fsdp_reduce_bytes)
    return (x.fsdp_gathers + 1.0) * num_layers * latency + num_bytes * s_per_byte


def _transfers_s(
    plans: PlanTable, x: _Columns, k: Constants, rings: _RingCosts, ring: IntArray, boundary_bytes: FloatArray, num_micro: FloatArray
) -> FloatArray:  # fmt: skip
    if int(plans.pp_degree.max()) == 1:
        return np.zeros(len(plans))
    world = plans.dp_replicate_degree * plans.dp_shard_degree * plans.tp_degree * plans.cp_degree * plans.pp_degree
    s_per_byte = np.where(world > x.gpus_per_node, rings.across_s_per_byte[ring], rings.inside_s_per_byte[ring])
    sent = boundary_bytes / np.where(plans.sequence_parallel > 0, plans.tp_degree, 1.0)
    return pipeline.transfers_s(
        sent, s_per_byte, k["p2p_latency_s"], num_micro, plans.pp_degree.astype(np.float64), plans.virtual_stages + 0.0
    )


def _reduction_s(
    plans: PlanTable, x: _Columns, k: Constants, rings: _RingCosts, ring: IntArray, params: tuple[FloatArray, FloatArray],
    shard_ranks: FloatArray, busy_s: FloatArray,
) -> FloatArray:  # fmt: skip
    """Exposed seconds of the gradient reduction: all-reduce; or scatter, gather, and all-reduce of shards between replicas."""
    dense, expert = params
    zero = plans.zero_stage
    shard_lat, shard_spb = rings.shard.latency_s[ring], rings.shard.s_per_byte[ring]
    scatter = shard_lat + dense * x.reduce_bytes * shard_spb
    gather = shard_lat + dense * x.gather_bytes * shard_spb
    replicas = (
        2
        * k["all_reduce_discount"]
        * (rings.replicate.latency_s[ring] + dense * x.reduce_bytes / shard_ranks * rings.replicate.s_per_byte[ring])
    )
    whole = 2 * k["all_reduce_discount"] * (rings.data.latency_s[ring] + dense * x.reduce_bytes * rings.data.s_per_byte[ring])
    banks = np.where(expert > 0, rings.experts.latency_s[ring] + expert * 6.0 * rings.experts.s_per_byte[ring], 0.0)
    once = np.where(zero == 0, whole, replicas + np.where(zero < 3, scatter + gather, 0.0)) + np.where(zero < 3, banks, 0.0)
    backward = 2.0 / 3.0 * busy_s
    overlap = np.where(zero == 0, x.dp_overlap, x.zero_overlap)
    exposed = communication.exposed_reduction_s(once, backward, overlap, k)
    if not np.any(x.every_micro_batch):
        return exposed
    repeats = np.where(zero == 2, x.every_micro_batch * (plans.num_microbatches - 1.0), 0.0)
    return exposed + repeats * communication.exposed_reduction_s(scatter, backward, overlap, k)
