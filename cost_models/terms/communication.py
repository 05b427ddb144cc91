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


def all_to_all_s(
    machine: Machine, constants: Mapping[str, FloatArray], num_bytes: FloatArray, ep_degree: FloatArray, tp_degree: FloatArray
) -> FloatArray:
    """Seconds of one all-to-all of `num_bytes` leaving each device: the part for other nodes uses one device's share of the adapters."""
    away = np.maximum(0.0, 1.0 - machine.gpus_per_node / np.maximum(1.0, ep_degree * tp_degree))
    s_per_byte = (1 - away) / machine.intra_bytes_per_s + away * machine.gpus_per_node / machine.inter_bytes_per_s
    return num_bytes * (1 - 1 / ep_degree) * s_per_byte / constants["all_to_all_rate_share"]


def transfer_s_per_byte(machine: Machine, constants: Mapping[str, FloatArray], crosses: FloatArray) -> FloatArray:
    """Seconds per byte between neighbouring pipeline stages; across nodes all devices of a node send at once."""
    outside = np.minimum(machine.inter_bytes_per_s / machine.gpus_per_node, machine.intra_bytes_per_s)
    return 1.0 / (np.where(crosses > 0, outside, machine.intra_bytes_per_s) * constants["p2p_rate_share"])


def exposed_sharding_s(traffic_s: FloatArray, compute_s: FloatArray, constants: Mapping[str, FloatArray]) -> FloatArray:
    """What gathers and scatters under compute add: the part that doesn't fit beside it, and contention from the part that does."""
    room = constants["fsdp_hidden_share"] * compute_s
    return np.maximum(traffic_s - room, 0.0) + constants["overlap_contention"] * np.minimum(traffic_s, room)


def exposed_reduction_s(
    reduction_s: FloatArray, backward_s: FloatArray, overlap: FloatArray, constants: Mapping[str, FloatArray]
) -> FloatArray:
    """What the gradient reduction adds to the last micro-batch: the part that its backward pass doesn't hide, and contention from the part
    that it does; the last bucket (a tenth) always shows.
    """
    hidden_s = np.minimum(overlap * constants["dp_hidden_share"] * backward_s, 0.9 * reduction_s)
    return reduction_s - hidden_s + constants["overlap_contention"] * hidden_s


TERMS = (ring, ends_ring, all_to_all_s, transfer_s_per_byte, exposed_sharding_s, exposed_reduction_s)
