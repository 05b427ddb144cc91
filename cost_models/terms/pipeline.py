"""Seconds of a pipeline from its stages, in closed form.

    step = micro-batches x slowest stage + (sum of the other stages) / virtual stages + transfers

The other stages fill and drain the pipeline once; interleaving cuts that by the number of chunks per rank (Narayanan 2021, 2.2).
GPipe and 1F1B take the same time and differ in memory. Ignored: micro-batches that are no multiple of the ranks when interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_models.types import FloatArray, IntArray

FORWARD_BACKWARD_TRANSFERS = 2.0


def blend(device_s: FloatArray, host_s: FloatArray) -> FloatArray:
    """Device and host work run side by side: a smooth maximum, (d^4 + h^4)^(1/4). At equality 19% above either."""
    device_squared, host_squared = device_s * device_s, host_s * host_s
    return np.sqrt(np.sqrt(device_squared * device_squared + host_squared * host_squared))


def busy_s(
    device_s: FloatArray, host_s: FloatArray, *, forward_device_share: FloatArray, forward_host_share: FloatArray
) -> FloatArray:  # fmt: skip
    """Seconds of one micro-batch: forward and backward are two runs through the layers, and the host's lead in one doesn't help in the other.

    Args:
        device_s: work, recomputation and collectives of both.
        host_s: launches of both.
        forward_device_share: of `device_s` in the forward pass.
        forward_host_share: of `host_s` in the forward pass.
    """
    forward_s, launches_s = forward_device_share * device_s, forward_host_share * host_s
    return blend(forward_s, launches_s) + blend(device_s - forward_s, host_s - launches_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """The slowest rank of each layout and the sum of the others."""

    rank: IntArray
    others_s: FloatArray


def slowest_rank(rank_s: FloatArray, rank_layout: IntArray, rank_start: IntArray) -> Slowest:
    """Which rank sets the pace.

    Args:
        rank_s: seconds of one micro-batch per rank.
        rank_layout: layout of each rank.
        rank_start: first rank of each layout.
    """
    largest = np.maximum.reduceat(rank_s, rank_start)
    total = np.add.reduceat(rank_s, rank_start)
    at = np.flatnonzero(rank_s == largest[rank_layout])
    rank = np.empty(len(rank_start), dtype=np.int64)
    rank[rank_layout[at]] = at
    return Slowest(rank=rank, others_s=total - largest)


def sent_bytes(boundary_bytes: FloatArray, sequence_parallel: FloatArray | IntArray, tp_degree: FloatArray | IntArray) -> FloatArray:
    """Of one transfer on one device: with sequence parallelism each tensor rank sends its part."""
    return boundary_bytes / np.where(sequence_parallel > 0, tp_degree, 1.0)


def transfers_s(one_s: FloatArray, num_microbatches: FloatArray, pp_degree: IntArray, virtual_stages: IntArray) -> FloatArray:
    """Point-to-point seconds on the critical path: each chunk of each micro-batch, forward and backward, and once per stage of the fill.

    Args:
        one_s: seconds of one transfer.
        num_microbatches: per step and data rank.
        pp_degree: pipeline ranks.
        virtual_stages: chunks per rank.
    """
    return np.where(pp_degree > 1, one_s * FORWARD_BACKWARD_TRANSFERS * (num_microbatches * virtual_stages + pp_degree - 1), 0.0)


TERMS = (blend, busy_s, slowest_rank, sent_bytes, transfers_s)
