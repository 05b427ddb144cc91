"""From packed plans and a calibration to seconds: cells, pipeline stages, kinds of plans, plans. Array arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cost_models.calibrate_io import Calibration
from cost_models.cells import LOSS_SUMS, Cells
from cost_models.pack import Packed
from cost_models.price_plans import Constants, RankCosts, RingCosts, at_pair, machine_of, price_kinds, price_rings
from cost_models.seconds import Seconds
from cost_models.terms import communication, compute, pipeline, volumes
from cost_models.types import TIME_PARTS, FloatArray

_CHUNK = 1 << 14  # plans priced together: their arrays stay in the processor's cache
_CONTEXT_EXPOSED_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """Seconds per repeat of each unit, one micro-batch."""

    compute_s: FloatArray  # forward and backward
    forward_s: FloatArray
    selective_s: FloatArray  # run again by selective recomputation
    link_s: FloatArray  # tensor, context and expert collectives
    forward_link_s: FloatArray  # of it in the forward pass
    full_link_s: FloatArray  # of it again under full recomputation
    selective_link_s: FloatArray
    host_s: FloatArray
    forward_host_s: FloatArray
    full_host_s: FloatArray
    selective_host_s: FloatArray


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
    kinds = _all_kinds(packed, constants, ranks, price_rings(packed, constants))
    grows = {name for name, seconds in kinds.items() if seconds.further.any()}
    out = {name: np.empty(len(packed.plans)) for name in TIME_PARTS}
    for start in range(0, len(packed.plans), _CHUNK):
        part = slice(start, start + _CHUNK)
        kind, further = packed.kind[part], packed.plans.num_microbatches[part] - 1.0
        for name, seconds in kinds.items():
            one = seconds.one.take(kind)
            out[name][part] = one + further * seconds.further.take(kind) if name in grows else one
    return out


def _all_kinds(packed: Packed, constants: Constants, ranks: RankCosts, rings: RingCosts) -> dict[str, Seconds]:
    """Seconds of every kind of plans by part."""
    parts = [slice(start, start + _CHUNK) for start in range(0, len(packed.kind_plan), _CHUNK)]
    chunks = [price_kinds(packed, constants, ranks, rings, part) for part in parts]
    return {
        name: Seconds(one=np.concatenate([c[name].one for c in chunks]), further=np.concatenate([c[name].further for c in chunks]))
        for name in TIME_PARTS
    }


def _price_units(packed: Packed, constants: Constants, anchors: FloatArray) -> _Units:
    cells = packed.cells
    anchor = anchors[cells.workload[cells.unit_cell]]
    op_s = compute.shape_seconds(cells.shapes, constants, cells.op_pair)
    per_phase = np.bincount(cells.op_unit * 3 + cells.op_phase, weights=op_s, minlength=3 * cells.num_units).reshape(-1, 3)
    forward, backward = per_phase[:, 0] * anchor, per_phase[:, 1] * anchor
    selective = np.bincount(cells.op_unit, weights=op_s * cells.op_selective, minlength=cells.num_units) * anchor
    k = at_pair(constants, cells.pair[cells.unit_cell])
    link, forward_link, full_link, selective_link = _links(packed, k)
    launch = np.where(cells.measured_host_s > 0, cells.measured_host_s, k["host_s_per_kernel"])
    calls = cells.collectives * k["host_s_per_collective"]
    forward_host = (launch * cells.forward_kernels + calls) * anchor
    return _Units(
        compute_s=forward + backward, forward_s=forward, selective_s=selective,
        link_s=link, forward_link_s=forward_link, full_link_s=full_link, selective_link_s=selective_link,
        host_s=forward_host + (launch * k["backward_launch_share"] * cells.backward_kernels + calls) * anchor,
        forward_host_s=forward_host, full_host_s=forward_host,
        selective_host_s=launch * cells.selective_kernels * anchor,
    )  # fmt: skip


def _links(packed: Packed, k: Mapping[str, FloatArray]) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Seconds per unit of tensor, context and expert collectives: in both passes, in the forward pass, and again under full and under
    selective recomputation.

    Context parallelism passes keys and values round a ring, 30% of it exposed.
    """
    cells: Cells = packed.cells
    of = cells.unit_cell
    machine = machine_of(packed, cells.cluster[of])
    tp, cp = cells.tp_degree[of], cells.cp_degree[of]
    ring = communication.ring(machine, k, tp, np.ones_like(tp))
    hidden = cells.tp_overlap[of] * cells.sequence_parallel[of] * cells.can_recompute * (cells.token_bytes == 0)
    one = ring.seconds(cells.boundary_bytes) * communication.overlapped_share(tp, hidden, k)
    sequence = cells.sequence_parallel[of]
    inside, edges = sequence * cells.in_sequence, sequence * cells.edges
    forward = volumes.tensor_calls(cells.collectives, inside, edges=edges)
    backward = volumes.tensor_calls(cells.collectives, inside, edges=edges, gathers=1.0 + cells.regathers[of])
    again = volumes.tensor_calls(cells.collectives, inside, skipped=cells.early_stop[of])
    skipped = np.where(cells.selective_sums > 0, cells.early_stop[of], cells.collectives)
    partly = volumes.tensor_calls(cells.collectives, inside, skipped=skipped)
    experts = _exchanges_s(cells, machine, k)
    passes = _CONTEXT_EXPOSED_SHARE * volumes.CONTEXT_PASSES
    context = passes * np.where(cp > 1, communication.ring(machine, k, cp, tp).seconds(cells.context_bytes * cp), 0.0)
    whole = 2.0 * cells.reduces_whole[of] * sequence * (cells.whole_tensors * ring.latency_s + cells.whole_bytes * ring.s_per_byte)
    logits = np.where(cells.logits_bytes > 0, ring.seconds(cells.logits_bytes), 0.0)
    loss = np.where(cells.loss_bytes > 0, 2.0 * LOSS_SUMS * ring.seconds(cells.loss_bytes / LOSS_SUMS), 0.0)
    rows, columns = (calls * ring.latency_s + size * ring.s_per_byte for calls, size in (
        (cells.num_row_adapters, cells.row_adapter_bytes), (cells.num_column_adapters, cells.column_adapter_bytes)))  # fmt: skip
    adapters_there, adapters_back = (np.where(inside > 0, rows + columns, 2.0 * summed) for summed in (rows, columns))
    there = one * forward.ring_passes + adapters_there + experts + context / volumes.CONTEXT_PASSES
    back = one * backward.ring_passes + adapters_back + whole + logits + loss + experts + context * (1.0 - 1.0 / volumes.CONTEXT_PASSES)
    selective = cells.selective_gathers * one * partly.ring_passes + cells.selective_sums * experts
    return there + back, there, one * again.ring_passes + adapters_there + experts, selective


def _exchanges_s(cells: Cells, machine: communication.Machine, k: Mapping[str, FloatArray]) -> FloatArray:
    """Seconds per unit of tokens on their way to experts and back, one pass.

    With sequence parallelism each tensor rank sends its part of the tokens. Runtimes that send tokens once per node keep experts whole
    (expert tensor degree 1), so that the devices of an expert group are neighbours; others divide them over the tensor ranks.
    """
    of = cells.unit_cell
    tp, once = cells.tp_degree[of], cells.once_per_node[of]
    how = communication.Dispatch(
        ep_degree=cells.ep_degree[of], stride=np.where(once > 0, 1.0, tp), num_experts=cells.num_experts[of],
        num_active=cells.num_active_experts[of], routed_share=cells.routed_share[of], once_per_node=once,
    )  # fmt: skip
    mine = cells.token_bytes / np.where(cells.sequence_parallel[of] > 0, tp, 1.0)
    return volumes.EXPERT_EXCHANGES * communication.all_to_all_s(machine, k, mine, how)


def _price_ranks(packed: Packed, units: _Units) -> RankCosts:
    layouts, cells = packed.layouts, packed.cells
    unit, rank = layouts.entry_unit, layouts.entry_rank
    count, full, selective = layouts.entry_count, layouts.entry_full, layouts.entry_selective
    num_ranks = len(layouts.rank_layout)

    def total(values: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(rank, weights=values, minlength=num_ranks), dtype=np.float64)

    work = total(count * units.compute_s[unit])
    again = total(full * units.forward_s[unit] + selective * units.selective_s[unit])
    link = total(count * units.link_s[unit] + full * units.full_link_s[unit] + selective * units.selective_link_s[unit])
    host = total(count * units.host_s[unit] + full * units.full_host_s[unit] + selective * units.selective_host_s[unit])
    device = work + again + link
    forward = {
        "forward_device_share": _share(total(count * (units.forward_s + units.forward_link_s)[unit]), device),
        "forward_host_share": _share(total(count * units.forward_host_s[unit]), host),
    }
    busy = pipeline.busy_s(device, host, **forward)
    slowest = pipeline.slowest_rank(busy, layouts.rank_layout, layouts.rank_start)
    at = slowest.rank
    dense, expert = total(count * cells.dense_params[unit]), total(count * cells.expert_params[unit])
    layers, is_unit = count * cells.num_layers[unit], cells.is_unit[unit]
    root = total(count * (1.0 - is_unit) * (cells.dense_params + cells.expert_params)[unit])
    fullest = pipeline.slowest_rank(dense, layouts.rank_layout, layouts.rank_start).rank
    sharding = volumes.sharding_units(total(layers), total(layers * is_unit), root)
    trainable = total(count * (cells.dense_params * cells.trainable_share)[unit]) / np.maximum(dense, 1.0)
    return RankCosts(
        compute_s=work[at], recompute_s=again[at], link_s=link[at], host_s=host[at], busy_s=busy[at], others_s=slowest.others_s,
        **{name: values[at] for name, values in forward.items()},
        num_units=sharding.num_units[fullest], root_params=sharding.root_params[fullest], blocks=total(count * cells.can_recompute[unit])[at],
        boundary_bytes=cells.boundary_bytes[layouts.boundary_unit], dense_params=dense[fullest],
        expert_params=np.maximum.reduceat(expert, layouts.rank_start), trainable_share=trainable[at],
    )  # fmt: skip


def _share(part: FloatArray, whole: FloatArray) -> FloatArray:
    """Part of the whole; 0 of nothing."""
    return part / np.where(whole > 0, whole, 1.0)
