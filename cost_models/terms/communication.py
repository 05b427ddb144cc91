"""Seconds of collectives: rings inside a node and over the nodes' network adapters, by group size and placement.

    seconds = latency + bytes x (ranks - 1) / ranks / rate        one ring pass (all-gather or reduce-scatter)

An all-reduce is two passes. Over PCIe a ring shares host bridges and often copies through host memory: it has its own achieved share.
Over Ethernet without RDMA each byte takes its time on the line and its time in the host's TCP: nearly the line rate at 10 Gb/s, 60% of
it at 32 Gb/s and 4 to 6 GB/s at 100 Gb/s (NVIDIA/nccl issues 209 and 450). A group of `ranks` devices `stride` apart has r = gpus_per_node / stride of them in each node. The groups
of one node share its adapters, so a group gets r / gpus_per_node of their rate, falling as nodes^-decay. Latency grows with the
logarithm of the ranks in a node (each collective waits for the slowest of them) and with the nodes of the ring, a little faster than in proportion. Ignored: trees, rail topology, in-network reduction (an achieved share above 1 absorbs it), message-size curves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cost_models.types import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Figures of the cluster of each element."""

    gpus_per_node: FloatArray
    intra_bytes_per_s: FloatArray
    inter_bytes_per_s: FloatArray  # per node
    intra_latency_s: FloatArray
    inter_latency_s: FloatArray
    over_pcie: FloatArray  # 1 where the link inside a node is PCIe
    over_ethernet: FloatArray  # 1 where nodes talk over Ethernet without RDMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A ring pass of `bytes` takes latency_s + bytes x s_per_byte; both 0 for a group of one."""

    latency_s: FloatArray
    s_per_byte: FloatArray

    def seconds(self, num_bytes: FloatArray, passes: FloatArray | float = 1.0) -> FloatArray:
        """Passes over `num_bytes` each."""
        return passes * (self.latency_s + num_bytes * self.s_per_byte)


#: Nodes up to which latencies were fitted on measured runs.
_RING_NODES = 64.0
#: Of device memory per byte reduced: in and out of the bucket 4, the two passes of the ring 5 or so.
_REDUCTION_ACCESSES = 9.0


def ring(machine: Machine, constants: Mapping[str, FloatArray], ranks: FloatArray, stride: FloatArray) -> Ring:
    """A ring over `ranks` devices that are `stride` apart.

    Latency grows as fitted up to `_RING_NODES`, beyond that with the logarithm: NCCL turns to trees (Jeaugey, "Massively scale your deep
    learning training with NCCL 2.4", 2019), and no measured run says more.

    Args:
        machine: figures of each element's cluster.
        constants: intra_rate_share, inter_rate_share, inter_decay, inter_decay_whole_node, latencies.
        ranks: group size.
        stride: distance between neighbours in device numbers.
    """
    here = np.clip(machine.gpus_per_node / stride, 1.0, ranks)
    nodes = np.maximum(ranks / here, 1.0)
    inside, network = _rates(machine, constants)
    decay = np.where(here >= 4, constants["inter_decay_whole_node"], constants["inter_decay"])
    outside = network * here / machine.gpus_per_node * np.maximum(nodes / 2, 0.5) ** -decay
    crosses = nodes > 1
    rate = np.where(crosses, np.minimum(inside, outside), inside)
    latency = constants["intra_latency_s"] * np.log2(np.maximum(here, 2.0)) + machine.intra_latency_s
    near = np.minimum(nodes, _RING_NODES)
    levels = 1.0 + np.log2(nodes / near) / np.log2(_RING_NODES)
    per_node = constants["inter_latency_s_per_node"] + machine.inter_latency_s
    latency = latency + np.where(crosses, per_node * near ** constants["inter_latency_growth"] * levels, 0.0)
    return Ring(latency_s=np.where(ranks > 1, latency, 0.0), s_per_byte=(ranks - 1) / ranks / rate)


def ends_ring(machine: Machine, constants: Mapping[str, FloatArray], stage_ranks: FloatArray, pp_degree: FloatArray) -> Ring:
    """A ring between a device of the first pipeline stage and its like of the last: those of one node share its adapters.

    Args:
        machine: figures of each element's cluster.
        constants: as for `ring`.
        stage_ranks: devices of one stage.
        pp_degree: stages; 1: nothing to share.
    """
    inside, network = _rates(machine, constants)
    far = stage_ranks * (pp_degree - 1) >= machine.gpus_per_node
    rate = np.where(far, np.minimum(inside, network / np.minimum(stage_ranks, machine.gpus_per_node)), inside)
    across = 2.0 ** constants["inter_latency_growth"] * (constants["inter_latency_s_per_node"] + machine.inter_latency_s)
    latency = constants["intra_latency_s"] + machine.intra_latency_s + np.where(far, across, 0.0)
    return Ring(latency_s=np.where(pp_degree > 1, latency, 0.0), s_per_byte=np.where(pp_degree > 1, 0.5 / rate, 0.0))


def _rates(machine: Machine, constants: Mapping[str, FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Achieved bytes a second of a device inside its node, and of a node's adapters."""
    inside = np.where(machine.over_pcie > 0, constants["pcie_rate_share"], constants["intra_rate_share"])
    line = machine.inter_bytes_per_s
    network = np.where(machine.over_ethernet > 0, line / (1.0 + line / constants["tcp_bytes_per_s"]), line * constants["inter_rate_share"])
    return machine.intra_bytes_per_s * inside, network


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """How tokens travel to their experts; one value per element."""

    ep_degree: FloatArray
    stride: FloatArray  # between neighbours of the group, in device numbers
    num_experts: FloatArray
    num_active: FloatArray  # experts of a token
    routed_share: FloatArray  # of the experts, on neighbouring devices, that one token may choose from
    once_per_node: FloatArray  # 1 where a token crosses to each node once and is copied there; 0: a plain all-to-all of one copy per expert


def groups_hit(num_experts: FloatArray, num_active: FloatArray, num_groups: FloatArray) -> FloatArray:
    """Expected number of distinct groups among the experts of a token, E experts in G equal groups, k different ones chosen at random.

    A group is missed with probability C(E - E/G, k) / C(E, k) = product over i < k of (E - E/G - i) / (E - i), so that

        hit = G (1 - that product)

    Ignored: that experts aren't equally busy.

    Args:
        num_experts: E.
        num_active: k, at most E.
        num_groups: G: nodes, or devices.
    """
    missed = np.ones(np.broadcast_shapes(np.shape(num_experts), np.shape(num_active), np.shape(num_groups)))
    for i in range(int(np.max(num_active, initial=0.0))):
        left = np.maximum(num_experts * (1.0 - 1.0 / num_groups) - i, 0.0) / np.maximum(num_experts - i, 1.0)
        missed = missed * np.where(i < num_active, left, 1.0)
    return num_groups * (1.0 - missed)


def all_to_all_s(machine: Machine, constants: Mapping[str, FloatArray], token_bytes: FloatArray, how: Dispatch) -> FloatArray:
    """Seconds of sending a device's tokens to their experts, or of the way back.

    A plain all-to-all sends a copy per expert, and what is for other nodes uses one device's share of the adapters. DeepEP and HybridEP,
    Megatron-Core's flex dispatcher, send a token once to each node that holds some of its experts and from there, while the rest still
    arrives, once to each device (DeepSeek-V3 report, 3.2.2; deepseek-ai/DeepEP), so that the slower of both ways counts. Where routing is
    limited to some groups of experts (there 4 of 8), so are the nodes.

    Args:
        machine: figures of each element's cluster.
        constants: all_to_all_rate_share.
        token_bytes: of all tokens of a device, one copy of each.
        how: group, experts and way of travel.
    """
    here = np.clip(machine.gpus_per_node / how.stride, 1.0, how.ep_degree)
    nodes = np.maximum(how.ep_degree / here, 1.0)
    inside_s, outside_s = 1.0 / machine.intra_bytes_per_s, machine.gpus_per_node / machine.inter_bytes_per_s
    away = np.maximum(0.0, 1.0 - machine.gpus_per_node / np.maximum(1.0, how.ep_degree * how.stride))
    plain_s = how.num_active * (1 - 1 / how.ep_degree) * ((1 - away) * inside_s + away * outside_s)
    nodes_hit, devices_hit = (
        groups_hit(how.num_experts * how.routed_share, how.num_active, np.maximum(groups * how.routed_share, 1.0))
        for groups in (nodes, how.ep_degree)
    )
    crossing, copied = nodes_hit * (1 - 1 / nodes), devices_hit * (1 - 1 / here)
    once_s = np.maximum(crossing * outside_s, copied * inside_s)
    return token_bytes * np.where(how.once_per_node > 0, once_s, plain_s) / constants["all_to_all_rate_share"]


def transfer_s_per_byte(machine: Machine, constants: Mapping[str, FloatArray], crosses: FloatArray) -> FloatArray:
    """Seconds per byte between neighbouring pipeline stages; across nodes all devices of a node send at once."""
    outside = np.minimum(machine.inter_bytes_per_s / machine.gpus_per_node, machine.intra_bytes_per_s)
    return 1.0 / (np.where(crosses > 0, outside, machine.intra_bytes_per_s) * constants["p2p_rate_share"])


def overlapped_share(ranks: FloatArray, overlap: FloatArray, constants: Mapping[str, FloatArray]) -> FloatArray:
    """Factor on a collective that is cut into a part per rank, each of which runs under the product that makes or takes another part.

    One part shows, the others come back as slower compute (Wang et al., ASPLOS 2023; Transformer Engine's userbuffers).

    Args:
        ranks: of the group.
        overlap: 1 where collectives are cut so.
        constants: overlap_contention.
    """
    return np.asarray(1.0 - overlap * (1.0 - 1.0 / ranks) * np.maximum(1.0 - constants["overlap_contention"], 0.0))


def exposed_sharding_s(traffic_s: FloatArray, compute_s: FloatArray, constants: Mapping[str, FloatArray]) -> FloatArray:
    """What gathers and scatters under compute add: the part that doesn't fit beside it, and contention from the part that does."""
    room = constants["fsdp_hidden_share"] * compute_s
    return np.maximum(traffic_s - room, 0.0) + constants["overlap_contention"] * np.minimum(traffic_s, room)


def exposed_reduction_s(
    reduction_s: FloatArray, backward_s: FloatArray, overlap: FloatArray, memory_s: FloatArray, constants: Mapping[str, FloatArray]
) -> FloatArray:
    """What the gradient reduction adds to the last micro-batch: the part that its backward pass doesn't hide, and contention from the part
    that it does; the last bucket (a tenth) always shows.

    Contention: a ring all-reduce, and the copies into and out of its bucket, read or write device memory `_REDUCTION_ACCESSES` times per byte,
    however slow the link is; meanwhile compute waits for that memory. Ignored: multiprocessors that the collective occupies.

    Args:
        reduction_s: of the whole reduction.
        backward_s: of the last backward pass.
        overlap: 1 where the runtime reduces under it.
        memory_s: that the reduced bytes take in device memory, once.
        constants: dp_hidden_share.
    """
    hidden_s = np.minimum(overlap * constants["dp_hidden_share"] * backward_s, 0.9 * reduction_s)
    contention_share = np.minimum(_REDUCTION_ACCESSES * memory_s / np.maximum(reduction_s, 1e-30), 1.0)
    return reduction_s - hidden_s * (1.0 - contention_share)


TERMS = (ring, ends_ring, groups_hit, all_to_all_s, overlapped_share, transfer_s_per_byte, exposed_sharding_s, exposed_reduction_s)
