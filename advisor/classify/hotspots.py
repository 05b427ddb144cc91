"""Where the time of one micro-batch goes: operator classes that partition it, each with its roofline and what bounds it.

Shares sum to 1. Seconds are measured where the profile was taken on the device that is planned for, else modelled for that device.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd

from advisor.classify.work import Work, has_only_seconds, is_measured_on, measured_work, modelled_work
from advisor.profiling.schema import StepProfile
from advisor.report.report import Hotspot
from cost_models import Calibration
from cost_models.types import OP_CLASSES, Cluster, Workload

#: A class whose kernels take less on average is latency-bound: start-up and tail of a kernel take about 3-5 us on any GPU,
#: and a framework needs about as long to launch it, so shorter kernels are mostly overhead whatever they compute.
LATENCY_BOUND_S = 10e-6
#: The same up to ten times that long where the work of a kernel would take less than this at peak rates.
TINY_WORK_S = 1e-6
#: Thresholds of `step_verdict`: share of idle time from which the host is the limit, share of collectives and copies between
#: devices from which communication is. Practitioners' figures: a device idle under 30% computes; over 25% all-reduce communicates.
IDLE_SHARE = 0.30
COMMUNICATION_SHARE = 0.25
_COMMUNICATION = ("collective", "copy-device-to-device")
_PRODUCTS = ("convolution", "matmul", "attention", "recurrent")
_HOST = ("idle", "copy-host-to-device", "copy-device-to-host")


def hotspots(profile: StepProfile, workload: Workload, cluster: Cluster, calibration: Calibration | None = None) -> tuple[Hotspot, ...]:
    """Operator classes of one micro-batch on one device, with its share of the optimizer step, largest first.

    Args:
        profile: the step; its seconds are used if they were measured on the cluster's device, or are all that a trace without shapes
            has; else every operator is modelled.
        workload: the same step as the cost models need it.
        cluster: the device and links planned for.
        calibration: constants of the cost model; the shipped ones by default.

    Returns:
        One entry per class with any time; `time_share` sums to 1. Empty when the step holds no operators.
        `roofline_share` is the time at the device's peak rates over the time taken, at most 1; 0 where neither flops nor bytes
        are known. Idle gaps (class "idle") are measured, or modelled from the kernels launched.
    """
    measured = is_measured_on(profile, workload, cluster.device) or has_only_seconds(profile)
    work = measured_work(profile, workload, cluster) if measured else modelled_work(profile, workload, cluster, calibration)
    total_s = float(work.seconds.sum())
    if total_s <= 0:
        return ()
    source = "measured" if measured else "modelled"
    spots = [_spot(work, index, total_s, source) for index in sorted(set(work.op_class.tolist()))]
    return _close_shares(sorted((spot for spot in spots if spot.time_s > 0), key=lambda spot: -spot.time_s))


def frame(spots: tuple[Hotspot, ...]) -> pd.DataFrame:
    """Hotspots as a frame, one row per class in the given order; columns are the fields of Hotspot."""
    columns = list(Hotspot.__dataclass_fields__)
    return pd.DataFrame([{name: getattr(spot, name) for name in columns} for spot in spots], columns=columns)


def step_verdict(spots: tuple[Hotspot, ...]) -> str:
    """What bounds the step as a whole: "communication", "host", "latency", "compute" or "memory"; "" without hotspots.

    Communication if collectives and copies between devices take over 25%. Host if the device idles over 30%, or waits that
    long for copies from and to the host; "latency" instead if it idles because most of its work is in tiny kernels. Otherwise
    whichever of compute, memory and latency binds the larger part of the rest.
    """
    if not spots:
        return ""
    if sum(s.time_share for s in spots if s.op_class in _COMMUNICATION) > COMMUNICATION_SHARE:
        return "communication"
    bound = {kind: sum(s.time_share for s in spots if s.bound_by == kind) for kind in ("compute", "memory", "latency")}
    largest = max(bound, key=lambda kind: bound[kind])
    if sum(s.time_share for s in spots if s.op_class in _HOST) > IDLE_SHARE:
        idle = sum(s.time_share for s in spots if s.op_class == "idle")
        return "latency" if largest == "latency" and idle > IDLE_SHARE else "host"
    return largest


def _spot(work: Work, index: int, total_s: float, source: str) -> Hotspot:
    mine = work.op_class == index
    time_s, flops = float(work.seconds[mine].sum()), float(work.flops[mine].sum())
    ideal_s = float(np.maximum(work.ideal_compute_s, work.ideal_move_s)[mine].sum())
    return Hotspot(
        op_class=OP_CLASSES[index], time_share=time_s / total_s, time_s=time_s, flops=flops, bytes=float(work.num_bytes[mine].sum()),
        achieved_flops_per_s=flops / time_s if time_s else 0.0, roofline_share=min(ideal_s / time_s, 1.0) if time_s else 0.0,
        bound_by=_bound_by(work, index), num_calls=round(float(work.num_calls[mine].sum())), source=source,
    )  # fmt: skip


def _bound_by(work: Work, index: int) -> str:
    """Verdict of one class.

    Collectives and copies between devices: communication. Idle gaps and copies from and to the host: host. Otherwise latency
    if the kernels take under LATENCY_BOUND_S on average, or under ten times that with work for less than TINY_WORK_S; compute if operators that lie right
    of the roofline's ridge (flops at peak take longer than bytes at full memory rate) take at least half of the class's time; else
    memory. Where the profile knows no flops and bytes, products, convolutions and attention count as compute, the rest as memory.
    """
    name, mine = OP_CLASSES[index], work.op_class == index
    if name in _COMMUNICATION:
        return "communication"
    if name in _HOST:
        return "host"
    seconds, num_kernels = work.seconds[mine], max(float(work.num_kernels[mine].sum()), 1.0)
    compute_s, move_s = work.ideal_compute_s[mine], work.ideal_move_s[mine]
    time_s, ideal_s = float(seconds.sum()), float(np.maximum(compute_s, move_s).sum())
    kernel_s = time_s / num_kernels
    if kernel_s < LATENCY_BOUND_S or (kernel_s < 10 * LATENCY_BOUND_S and 0 < ideal_s / num_kernels < TINY_WORK_S):
        return "latency"
    right_of_ridge = np.where(compute_s + move_s > 0, compute_s > move_s, name in _PRODUCTS)
    return "compute" if float(seconds[right_of_ridge].sum()) >= 0.5 * time_s else "memory"


def _close_shares(spots: list[Hotspot]) -> tuple[Hotspot, ...]:
    """Shares as multiples of 2^-40, the largest taking up the rounding: such sums are exact, so they give 1 in any order."""
    rest = [dataclasses.replace(spot, time_share=round(spot.time_share * 2**40) / 2**40) for spot in spots[1:]]
    return (dataclasses.replace(spots[0], time_share=1.0 - sum(spot.time_share for spot in rest)), *rest)
