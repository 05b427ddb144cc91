"""The last step of pricing: seconds of plans from the prices of their layouts and communication groups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_models.pack import Packed
from cost_models.quirks import quirk_seconds, stalled_transfers
from cost_models.terms import communication, optimizer, pipeline
from cost_models.types import FloatArray, IntArray, PlanTable

Constants = dict[str, FloatArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCosts:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCosts:
    """Prices of each set of data-parallel groups."""

    shard: communication.Ring
    replicate: communication.Ring
    data: communication.Ring  # both together
    experts: communication.Ring
    inside_s_per_byte: FloatArray  # transfers between pipeline stages
    across_s_per_byte: FloatArray


def at_pair(constants: Constants, pair: IntArray) -> Constants:
    """Constants of each element; a single pair stays an array of one, which broadcasts."""
    return constants if len(next(iter(constants.values()))) == 1 else {name: values[pair] for name, values in constants.items()}


def machine_of(packed: Packed, cluster: IntArray) -> communication.Machine:
    """Figures of each element's cluster; of a single cluster arrays of one, which broadcast."""

    def of(values: list[float]) -> FloatArray:
        return np.array(values) if len(values) == 1 else np.array(values)[cluster]

    c = packed.clusters
    return communication.Machine(
        gpus_per_node=of([float(x.gpus_per_node) for x in c]), intra_bytes_per_s=of([x.intra.bytes_per_s for x in c]),
        inter_bytes_per_s=of([x.inter.bytes_per_s for x in c]), intra_latency_s=of([x.intra.latency_s for x in c]),
        inter_latency_s=of([x.inter.latency_s for x in c]),
        over_pcie=of([float(x.intra.kind == "pcie") for x in c]), over_ethernet=of([float(x.inter.kind == "ethernet") for x in c]),
    )  # fmt: skip


def price_rings(packed: Packed, constants: Constants) -> RingCosts:
    """Prices of the plans' communication groups."""
    rings = packed.rings
    k, machine = at_pair(constants, rings.pair), machine_of(packed, rings.cluster)
    near = np.zeros(len(rings.pair))
    return RingCosts(
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
    state_bytes: FloatArray  # with the master copy
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
    bytes_of = [[x.optimizer.state_bytes_per_param, x.master_bytes, x.param_bytes, x.grad_bytes] for x in w]
    update = optimizer.optimizer_bytes_per_param(*np.array(bytes_of).T).tolist()
    return _Columns(
        hidden_size=per([x.hidden_size for x in w], i), gather_bytes=per([4.0 if x.compute_dtype in ("fp32", "tf32") else 2.0 for x in w], i),
        param_bytes=per([x.param_bytes for x in w], i), grad_bytes=per([x.grad_bytes for x in w], i),
        state_bytes=per([x.optimizer.state_bytes_per_param + x.master_bytes for x in w], i), update_bytes=per(update, i),
        optimizer_kernels=per([x.optimizer.num_kernels for x in w], i), input_bytes=per([x.input_bytes for x in w], i),
        dp_overlap=per([x.dp_overlap for x in r], n), zero_overlap=per([x.zero_overlap for x in r], n),
        reduce_bytes=per([x.gradient_reduce_bytes for x in r], n), fsdp_reduce_bytes=per([x.fsdp_reduce_bytes for x in r], n),
        fsdp_gathers=per([x.fsdp_gathers for x in r], n), every_micro_batch=per([x.reduces_every_micro_batch for x in r], n),
        accumulate_bytes=per([x.accumulate_bytes_per_param for x in r], n), memory_bytes_per_s=per([x.device.memory_bytes_per_s for x in c], j),
        host_bytes_per_s=per([x.host_bytes_per_s for x in c], j), gpus_per_node=per([float(x.gpus_per_node) for x in c], j),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Some consecutive plans with everything their prices gather."""

    plans: PlanTable
    x: _Columns
    k: Constants
    rings: RingCosts
    ring: IntArray
    shard_ranks: FloatArray
    dense: FloatArray  # parameters on one device
    expert: FloatArray
    trainable: FloatArray  # share of them
    num_micro: FloatArray
    memory_bytes_per_s: FloatArray  # achieved


def _part(packed: Packed, constants: Constants, ranks: RankCosts, rings: RingCosts, part: slice) -> _Part:
    names = (name for name in PlanTable.__dataclass_fields__ if name != "runtime_names")
    plans = PlanTable(**{name: getattr(packed.plans, name)[part] for name in names}, runtime_names=packed.plans.runtime_names)
    at, ring, x = packed.layout[part], packed.ring[part], _columns(packed, part)
    k = at_pair(constants, packed.rings.pair[ring])
    return _Part(
        plans=plans, x=x, k=k, rings=rings, ring=ring, shard_ranks=packed.rings.shard_ranks[ring], dense=ranks.dense_params[at],
        expert=ranks.expert_params[at], trainable=ranks.trainable_share[at], num_micro=plans.num_microbatches.astype(np.float64),
        memory_bytes_per_s=x.memory_bytes_per_s * k["memory_rate_share"],
    )  # fmt: skip


def price_plans(packed: Packed, constants: Constants, ranks: RankCosts, rings: RingCosts, part: slice) -> dict[str, FloatArray]:
    """Seconds by part of some consecutive plans."""
    p, at = _part(packed, constants, ranks, rings, part), packed.layout[part]
    again, link, host = ranks.recompute_s[at], ranks.link_s[at], ranks.host_s[at]
    work = ranks.compute_s[at] + p.x.accumulate_bytes * (p.dense + p.expert) * p.trainable / p.memory_bytes_per_s
    sharding = _sharding_s(p, ranks.num_layers[at], work + again)
    transfers = _transfers_s(p, ranks.boundary_bytes[at])
    quirks = quirk_seconds(packed.runtimes, p.plans, gpus_per_node=p.x.gpus_per_node, hidden_size=p.x.hidden_size)
    if quirks is not None:
        transfers = transfers + quirks.transfer_s * stalled_transfers(p.plans)
    device = work + again + link + sharding
    busy = pipeline.blend(device, host + p.k["host_s_per_micro_batch"])
    if quirks is not None:
        busy = np.maximum(busy, quirks.layer_floor_s * ranks.blocks[at] + host)
    on_device, on_host = _updates_s(p)
    parts = {
        "compute": p.num_micro * work, "host_overhead": p.num_micro * (busy - device), "recompute": p.num_micro * again,
        "tp_communication": p.num_micro * link,
        "pipeline_bubble": ranks.others_s[at] * (busy / ranks.busy_s[at]) / p.plans.virtual_stages, "pipeline_p2p": transfers,
        "dp_communication": _reduction_s(p, busy), "fsdp_communication": p.num_micro * sharding, "optimizer": on_device, "offload": on_host,
        "data_loading": p.num_micro * p.plans.micro_batch * p.x.input_bytes / p.x.host_bytes_per_s,
    }  # fmt: skip
    nodes = np.ceil(packed.rings.data_ranks[p.ring] * p.plans.tp_degree * p.plans.pp_degree / p.x.gpus_per_node)
    total = sum(parts.values())
    parts["fixed"] = p.k["step_s"] + total * optimizer.straggler_share(nodes, p.k["straggler_share"])
    return parts


def _sharding_s(p: _Part, num_layers: FloatArray, compute_s: FloatArray) -> FloatArray:
    """Exposed FSDP traffic of one micro-batch: parameters gathered for forward and backward, gradients scattered, module by module."""
    full_shard = (p.plans.zero_stage >= 3) & (p.shard_ranks > 1)
    if not full_shard.any():
        return np.zeros(len(p.plans))
    latency_s, s_per_byte = p.rings.shard.latency_s[p.ring], p.rings.shard.s_per_byte[p.ring]
    num_bytes = (p.dense + p.expert) * (p.x.fsdp_gathers * p.x.gather_bytes + p.trainable * p.x.fsdp_reduce_bytes)
    traffic_s = (p.x.fsdp_gathers + 1.0) * num_layers * latency_s + num_bytes * s_per_byte
    return np.where(full_shard, communication.exposed_sharding_s(traffic_s, compute_s, p.k), 0.0)


def _transfers_s(p: _Part, boundary_bytes: FloatArray) -> FloatArray:
    """Point-to-point transfers between stages; with sequence parallelism each tensor rank sends its part."""
    plans = p.plans
    if int(plans.pp_degree.max()) == 1:
        return np.zeros(len(plans))
    world = plans.dp_replicate_degree * plans.dp_shard_degree * plans.tp_degree * plans.cp_degree * plans.pp_degree
    s_per_byte = np.where(world > p.x.gpus_per_node, p.rings.across_s_per_byte[p.ring], p.rings.inside_s_per_byte[p.ring])
    one_s = p.k["p2p_latency_s"] + boundary_bytes / np.where(plans.sequence_parallel > 0, plans.tp_degree, 1.0) * s_per_byte
    return pipeline.transfers_s(one_s, p.num_micro, plans.pp_degree, plans.virtual_stages)


def _updates_s(p: _Part) -> tuple[FloatArray, FloatArray]:
    """The optimizer step on the device, or on the host where states are offloaded."""
    updated, zero = (p.dense + p.expert) * p.trainable, p.plans.zero_stage
    mine = updated / np.where(zero >= 1, p.shard_ranks, 1.0)
    update_s = optimizer.optimizer_s(mine, p.k["optimizer_traffic"] * p.x.update_bytes, p.memory_bytes_per_s)
    whole_gradients_s = np.where(zero < 2, updated - mine, 0.0) * 2 * p.x.grad_bytes / p.memory_bytes_per_s
    on_device = np.maximum(update_s + whole_gradients_s, p.x.optimizer_kernels * p.k["host_s_per_kernel"])
    offloaded = p.plans.offload > 0
    if not offloaded.any():
        return on_device, np.zeros(len(p.plans))
    on_host = optimizer.offload_s(
        mine, copied_bytes=p.x.grad_bytes + p.x.param_bytes, touched_bytes=2 * p.x.state_bytes + p.x.grad_bytes + p.x.param_bytes,
        host_bytes_per_s=p.x.host_bytes_per_s, cpu_bytes_per_s=p.k["cpu_optimizer_bytes_per_s"],
    )  # fmt: skip
    streamed = optimizer.streamed_s(
        (p.dense + p.expert) / p.shard_ranks, p.num_micro, param_bytes=p.x.param_bytes, grad_bytes=p.x.grad_bytes,
        host_bytes_per_s=p.x.host_bytes_per_s,
    )  # fmt: skip
    on_host = on_host + np.where(zero >= 3, streamed, 0.0)
    return np.where(offloaded, 0.0, on_device), np.where(offloaded, on_host, 0.0)


def _reduction_s(p: _Part, busy_s: FloatArray) -> FloatArray:
    """Exposed seconds of the gradient reduction: all-reduce; or scatter, gather, and all-reduce of shards between replicas."""
    zero, ring, rings = p.plans.zero_stage, p.ring, p.rings
    grads = p.dense * p.trainable
    both_ways = 2 * p.k["all_reduce_discount"]
    shard_latency_s, shard_s_per_byte = rings.shard.latency_s[ring], rings.shard.s_per_byte[ring]
    scatter = shard_latency_s + grads * p.x.reduce_bytes * shard_s_per_byte
    gather = shard_latency_s + grads * p.x.gather_bytes * shard_s_per_byte
    replicas = both_ways * (rings.replicate.latency_s[ring] + grads * p.x.reduce_bytes / p.shard_ranks * rings.replicate.s_per_byte[ring])
    whole = both_ways * (rings.data.latency_s[ring] + grads * p.x.reduce_bytes * rings.data.s_per_byte[ring])
    once = np.where(zero == 0, whole, replicas + np.where(zero < 3, scatter + gather, 0.0))
    if np.any(p.expert):  # banks of experts are equal on fewer ranks: 4-byte gradients one way, 2-byte weights back
        banks = rings.experts.latency_s[ring] + p.expert * p.trainable * 6.0 * rings.experts.s_per_byte[ring]
        once = once + np.where((zero < 3) & (p.expert > 0), banks, 0.0)
    backward_s = 2.0 / 3.0 * busy_s
    overlap = np.where(zero == 0, p.x.dp_overlap, p.x.zero_overlap)
    exposed = communication.exposed_reduction_s(once, backward_s, overlap, p.k)
    if not np.any(p.x.every_micro_batch):
        return exposed
    repeats = np.where(zero == 2, p.x.every_micro_batch * (p.num_micro - 1.0), 0.0)
    return exposed + repeats * communication.exposed_reduction_s(scatter, backward_s, overlap, p.k)
