"""Conditions seen in one framework's published runs that no plan explains: named in its runtime file, off for all others.

The rules are correlates read off one published sweep (nanotron on one cluster of H100 nodes), not causes. They keep these runs
from spoiling the fitted constants and should not be carried over to another cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_models.traits import Runtime
from cost_models.types import FloatArray, IntArray, PlanTable


@dataclass(frozen=True, slots=True, kw_only=True)
class QuirkSeconds:
    """What quirks add per plan."""

    layer_floor_s: FloatArray  # host-side floor per layer and micro-batch, not added to device work but beside it
    transfer_s: FloatArray  # per transfer between pipeline stages
    reduction_s: FloatArray  # of the gradient reduction


def quirk_seconds(
    runtimes: tuple[Runtime, ...], plans: PlanTable, *, gpus_per_node: FloatArray, hidden_size: FloatArray, gradient_bytes: FloatArray
) -> QuirkSeconds | None:
    """Quirks of the plans' runtimes; None where no runtime has any."""
    if not any(r.quirks for r in runtimes):
        return None
    slow, hop, stall = (_trait(runtimes, plans.runtime, *key) for key in
                        (("slow_tp_collectives", "floor_s"), ("slow_tp_collectives", "hop_s"), ("stalled_p2p", "transfer_s")))  # fmt: skip
    tp, pp, micro = plans.tp_degree, plans.pp_degree, plans.micro_batch
    data = plans.dp_replicate_degree * plans.dp_shard_degree
    world = data * tp * pp * plans.cp_degree
    many_nodes = world > gpus_per_node
    far = many_nodes & ((pp > 1) | ((world >= 512) & (tp >= 8) & (tp <= 16)))
    rings = 10.0 * hop * (tp - 1 + 0.5 * np.maximum(tp - 8, 0))
    medium = (world == 256) & (micro >= 2) & (((pp >= 4) & (hidden_size >= 4096)) | ((pp <= 4) & (tp <= 4)))
    short = (world == 256) & (micro == 1) & (data >= 32) & (plans.zero_stage > 0)
    wide = (tp >= 32) & ((pp > 2) | (micro <= 16))
    unsharded = (plans.zero_stage == 0) & (data >= 4) & (data <= 16) & (micro == 1)
    stalls = many_nodes & (pp > 1) & ((world >= 512) | medium | short | wide | unsharded)
    return QuirkSeconds(
        layer_floor_s=np.where(far & (tp > 1), slow + rings, 0.0), transfer_s=np.where(stalls, stall, 0.0),
        reduction_s=np.where(many_nodes & (pp > 1) & (plans.zero_stage == 0), _bucket_hops_s(runtimes, plans, gradient_bytes), 0.0),
    )  # fmt: skip


def _bucket_hops_s(runtimes: tuple[Runtime, ...], plans: PlanTable, gradient_bytes: FloatArray) -> FloatArray:
    """An all-reduce bucket by bucket, each twice round a ring of all data ranks."""
    bucket_bytes, hop_s = (_trait(runtimes, plans.runtime, "slow_unsharded_reduction", field) for field in ("bucket_bytes", "hop_s"))
    hops = 2.0 * (plans.dp_replicate_degree * plans.dp_shard_degree - 1)
    return gradient_bytes / np.maximum(bucket_bytes, 1.0) * hops * hop_s


def stalled_transfers(plans: PlanTable, num_microbatches: FloatArray) -> FloatArray:
    """Transfers on the critical path of a stalled run: a send and a receive per micro-batch and neighbour, and the fill."""
    pp = plans.pp_degree
    return np.where(pp > 2, 4.0 * num_microbatches + 2.0 * (pp - 1), np.where(pp == 2, 2.0 * num_microbatches + 1.0, 0.0))


def _trait(runtimes: tuple[Runtime, ...], runtime: IntArray, quirk: str, field: str) -> FloatArray:
    return np.array([float(r.quirks.get(quirk, {}).get(field, 0.0)) for r in runtimes])[runtime]
