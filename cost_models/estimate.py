"""estimate: what every plan of a table takes, in seconds and bytes, with an interval and its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from cost_models.calibrate_io import Calibration, load_calibration
from cost_models.pack import Packed, pack
from cost_models.price import price
from cost_models.terms.compute import peak_flops_per_s
from cost_models.terms.memory import MemoryCosts, memory_costs, memory_costs_rows
from cost_models.types import PRICING_KINDS, Cluster, Device, Estimates, FloatArray, IntArray, Plan, PlanTable, Workload

_T = TypeVar("_T")
#: A measured step corrects the modelled compute and host seconds by at most this factor either way.
_LARGEST_ANCHOR = 20.0


def estimate(workload: Workload, cluster: Cluster, plans: PlanTable, calibration: Calibration | None = None) -> Estimates:
    """Price plans of one workload on one cluster; made for millions of plans.

    Args:
        workload: the training step. With `measured_step_s` on the cluster's own device, compute and host seconds are scaled so that the
            modelled single-device step equals the measured one: factor = (measured - rest) / (compute + host), rest being
            optimizer, data loading and fixed parts.
        cluster: where it would run.
        plans: what to price.
        calibration: constants; the shipped ones by default.

    Raises:
        ValueError: no plans, an unknown runtime, or a device without a rate for the workload's dtype.
    """
    calibration = calibration or load_calibration()
    packed = pack((workload,), (cluster,), plans)
    memory = memory_costs(workload, cluster, plans, calibration, kinds=(packed.kind_plan, packed.kind))
    return _estimates(packed, calibration, memory)


def estimate_rows(
    workloads: Sequence[Workload], clusters: Sequence[Cluster], plans: PlanTable, calibration: Calibration | None = None
) -> Estimates:
    """Price row i's plan with workload i on cluster i, e.g. published runs. Equal objects (by identity) are flattened once.

    Raises:
        ValueError: lengths differ, no rows, an unknown runtime, or a device without a rate for a dtype.
    """
    calibration = calibration or load_calibration()
    packed = pack_rows(workloads, clusters, plans)
    return _estimates(packed, calibration, memory_costs_rows(workloads, clusters, plans, calibration))


def pack_rows(workloads: Sequence[Workload], clusters: Sequence[Cluster], plans: PlanTable) -> Packed:
    """Flatten rows for repeated pricing with `price`, e.g. in a fit.

    Raises:
        ValueError: lengths differ, no rows, an unknown runtime, or a device without a rate for a dtype.
    """
    if not len(workloads) == len(clusters) == len(plans):
        raise ValueError(f"{len(workloads)} workloads, {len(clusters)} clusters and {len(plans)} plans: the numbers must be equal")
    distinct_workloads, workload = _numbered(workloads)
    distinct_clusters, cluster = _numbered(clusters)
    return pack(distinct_workloads, distinct_clusters, plans, workload, cluster)


def _numbered(values: Sequence[_T]) -> tuple[list[_T], IntArray]:
    numbers = {id(v): v for v in values}
    order = {key: i for i, key in enumerate(numbers)}
    return list(numbers.values()), np.array([order[id(v)] for v in values], dtype=np.int64)


def _estimates(packed: Packed, calibration: Calibration, memory: MemoryCosts) -> Estimates:
    parts = price(packed, calibration, anchors=anchor_factors(packed, calibration))
    step_s = sum_parts(parts)
    factors = np.array([_interval_factor(r.calibrated_as or r.name, calibration) for r in packed.runtimes])
    factor = factors if len(factors) == 1 else factors[packed.plans.runtime]
    return Estimates(
        step_time_s=step_s, low_s=step_s / factor, high_s=step_s * factor, breakdown_s=parts, peak_memory_bytes=memory.peak,
        allocated_memory_bytes=memory.allocated, high_memory_bytes=memory.high, breakdown_bytes=memory.parts, load_memory_bytes=memory.load,
        save_memory_bytes=memory.save, mfu=_mfu(packed, step_s), host_memory_bytes=memory.host_bytes,
    )  # fmt: skip


def sum_parts(parts: Mapping[str, FloatArray]) -> FloatArray:
    """Seconds of the whole step, added in the order of TIME_PARTS."""
    first, *rest = parts.values()
    total = first.copy()
    for values in rest:
        total += values
    return total


def _interval_factor(runtime: str, calibration: Calibration) -> float:
    """Half width of the interval as a factor: x and / this held 80% of measured runs that the fit had not seen."""
    known = runtime in calibration.by_runtime or runtime in calibration.data.get("runtimes", ())
    return float(calibration.interval.get("known_runtime_factor" if known else "unknown_runtime_factor", 1.5))


def _mfu(packed: Packed, step_s: FloatArray) -> FloatArray:
    """Model flops over what the devices could do at peak in that time."""
    plans = packed.plans
    per_device = plans.micro_batch * plans.num_microbatches / (plans.tp_degree * plans.cp_degree * plans.pp_degree)
    if packed.workload is None or packed.cluster is None:
        workload, cluster = packed.workloads[0], packed.clusters[0]
        return _peak_s(workload, cluster.device) * per_device / step_s
    seen = {(int(w), int(c)) for w, c in zip(packed.workload, packed.cluster, strict=True)}
    share = np.zeros((len(packed.workloads), len(packed.clusters)))
    for w, c in seen:
        share[w, c] = _peak_s(packed.workloads[w], packed.clusters[c].device)
    return share[packed.workload, packed.cluster] * per_device / step_s


def _peak_s(workload: Workload, device: Device) -> float:
    """Seconds of one sample's model flops at the device's peak; convolutions count at the peak of the dtype they really run in."""
    work = np.zeros(2)
    for group in workload.groups:
        ops = group.ops
        flops = np.where(ops.kind == PRICING_KINDS.index("memory"), 0.0, ops.m * ops.n * ops.k * ops.batch * ops.work_share)
        is_convolution = ops.kind == PRICING_KINDS.index("convolution")
        work += group.num_repeats * np.array([flops[is_convolution].sum(), flops[~is_convolution].sum()])
    shares = work / work.sum() if work.sum() else np.array([0.0, 1.0])
    rates = np.array([peak_flops_per_s(device, workload.compute_dtype, convolution=c) for c in (True, False)])
    return float(workload.model_flops * (shares / rates).sum())


def anchor_factors(packed: Packed, calibration: Calibration) -> FloatArray | None:
    """Factor on compute and host seconds per workload: 1 without a measured step on the device it would run on."""
    factors = np.ones(len(packed.workloads))
    cluster_of = {int(i): packed.clusters[int(j)] for i, j in zip(packed.cells.workload, packed.cells.cluster, strict=True)}
    anchored = [i for i, c in cluster_of.items() if (w := packed.workloads[i]).measured_step_s and w.measured_device == c.device.name]
    for i in anchored:
        workload = dataclasses.replace(packed.workloads[i], measured_step_s=None)
        single = PlanTable.from_plans([Plan(micro_batch=workload.traced_batch, runtime=packed.plans.runtime_names[0])])
        parts = price(pack((workload,), (cluster_of[i],), single), calibration)
        scaled = float(parts["compute"][0] + parts["host_overhead"][0])
        rest = float(sum(values[0] for values in parts.values())) - scaled
        measured = float(packed.workloads[i].measured_step_s or 0.0)
        factors[i] = np.clip((measured - rest) / scaled, 1 / _LARGEST_ANCHOR, _LARGEST_ANCHOR)
    return factors if anchored else None
