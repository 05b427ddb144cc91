"""Where a model is cut into pipeline stages.

The pieces are repeats of groups; a piece that may not end a stage joins the next one. Three ways to cut, a trait of the runtime:
- balanced: the contiguous partition whose largest stage is smallest (bisection over the limit, greedy filling: exact);
- even: equal numbers of layers, the first stages take the remainder; embedding with the first, head with the last layer;
- greedy: nanotron's rule: the piece that carries the running sum of weights to the next multiple of total / stages ends its stage; the
  head goes to the last one.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass

import numpy as np

from cost_models.terms.compute import ATTENTION, BACKWARD, FORWARD, GEMM, MEMORY
from cost_models.types import FloatArray, IntArray, LayerGroup, OpTable, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSplit:
    """Repeats of each group in each stage."""

    counts: IntArray  # (num_stages, num_groups)
    boundary_group: IntArray  # (num_stages - 1): group whose output crosses the cut

    @property
    def num_stages(self) -> int:
        return int(self.counts.shape[0])

    def on_ranks(self, num_ranks: int) -> IntArray:
        """Repeats of each group on each pipeline rank, which holds every num_ranks-th stage."""
        return np.asarray(self.counts.reshape(-1, num_ranks, self.counts.shape[1]).sum(axis=0))


def stage_split(workload: Workload, num_stages: int, *, cut: str = "balanced") -> StageSplit:
    """Assign the workload's layers to pipeline stages (model chunks, where stages are interleaved).

    Args:
        workload: groups in execution order.
        num_stages: stages wanted, at least 1. With fewer pieces than stages the last stages stay empty.
        cut: "balanced", "even" or "greedy".

    Raises:
        ValueError: no stages, or an unknown way to cut.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages {num_stages} must be at least 1")
    rules = {"balanced": _balanced, "even": _even, "greedy": _greedy}
    if cut not in rules:
        raise ValueError(f"cut {cut!r} is none of {', '.join(rules)}")
    pieces = _pieces(workload)
    group = np.array([g for g, _ in pieces])
    last = rules[cut](workload, pieces, num_stages)
    counts = np.zeros((num_stages, len(workload.groups)), dtype=np.int64)
    np.add.at(counts, (last, group), 1)
    ends = np.searchsorted(last, np.arange(num_stages - 1), side="right") - 1
    return StageSplit(counts=counts, boundary_group=group[np.maximum(ends, 0)])


def forward_cost(group: LayerGroup) -> float:
    """Relative cost of one repeat: flops of the products forward and backward, and bytes at 150 flops each (a recent GPU's ridge)."""
    return float(
        np.sum(_flops(group.ops) + 150.0 * np.where(group.ops.kind == MEMORY, group.ops.bytes_per_sample + group.ops.bytes_fixed, 0.0))
    )


def _flops(ops: OpTable) -> FloatArray:
    factor = np.where(ops.kind == ATTENTION, np.where(ops.phase == BACKWARD, 10.0, 4.0), np.where(ops.kind == MEMORY, 0.0, 2.0))
    return factor * ops.m * ops.n * ops.k * ops.batch * ops.work_share


def _weights(group: LayerGroup) -> float:
    """Elements of the weights that forward products of one repeat use."""
    ops = group.ops
    product = (ops.kind == GEMM) & (ops.phase == FORWARD) & (ops.batch == 1)
    return float(np.sum(np.where(product, ops.n * ops.k, 0.0)))


def _pieces(workload: Workload) -> list[tuple[int, bool]]:
    """(group, may a stage end here) of every repeat, in execution order."""
    return [(i, g.can_cut) for i, g in enumerate(workload.groups) for _ in range(g.num_repeats)]


def _units(pieces: list[tuple[int, bool]]) -> IntArray:
    """Unit of each piece: pieces up to and including one that may end a stage share a unit; the model's last unit is open."""
    ends = np.array([cut for _, cut in pieces])
    units = np.concatenate([[0], np.cumsum(ends[:-1])])
    return units.astype(np.int64)


def _balanced(workload: Workload, pieces: list[tuple[int, bool]], num_stages: int) -> IntArray:
    cost_of = np.array([forward_cost(g) for g in workload.groups])
    unit = _units(pieces)
    cost = np.bincount(unit, weights=cost_of[[g for g, _ in pieces]])
    num_stages = min(num_stages, len(cost))
    starts = np.array(_smallest_fill([0.0, *np.cumsum(cost).tolist()], float(cost.max()), num_stages))
    return np.searchsorted(starts, unit, side="right") - 1


def _smallest_fill(cumulative: list[float], largest_unit: float, num_stages: int) -> list[int]:
    """First unit of each stage under the smallest limit that `num_stages` stages can keep.

    An equal share and the largest unit on top can always be kept. A limit that can be kept is lowered to the largest stage it gave; one
    that cannot is raised to the least that moves a cut.
    """
    share = cumulative[-1] / num_stages
    low, high = max(share, largest_unit), min(share + largest_unit, cumulative[-1])
    best, limit = _fill(cumulative, high, num_stages), low
    while low < high:
        starts = _fill(cumulative, limit, num_stages)
        if len(starts) <= num_stages:
            best, high = starts, min(limit, max(cumulative[b] - cumulative[a] for a, b in itertools.pairwise((*starts, -1))))
        else:
            low = max(math.nextafter(limit, math.inf), min(cumulative[b + 1] - cumulative[a] for a, b in itertools.pairwise(starts)))
        limit = (low + high) / 2
    return best


def _fill(cumulative: list[float], limit: float, num_stages: int) -> list[int]:
    """First unit of each stage when stages take units up to the limit but leave one for every later stage.

    One stage too many: the limit cannot be kept.
    """
    starts: list[int] = []
    position, num_units = 0, len(cumulative) - 1
    while position < num_units and len(starts) <= num_stages:
        starts.append(position)
        end = bisect.bisect_right(cumulative, cumulative[position] + limit * (1 + 1e-12)) - 1
        position = max(min(end, num_units - num_stages + len(starts)), position + 1)
    return starts


def _even(workload: Workload, pieces: list[tuple[int, bool]], num_stages: int) -> IntArray:
    layers = np.array([workload.groups[g].num_layers if cut else 0 for g, cut in pieces])
    before = np.concatenate([[0], np.cumsum(layers)[:-1]])
    total = max(int(layers.sum()), 1)
    share, more = divmod(total, num_stages)
    sizes = np.array([share + (j < more) for j in range(num_stages)])
    return np.searchsorted(np.cumsum(sizes), np.minimum(before, total - 1), side="right").astype(np.int64)  # type: ignore[no-any-return]


def _greedy(workload: Workload, pieces: list[tuple[int, bool]], num_stages: int) -> IntArray:
    weights = np.array([_weights(g) for g in workload.groups])[[g for g, _ in pieces]]
    running, stage, out = np.cumsum(weights), 0, []
    for value in running:
        out.append(stage)
        if value >= running[-1] * ((stage + 1) / num_stages) and stage < num_stages - 1:
            stage += 1
    out[-1] = num_stages - 1
    return np.array(out, dtype=np.int64)
