"""The last step of pricing: seconds of kinds of plans from the prices of their layouts and communication groups.

A step's seconds are linear in its number of micro-batches, so plans that differ in nothing else are priced together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_models.cells import BoolArray
from cost_models.pack import Packed
from cost_models.quirks import quirk_seconds, stalled_transfers
from cost_models.seconds import Seconds
from cost_models.terms import communication, optimizer, pipeline, volumes
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
    forward_device_share: FloatArray  # of the slowest rank's device seconds
    forward_host_share: FloatArray  # of its host seconds
    num_units: FloatArray  # sharded one by one on the rank with the most parameters
    root_params: FloatArray  # of it outside the layers, on one device
    blocks: FloatArray  # repeated layers of the slowest rank
    boundary_bytes: FloatArray
    dense_params: FloatArray  # of the rank that has most, on one device
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
    """Figures of each kind's workload, runtime and cluster; arrays of one element where all plans share them."""

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
    regathers_root: FloatArray
    zero2_gathers: FloatArray
    zero1_broadcasts: FloatArray
    zero_all_reduces: FloatArray
    tied_bytes: FloatArray  # gradients of embeddings that a runtime's first and last stage share, before they are divided
    leaves_tied_whole: FloatArray  # 1 where tensor parallelism does
    every_micro_batch: FloatArray
    accumulate_bytes: FloatArray
    memory_bytes_per_s: FloatArray
    host_bytes_per_s: FloatArray
    gpus_per_node: FloatArray


def _columns(packed: Packed, plan: IntArray) -> _Columns:
    def per(values: list[float], index: IntArray | None) -> FloatArray:
        array = np.array(values)
        return array if len(array) == 1 or index is None else array[index[plan]]

    w, r, c = packed.workloads, packed.runtimes, packed.clusters
    i, j, n = packed.workload, packed.cluster, packed.plans.runtime
    bytes_of = [[x.optimizer.state_bytes_per_param, x.master_bytes, x.param_bytes, x.grad_bytes] for x in w]
    update = optimizer.optimizer_bytes_per_param(*np.array(bytes_of).T).tolist()
    own, products = per([volumes.gradient_bytes(x) for x in w], i), per([volumes.gather_bytes(x) for x in w], i)
    return _Columns(
        hidden_size=per([x.hidden_size for x in w], i), gather_bytes=products,
        param_bytes=per([x.param_bytes for x in w], i), grad_bytes=per([x.grad_bytes for x in w], i),
        state_bytes=per([x.optimizer.state_bytes_per_param + x.master_bytes for x in w], i), update_bytes=per(update, i),
        optimizer_kernels=per([x.optimizer.num_kernels for x in w], i), input_bytes=per([x.input_bytes for x in w], i),
        dp_overlap=per([x.dp_overlap for x in r], n), zero_overlap=per([x.zero_overlap for x in r], n),
        reduce_bytes=volumes.reduced_bytes(per([x.gradient_reduce_bytes for x in r], n), own, products),
        fsdp_reduce_bytes=volumes.reduced_bytes(per([x.fsdp_reduce_bytes for x in r], n), own, products),
        fsdp_gathers=per([x.fsdp_gathers for x in r], n), regathers_root=per([x.regathers_root for x in r], n),
        zero2_gathers=per([x.zero2_gathers for x in r], n), zero1_broadcasts=per([x.zero1_broadcasts for x in r], n),
        zero_all_reduces=per([x.zero_all_reduces for x in r], n), every_micro_batch=per([x.reduces_every_micro_batch for x in r], n),
        tied_bytes=volumes.tied_bytes(
            per([x.tied_params for x in w], i), own, tied=per([x.tied_reduce_bytes for x in r], n),
            reduced=per([x.gradient_reduce_bytes for x in r], n),
        ),
        leaves_tied_whole=per([x.equal_tables for x in r], n),
        accumulate_bytes=per([x.accumulate_bytes_per_param for x in r], n), memory_bytes_per_s=per([x.device.memory_bytes_per_s for x in c], j),
        host_bytes_per_s=per([x.host_bytes_per_s for x in c], j), gpus_per_node=per([float(x.gpus_per_node) for x in c], j),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Some consecutive kinds with everything their prices gather; one plan stands for each."""

    plans: PlanTable
    x: _Columns
    k: Constants
    rings: RingCosts
    ring: IntArray
    shard_ranks: FloatArray
    dense: FloatArray  # parameters on one device
    expert: FloatArray
    root: FloatArray  # of them outside the layers
    units: FloatArray
    padding: FloatArray  # of the layers' and of the root's shards: factors, one column each
    trainable: FloatArray  # share of them
    memory_bytes_per_s: FloatArray  # achieved


def _part(packed: Packed, constants: Constants, ranks: RankCosts, rings: RingCosts, part: slice) -> _Part:
    plan, at, ring = packed.kind_plan[part], packed.layout[part], packed.ring[part]
    x = _columns(packed, plan)
    k = at_pair(constants, packed.rings.pair[ring])
    return _Part(
        plans=packed.plans.take(plan), x=x, k=k, rings=rings, ring=ring, shard_ranks=packed.rings.shard_ranks[ring], dense=ranks.dense_params[at],
        expert=ranks.expert_params[at], root=ranks.root_params[at], units=ranks.num_units[at], padding=packed.padding[packed.padded[part]],
        trainable=ranks.trainable_share[at], memory_bytes_per_s=x.memory_bytes_per_s * k["memory_rate_share"],
    )  # fmt: skip


def price_kinds(packed: Packed, constants: Constants, ranks: RankCosts, rings: RingCosts, part: slice) -> dict[str, Seconds]:
    """Seconds by part of some consecutive kinds of plans."""
    p, at = _part(packed, constants, ranks, rings, part), packed.layout[part]
    again, link, host = ranks.recompute_s[at], ranks.link_s[at], ranks.host_s[at]
    work = ranks.compute_s[at] + p.x.accumulate_bytes * (p.dense + p.expert) * p.trainable / p.memory_bytes_per_s
    sharding = _sharding_s(p, work + again)
    transfers = _transfers_s(p, ranks.boundary_bytes[at])
    quirks = quirk_seconds(
        packed.runtimes, p.plans, gpus_per_node=p.x.gpus_per_node, hidden_size=p.x.hidden_size,
        gradient_bytes=(p.dense + p.expert) * p.trainable * p.x.reduce_bytes,
    )  # fmt: skip
    if quirks is not None:
        stall_s = quirks.transfer_s
        transfers = transfers + Seconds.linear(lambda m: stall_s * stalled_transfers(p.plans, m))
    device = work + again + link + sharding
    busy = pipeline.busy_s(
        device, host + p.k["host_s_per_micro_batch"],
        forward_device_share=ranks.forward_device_share[at], forward_host_share=ranks.forward_host_share[at],
    )  # fmt: skip
    if quirks is not None:
        busy = np.maximum(busy, quirks.layer_floor_s * ranks.blocks[at] + host)
    reduction = _reduction_s(p, busy)
    if quirks is not None:
        reduction = reduction + Seconds.once(quirks.reduction_s)
    if np.any(p.x.tied_bytes):
        reduction = reduction + Seconds.once(_ties_s(p, machine_of(packed, packed.rings.cluster[p.ring])))
    on_device, on_host = _updates_s(p)
    bubble = ranks.others_s[at] * (busy / ranks.busy_s[at]) / p.plans.virtual_stages
    parts = {
        "compute": Seconds.each(work), "host_overhead": Seconds.each(busy - device), "recompute": Seconds.each(again),
        "tp_communication": Seconds.each(link), "pipeline_bubble": Seconds.once(bubble), "pipeline_p2p": transfers,
        "dp_communication": reduction, "fsdp_communication": Seconds.each(sharding), "optimizer": Seconds.once(on_device),
        "offload": on_host, "data_loading": Seconds.each(p.plans.micro_batch * p.x.input_bytes / p.x.host_bytes_per_s),
    }  # fmt: skip
    nodes = np.ceil(packed.rings.data_ranks[p.ring] * p.plans.tp_degree * p.plans.pp_degree / p.x.gpus_per_node)
    straggling = optimizer.straggler_share(nodes, p.k["straggler_share"])
    one, further = sum(s.one for s in parts.values()), sum(s.further for s in parts.values())
    return parts | {"fixed": Seconds(one=p.k["step_s"] + one * straggling, further=further * straggling)}


def _ties_s(p: _Part, machine: communication.Machine) -> FloatArray:
    """The all-reduce between first and last pipeline stage of the gradients of embeddings that they share; nothing hides it.

    Source: megatron/core/distributed/finalize_model_grads.py; DeepSpeed's PipelineModule.allreduce_tied_weight_gradients.
    """
    stage_ranks = (p.plans.dp_replicate_degree * p.plans.dp_shard_degree * p.plans.cp_degree * p.plans.tp_degree).astype(np.float64)
    ends = communication.ends_ring(machine, p.k, stage_ranks, p.plans.pp_degree.astype(np.float64))
    both_ways = 2 * p.k["all_reduce_discount"]
    parts = volumes.num_tied_parts(p.plans.tp_degree, p.shard_ranks, is_whole=p.x.leaves_tied_whole, is_sharded=_gathers_layers(p))
    return np.where(p.x.tied_bytes > 0, both_ways * ends.seconds(p.x.tied_bytes / parts), 0.0)


def _gathers_layers(p: _Part) -> BoolArray:
    """Plans whose parameters are sharded and gathered layer by layer in each pass."""
    return np.asarray(((p.plans.zero_stage >= 3) | ((p.plans.zero_stage == 2) & (p.x.zero2_gathers > 0))) & (p.shard_ranks > 1))


def _padded(p: _Part) -> tuple[FloatArray, FloatArray]:
    """Elements in messages that carry the rank's whole parameters, and those of them outside the layers."""
    root = p.root * p.padding[:, 1]
    return (p.dense + p.expert - p.root) * p.padding[:, 0] + root, root


def _sharding_s(p: _Part, compute_s: FloatArray) -> FloatArray:
    """Exposed FSDP traffic of one micro-batch: parameters gathered for forward and backward, gradients scattered, module by module."""
    by_layer = _gathers_layers(p)
    if not by_layer.any():
        return np.zeros(len(p.plans))
    latency_s, s_per_byte = p.rings.shard.latency_s[p.ring], p.rings.shard.s_per_byte[p.ring]
    whole, root = _padded(p)
    again = {"gathers": np.where(p.plans.zero_stage >= 3, p.x.fsdp_gathers, 1.0), "gathers_root": p.x.regathers_root}
    calls = 2.0 * p.units + volumes.regathered(p.units, np.minimum(p.root, 1.0), **again)
    gathered = whole + volumes.regathered(whole, root, **again)
    num_bytes = gathered * p.x.gather_bytes + whole * p.trainable * p.x.fsdp_reduce_bytes
    return np.where(by_layer, communication.exposed_sharding_s(calls * latency_s + num_bytes * s_per_byte, compute_s, p.k), 0.0)


def _transfers_s(p: _Part, boundary_bytes: FloatArray) -> Seconds:
    """Point-to-point transfers between stages."""
    plans = p.plans
    if int(plans.pp_degree.max()) == 1:
        return Seconds.once(np.zeros(len(plans)))
    world = plans.dp_replicate_degree * plans.dp_shard_degree * plans.tp_degree * plans.cp_degree * plans.pp_degree
    s_per_byte = np.where(world > p.x.gpus_per_node, p.rings.across_s_per_byte[p.ring], p.rings.inside_s_per_byte[p.ring])
    sent_bytes = pipeline.sent_bytes(boundary_bytes, plans.sequence_parallel, plans.tp_degree)
    one_s = p.k["p2p_latency_s"] + sent_bytes * s_per_byte
    return Seconds.linear(lambda m: pipeline.transfers_s(one_s, m, plans.pp_degree, plans.virtual_stages))


def _updates_s(p: _Part) -> tuple[FloatArray, Seconds]:
    """The optimizer step on the device, or on the host where states are offloaded."""
    updated, zero = (p.dense + p.expert) * p.trainable, p.plans.zero_stage
    mine = updated / np.where(zero >= 1, p.shard_ranks, 1.0)
    update_s = optimizer.optimizer_s(mine, p.k["optimizer_traffic"] * p.x.update_bytes, p.memory_bytes_per_s)
    whole_gradients_s = np.where(zero < 2, updated - mine, 0.0) * 2 * p.x.grad_bytes / p.memory_bytes_per_s
    on_device = np.maximum(update_s + whole_gradients_s, p.x.optimizer_kernels * p.k["host_s_per_kernel"])
    offloaded = p.plans.offload > 0
    if not offloaded.any():
        return on_device, Seconds.once(np.zeros(len(p.plans)))
    update = optimizer.offload_s(
        mine, copied_bytes=p.x.grad_bytes + p.x.param_bytes, touched_bytes=2 * p.x.state_bytes + p.x.grad_bytes + p.x.param_bytes,
        host_bytes_per_s=p.x.host_bytes_per_s, cpu_bytes_per_s=p.k["cpu_optimizer_bytes_per_s"],
    )  # fmt: skip
    shard = np.where(offloaded & (zero >= 3), (p.dense + p.expert) / p.shard_ranks, 0.0)
    streamed = Seconds.linear(lambda m: optimizer.streamed_s(
        shard, m, param_bytes=p.x.param_bytes, grad_bytes=p.x.grad_bytes, host_bytes_per_s=p.x.host_bytes_per_s,
    ))  # fmt: skip
    accumulated = Seconds.linear(lambda m: optimizer.host_accumulation_s(
        np.where(offloaded & (zero == 2), mine, 0.0), m, grad_bytes=p.x.gather_bytes, host_bytes_per_s=p.x.host_bytes_per_s,
    ))  # fmt: skip
    return np.where(offloaded, 0.0, on_device), Seconds.once(np.where(offloaded, update, 0.0)) + streamed + accumulated


def _reduction_s(p: _Part, busy_s: FloatArray) -> Seconds:
    """Exposed seconds of the gradient reduction: all-reduce; or scatter and all-reduce of shards between replicas, and under ZeRO-1 and 2
    the gather of updated parameters, which comes after the optimizer step: no backward pass hides it.
    """
    zero, ring, rings, by_layer = p.plans.zero_stage, p.ring, p.rings, _gathers_layers(p)
    grads, shards = p.dense * p.trainable, _padded(p)[0] * p.trainable / p.shard_ranks
    both_ways = 2 * p.k["all_reduce_discount"]
    slower = 1.0 / p.k["reduction_rate_share"]
    shard_latency_s, shard_s_per_byte = rings.shard.latency_s[ring], slower * rings.shard.s_per_byte[ring]
    passes = np.where(p.x.zero_all_reduces > 0, both_ways, 1.0)
    scatter = passes * (shard_latency_s + grads * p.x.reduce_bytes * shard_s_per_byte)
    gather = shard_latency_s + grads * p.x.gather_bytes * shard_s_per_byte
    shard_bytes = np.where(by_layer, shards * p.x.fsdp_reduce_bytes, grads / p.shard_ranks * p.x.reduce_bytes)
    replicas = both_ways * (rings.replicate.latency_s[ring] + shard_bytes * slower * rings.replicate.s_per_byte[ring])
    whole = both_ways * (rings.data.latency_s[ring] + grads * p.x.reduce_bytes * slower * rings.data.s_per_byte[ring])
    by_step = (zero > 0) & (zero < 3) & ~by_layer
    broadcasts = (zero == 1) & (p.x.zero1_broadcasts > 0)
    once = np.where((zero == 0) | broadcasts, whole, replicas + np.where(by_step, scatter, 0.0))
    broadcast = shard_latency_s + grads * p.x.param_bytes * shard_s_per_byte
    after_step = np.where(by_step, np.where(broadcasts, broadcast, gather), 0.0)
    if np.any(p.expert):  # banks of experts are equal on fewer ranks
        banks = rings.experts.latency_s[ring] + p.expert * p.trainable * volumes.EXPERT_BYTES * slower * rings.experts.s_per_byte[ring]
        once = once + np.where(((zero == 0) | by_step) & (p.expert > 0), banks, 0.0)
    backward_s = 2.0 / 3.0 * busy_s
    overlap = np.where(zero == 0, p.x.dp_overlap, p.x.zero_overlap)
    memory_s = grads * p.x.reduce_bytes / p.memory_bytes_per_s
    exposed = communication.exposed_reduction_s(once, backward_s, overlap, memory_s, p.k) + after_step
    if not np.any(p.x.every_micro_batch):
        return Seconds.once(exposed)
    again = communication.exposed_reduction_s(scatter, backward_s, overlap, memory_s, p.k)
    return Seconds(one=exposed, further=np.where((zero == 2) & by_step, p.x.every_micro_batch * again, 0.0))
