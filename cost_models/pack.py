"""Flatten plans of many workloads into arrays: cells, their operators, pipeline stages and communication groups.

A plan's price has few distinct ingredients. A *cell* is what one device executes for one layer (workload, device, runtime, tensor,
context and expert degree, micro-batch, sequence parallelism); a *layout* adds pipeline stages and recomputation; a *ring* is a set of
communication groups; a *kind* is plans that differ in nothing but their number of micro-batches. Everything here is independent of the
calibration, so that a fit packs once and prices often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from cost_models.cells import Cells, make_cells
from cost_models.numbering import distinct, ragged
from cost_models.stages import stage_split
from cost_models.terms.volumes import leaves_root_whole, shard_padding
from cost_models.traits import PIPELINE_CUTS, Runtime, load_runtime
from cost_models.types import RECOMPUTES, Cluster, FloatArray, IntArray, Plan, PlanTable, Workload

FULL, SELECTIVE = RECOMPUTES.index("full"), RECOMPUTES.index("selective")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Pipeline stages of each layout. `entry_*` list the non-empty (stage, group) pairs."""

    cell: IntArray  # per layout
    num_ranks: IntArray
    virtual_stages: FloatArray
    rank_start: IntArray  # per layout: its first rank
    rank_layout: IntArray  # per rank
    entry_rank: IntArray
    entry_unit: IntArray
    entry_count: FloatArray
    entry_full: FloatArray  # count where the forward pass runs again in full
    entry_selective: FloatArray
    boundary_unit: IntArray  # per layout: unit with the largest output at a cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Rings:
    """Distinct data-parallel groups, from one representative plan each."""

    pair: IntArray
    cluster: IntArray
    shard_ranks: FloatArray  # data-shard x context
    replicate_ranks: FloatArray
    data_ranks: FloatArray  # both
    expert_ranks: FloatArray  # ranks that hold equal experts
    tp_degree: FloatArray
    ep_degree: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """All that pricing needs but the calibration."""

    workloads: tuple[Workload, ...]
    clusters: tuple[Cluster, ...]
    runtimes: tuple[Runtime, ...]
    pairs: tuple[tuple[str, str, str], ...]  # (runtime as calibrated, GPU family, GPU)
    plans: PlanTable
    workload: IntArray | None  # per plan; None: all use the first
    cluster: IntArray | None
    cells: Cells
    layouts: Layouts
    rings: Rings
    kind: IntArray  # per plan
    kind_plan: IntArray  # per kind: its first plan
    layout: IntArray  # per kind
    ring: IntArray  # per kind
    padding: FloatArray  # (distinct, 2): what equal shards of the layers and of the root take over what they hold
    padded: IntArray  # per kind: its row of it


def pack(
    workloads: Sequence[Workload],
    clusters: Sequence[Cluster],
    plans: PlanTable,
    workload: IntArray | None = None,
    cluster: IntArray | None = None,
) -> Packed:
    """Flatten plans.

    Args:
        workloads: distinct workloads.
        clusters: distinct clusters.
        plans: what to price.
        workload: index of each plan's workload; None: all use the first.
        cluster: index of each plan's cluster.

    Raises:
        ValueError: no plans, an unknown runtime, or a device without a rate for the dtype.
    """
    if len(plans) == 0:
        raise ValueError("no plans to price")
    zeros = np.zeros(len(plans), dtype=np.int64)
    w, c = (zeros if index is None else index for index in (workload, cluster))
    runtimes = tuple(load_runtime(name) for name in plans.runtime_names)
    devices = list(dict.fromkeys((x.device.family, x.device.name) for x in clusters))
    pairs = tuple((r.calibrated_as or r.name, *d) for r in runtimes for d in devices)
    device = np.array([devices.index((x.device.family, x.device.name)) for x in clusters])
    kind_plan, kind = distinct(w, c, *(getattr(plans, f.name) for f in fields(Plan) if f.name != "num_microbatches"))
    one, w, c = plans.take(kind_plan), w[kind_plan], c[kind_plan]
    root_whole = _root_whole(workloads, runtimes, one, w)
    keys = (w, c, one.runtime, one.tp_degree, one.cp_degree, one.ep_degree, one.micro_batch, one.sequence_parallel, root_whole)
    first, cell = distinct(*keys)
    cells = make_cells(
        workloads=workloads,
        clusters=clusters,
        runtimes=runtimes,
        plans=one.take(first),
        w=w[first],
        c=c[first],
        device=device,
        root_whole=root_whole[first],
    )
    layout_first, layout = distinct(cell, one.pp_degree, one.virtual_stages, one.recompute)
    layouts = _layouts(workloads, runtimes, cells, one.take(layout_first), cell[layout_first])
    ring_first, ring = distinct(c, one.runtime, one.dp_replicate_degree, one.dp_shard_degree, one.tp_degree, one.cp_degree, one.ep_degree)
    rings = _rings(one.take(ring_first), c[ring_first], device)
    padded_first, padded = distinct(w, ring)
    return Packed(
        workloads=tuple(workloads), clusters=tuple(clusters), runtimes=runtimes, pairs=pairs, plans=plans, workload=workload, cluster=cluster,
        cells=cells, layouts=layouts, rings=rings, kind=kind, kind_plan=kind_plan, layout=layout, ring=ring, padded=padded,
        padding=_padding([workloads[i] for i in w[padded_first]], [runtimes[i] for i in one.runtime[padded_first]], rings, ring[padded_first]),
    )  # fmt: skip


def _rings(plans: PlanTable, cluster: IntArray, device: IntArray) -> Rings:
    num_devices = int(device.max()) + 1
    f = {
        name: getattr(plans, name).astype(np.float64)
        for name in ("dp_replicate_degree", "dp_shard_degree", "tp_degree", "cp_degree", "ep_degree")
    }
    shard = f["dp_shard_degree"] * f["cp_degree"]
    data = shard * f["dp_replicate_degree"]
    return Rings(
        pair=plans.runtime * num_devices + device[cluster], cluster=cluster, shard_ranks=shard, replicate_ranks=f["dp_replicate_degree"],
        data_ranks=data, expert_ranks=np.maximum(data / f["ep_degree"], 1.0), tp_degree=f["tp_degree"], ep_degree=f["ep_degree"],
    )  # fmt: skip


def _root_whole(workloads: Sequence[Workload], runtimes: Sequence[Runtime], plans: PlanTable, w: IntArray) -> IntArray:
    """1 for plans whose tensor ranks hold embeddings and head whole."""
    out = np.zeros(len(plans), dtype=np.int64)
    ranks = plans.tp_degree * plans.dp_shard_degree * plans.cp_degree
    for j, runtime in enumerate(runtimes):
        mine = np.flatnonzero((plans.runtime == j) & (plans.tp_degree > 1)) if runtime.equal_tables else np.zeros(0, np.int64)
        for i in np.unique(w[mine]):
            at = mine[w[mine] == i]
            out[at] = leaves_root_whole(workloads[i], runtime, ranks[at])
    return out


def _padding(workloads: Sequence[Workload], runtimes: Sequence[Runtime], rings: Rings, ring: IntArray) -> FloatArray:
    """Factors on what is sharded, for pairs of a workload and a ring."""
    rows = zip(workloads, runtimes, rings.shard_ranks[ring], rings.tp_degree[ring], strict=True)
    return np.array([shard_padding(w, r, shard, tp) for w, r, shard, tp in rows])


def _layouts(workloads: Sequence[Workload], runtimes: Sequence[Runtime], cells: Cells, plans: PlanTable, cell: IntArray) -> Layouts:
    cut = np.array([PIPELINE_CUTS.index(r.pipeline_cut) for r in runtimes])[plans.runtime]
    first, which = distinct(cells.workload[cell], plans.pp_degree, plans.virtual_stages, cut)
    templates = [_template(workloads[cells.workload[cell[i]]], int(plans.pp_degree[i]), int(plans.virtual_stages[i]), PIPELINE_CUTS[cut[i]])
                 for i in first]  # fmt: skip
    sizes = np.array([len(t[0]) for t in templates])
    at, layout = ragged((np.cumsum(sizes) - sizes)[which], sizes[which])
    rank, group, count = (np.concatenate([t[i] for t in templates])[at] for i in range(3))
    rank_start = np.cumsum(plans.pp_degree) - plans.pp_degree
    unit = cells.unit_start[cell][layout] + group
    again = count * cells.can_recompute[unit]
    mode = plans.recompute[layout]
    boundary = np.array([t[3] for t in templates])[which]
    return Layouts(
        cell=cell, num_ranks=plans.pp_degree, virtual_stages=plans.virtual_stages.astype(np.float64), rank_start=rank_start,
        rank_layout=np.repeat(np.arange(len(cell)), plans.pp_degree), entry_rank=rank_start[layout] + rank, entry_unit=unit,
        entry_count=count.astype(np.float64), entry_full=np.where(mode == FULL, again, 0.0),
        entry_selective=np.where(mode == SELECTIVE, again, 0.0), boundary_unit=cells.unit_start[cell] + boundary,
    )  # fmt: skip


def _template(workload: Workload, num_ranks: int, virtual_stages: int, cut: str) -> tuple[IntArray, IntArray, IntArray, int]:
    """Rank, group and count of the non-empty parts of each pipeline rank, and the group with the largest output at a cut."""
    split = stage_split(workload, num_ranks * virtual_stages, cut=cut)
    counts = split.on_ranks(num_ranks)
    rank, group = np.nonzero(counts)
    outputs = np.array([g.boundary_bytes for g in workload.groups])
    largest = int(split.boundary_group[np.argmax(outputs[split.boundary_group])]) if len(split.boundary_group) else 0
    return rank.astype(np.int64), group.astype(np.int64), counts[rank, group], largest
