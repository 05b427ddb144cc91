"""What a step's collectives carry, in elements and calls: the one source of both their seconds (`price`) and their list (`collectives`).

Sharded parameters are gathered layer by layer in forward and again in backward, except what lies outside the layers (embeddings, last
norm, head: the root), which FSDP keeps gathered in between. FSDP2 cuts every parameter along its first dimension into equal parts, the
last ones padded (`torch.distributed.fsdp.fully_shard`), so messages grow where ranks don't divide rows. Tensor parallelism sums a layer's
outputs once per row-parallel weight in forward and once per column-parallel input in backward (Shoeybi et al. 2019); with sequence
parallelism each sum is a reduce-scatter and an all-gather (Korthikanti et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models.traits import Runtime
from cost_models.types import FloatArray, IntArray, LayerGroup, Workload

BoolArray = npt.NDArray[np.bool_]

#: Experts are equal on fewer ranks than the rest: their gradients go one way in 4 bytes, weights come back in 2.
EXPERT_SCATTER_BYTES, EXPERT_GATHER_BYTES = 4.0, 2.0
EXPERT_BYTES = EXPERT_SCATTER_BYTES + EXPERT_GATHER_BYTES
#: A model without repeated layers is sharded by modules of at least so many parameters (small gathers are all latency).
MIN_UNIT_PARAMS = 1_000_000
#: Passes of keys and values round a ring of context ranks: forward, backward, and their gradient.
CONTEXT_PASSES = 3.0
#: All-to-alls of a layer of experts in one pass: tokens to their experts and back.
EXPERT_EXCHANGES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCalls:
    """Tensor-parallel collectives of a unit in one pass over it."""

    all_reduces: FloatArray
    gathers: FloatArray
    scatters: FloatArray

    @property
    def ring_passes(self) -> FloatArray:
        """An all-reduce is a reduce-scatter and an all-gather."""
        return 2.0 * self.all_reduces + self.gathers + self.scatters


def tensor_calls(
    collectives: FloatArray, sequence_parallel: FloatArray, *, edges: FloatArray | float = 0.0, gathers: FloatArray | float = 1.0,
    skipped: FloatArray | float = 0.0,
) -> TensorCalls:  # fmt: skip
    """Collectives of one forward, backward or recomputing pass over a unit.

    Args:
        collectives: sums of the unit's outputs in a forward pass.
        sequence_parallel: 1 where activations between the layers are divided too.
        edges: further gathers, of sequences that must be whole where the unit begins or ends.
        gathers: all-gathers per sum under sequence parallelism (2 where the weight gradient gathers its input again).
        skipped: sums that the pass doesn't reach (recomputation that stops once what backward needs is there).
    """
    sums = np.maximum(collectives - skipped, 0.0)
    return TensorCalls(
        all_reduces=sums * (1.0 - sequence_parallel),
        gathers=collectives * gathers * sequence_parallel + edges,
        scatters=sums * sequence_parallel,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingUnits:
    """What a rank gathers and scatters module by module."""

    num_units: FloatArray  # the root among them
    root_params: FloatArray  # outside the layers; 0 without repeated layers, unless all modules are smaller than MIN_UNIT_PARAMS


def sharding_units(num_layers: FloatArray, num_sharded: FloatArray, root_params: FloatArray) -> ShardingUnits:
    """Units of a rank: one per repeated layer and one for the rest.

    Args:
        num_layers: layers and single modules.
        num_sharded: those that are sharded one by one.
        root_params: parameters of the others.
    """
    has_units, all_root = num_sharded > 0, (root_params > 0) & (root_params < MIN_UNIT_PARAMS)
    return ShardingUnits(
        num_units=np.where(has_units, num_sharded + (root_params > 0), np.where(all_root, 1.0, num_layers)),
        root_params=np.where(has_units | all_root, root_params, 0.0),
    )


def regathered(whole: FloatArray, root: FloatArray, *, gathers: FloatArray | float, gathers_root: FloatArray | float) -> FloatArray:
    """Of `whole` (elements, or sharding units) what is gathered again after the first time in a micro-batch.

    Args:
        whole: everything that is gathered in forward.
        root: the part of it outside the layers.
        gathers: gathers per micro-batch: 2, or 1 where layers stay gathered until backward.
        gathers_root: 1 where the root is gathered as often as the layers.
    """
    return np.asarray((gathers - 1.0) * (whole - (1.0 - gathers_root) * root))


def gather_bytes(workload: Workload) -> float:
    """Per parameter element gathered: the dtype of the products."""
    return 4.0 if workload.compute_dtype in ("fp32", "tf32") else 2.0


def gradient_bytes(workload: Workload) -> float:
    """Per gradient element as an engine without a rule of its own reduces it: fp32 where an fp32 copy of the weights is trained."""
    return max(workload.grad_bytes, workload.master_bytes)


def reduced_bytes(trait: FloatArray, own: FloatArray, products: FloatArray) -> FloatArray:
    """Per gradient element reduced: the runtime's for 16-bit training, or the gradients' own where it has none.

    Args:
        trait: the runtime's; 0: none.
        own: as the gradients are kept.
        products: of the products' dtype: training in fp32 reduces in fp32.
    """
    return np.where(trait > 0, np.maximum(trait, products), own)


def tied_bytes(params: FloatArray, own: FloatArray, *, tied: FloatArray, reduced: FloatArray) -> FloatArray:
    """Gradients of embeddings that the pipeline's two ends share, as these all-reduce them, before they are divided.

    Args:
        params: that the ends share.
        own: bytes per gradient element as the gradients are kept.
        tied: the runtime's bytes per element; 0: not priced.
        reduced: its bytes per element of other gradients; 0: their own, and those of shared embeddings as well.
    """
    return np.where(tied > 0, params * np.where(reduced > 0, tied, own), 0.0)


def num_tied_parts(
    tp_degree: IntArray | FloatArray, shard_ranks: FloatArray, *, is_whole: FloatArray, is_sharded: FloatArray | BoolArray
) -> FloatArray:
    """Ranks of an end that each reduce another part: tensor ranks unless the runtime leaves shared embeddings whole, and ranks of sharded gradients."""
    return np.asarray(np.where(is_whole > 0, 1.0, tp_degree) * np.where(is_sharded, shard_ranks, 1.0))


def leaves_root_whole(workload: Workload, runtime: Runtime | None, ranks: IntArray | FloatArray) -> BoolArray:
    """Whether every tensor rank holds embeddings and head whole, by the number of tensor x shard ranks."""
    none = np.zeros(np.shape(ranks), dtype=bool)
    if runtime is None or not runtime.equal_tables:
        return none
    rows = [p.rows for g in workload.groups if not g.is_unit for p in g.param_shapes if p.tp_split == "rows" and p.num_elements > p.rows]
    return np.asarray(none | (workload.tied_params > 0) | np.any([np.asarray(r % ranks != 0) for r in rows] or [none], axis=0))


def shard_padding(workload: Workload, runtime: Runtime, shard_ranks: float, tp_degree: float) -> tuple[float, float]:
    """Factor on the elements of the layers and of the root where the runtime cuts them into equal parts of whole rows."""
    if not runtime.pads_rows or shard_ranks == 1:
        return 1.0, 1.0
    layers, root = ([g for g in workload.groups if g.is_unit == is_unit] for is_unit in (True, False))
    return _padding(layers, shard_ranks, tp_degree), _padding(
        root, shard_ranks, 1.0 if leaves_root_whole(workload, runtime, np.array(tp_degree * shard_ranks)) else tp_degree
    )


def _padding(groups: Sequence[LayerGroup], shard_ranks: float, tp_degree: float) -> float:
    """Elements that equal parts of every parameter take on all ranks together, over the elements there are; 1 where shapes are unknown."""
    whole = padded = 0.0
    for group in groups:
        for p in group.param_shapes:
            elements = group.num_repeats * p.num_elements / (tp_degree if p.is_divided else 1.0)
            whole += elements
            for share in p.tp_shares if tp_degree > 1 else (1.0,):
                rows = max(share * p.rows / tp_degree, 1.0) if p.tp_split == "rows" else share * p.rows
                padded += share * elements * math.ceil(rows / shard_ranks) * shard_ranks / rows
    return padded / whole if whole else 1.0


TERMS = (tensor_calls, sharding_units, regathered, shard_padding)
