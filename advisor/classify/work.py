"""The work of one micro-batch as arrays, one entry per operator call, measured or modelled: what hotspots are summed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd

from advisor.profiling.schema import StepProfile
from cost_models import Calibration, load_calibration, op_seconds
from cost_models.catalogue import gpu_for_device_name
from cost_models.terms.compute import FLASH_BACKWARD_FACTOR, keeps_order, peak_flops_per_s
from cost_models.terms.optimizer import optimizer_bytes_per_param
from cost_models.types import BATCH_DIMS, OP_CLASSES, PHASES, PRICING_KINDS, Cluster, Device, FloatArray, IntArray, OpTable, Workload

#: Copies that leave the device: priced by their bytes over a link.
CROSS_COPIES = ("copy-host-to-device", "copy-device-to-host", "copy-device-to-device")
_LINK_CLASSES = np.array([OP_CLASSES.index(c) for c in (*CROSS_COPIES, "collective")])
_FLOAT_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")
#: Sharpness of max(device, host) where launches run beside the device: (d^4 + h^4)^(1/4), fitted on published runs.
_OVERLAP_EXPONENT = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Operator calls of one micro-batch with its share of the optimizer step; all arrays have equal length."""

    op_class: IntArray  # index into OP_CLASSES
    seconds: FloatArray
    flops: FloatArray
    num_bytes: FloatArray  # read and written, or moved over a link
    ideal_compute_s: FloatArray  # flops at the device's peak
    ideal_move_s: FloatArray  # bytes at the device memory's (or the link's) rate
    num_kernels: FloatArray
    num_calls: FloatArray

    @classmethod
    def joined(cls, parts: Sequence[Work]) -> Work:
        """One table out of several."""
        return cls(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)})

    @classmethod
    def single(cls, op_class: str, *, seconds: float, num_bytes: float = 0.0, ideal_move_s: float = 0.0, num_kernels: float = 0.0,
               num_calls: float = 1.0) -> Work:  # fmt: skip
        """A table of one entry that computes nothing."""
        one = {name: np.array([float(value)]) for name, value in (
            ("seconds", seconds), ("flops", 0.0), ("num_bytes", num_bytes), ("ideal_compute_s", 0.0), ("ideal_move_s", ideal_move_s),
            ("num_kernels", num_kernels), ("num_calls", num_calls))}  # fmt: skip
        return cls(op_class=np.array([OP_CLASSES.index(op_class)]), **one)


def is_measured_on(profile: StepProfile, workload: Workload, device: Device) -> bool:
    """Whether the profile's seconds were measured on the device that is planned for.

    A GPU is recognised by the name its driver reports; one that the catalogue doesn't know, or a trace without the name, is taken
    to be the cluster's. Seconds of a CPU count only when the cluster's device is a CPU.
    """
    if profile.meta.source == "traced" or not profile.operators["measured_s"].notna().any():
        return False
    on_cpu = "cpu" in profile.meta.device.lower() or not profile.operators["device"].astype(str).str.contains("cuda|hip|gpu|xpu").any()
    if on_cpu or is_cpu(device):
        return on_cpu and is_cpu(device)
    try:
        return gpu_for_device_name(profile.meta.device or workload.measured_device) == device.name
    except ValueError:
        return True


def has_only_seconds(profile: StepProfile) -> bool:
    """Whether the profile is a trace recorded without shapes: no other device's seconds can be made of it."""
    rows = profile.operators
    return profile.meta.source == "imported" and not rows["flops"].any() and not rows["input_shapes"].map(len).any()


def is_cpu(device: Device) -> bool:
    """Whether a device is the host's processor."""
    return device.name == "cpu" or device.family == "cpu"


def measured_work(profile: StepProfile, workload: Workload, cluster: Cluster) -> Work:
    """Rows of a measured profile; the optimizer step is divided by the micro-batches that share it. Idle gaps are one entry."""
    meta, rows = profile.meta, profile.operators
    rows = rows[rows["measured_s"].notna()]
    share = np.where(rows["phase"] == "optimizer", 1.0 / max(meta.accumulation, 1), 1.0)
    op_class = _class_index(rows["op_class"])
    num_bytes = (rows["read_bytes"] + rows["written_bytes"]).to_numpy(float) * share
    copies = np.isin(op_class, _LINK_CLASSES)
    num_bytes = np.where(copies, rows["written_bytes"].to_numpy(float) * share, num_bytes)
    flops = rows["flops"].to_numpy(float) * share
    seconds = rows["measured_s"].to_numpy(float) * share
    work = Work(
        op_class=op_class, seconds=seconds, flops=flops, num_bytes=num_bytes, num_kernels=rows["num_kernels"].to_numpy(float) * share,
        ideal_compute_s=flops / _peaks(rows, workload, cluster.device), ideal_move_s=num_bytes / _rates(op_class, cluster),
        num_calls=np.ones(len(rows)),
    )  # fmt: skip
    if meta.idle_s is not None:
        idle_s = meta.idle_s / max(meta.accumulation, 1)
    else:
        idle_s = (meta.step_time_s or 0.0) / max(meta.accumulation, 1) - float(seconds.sum())
    return Work.joined([work, Work.single("idle", seconds=idle_s)]) if idle_s > 0 else work


def modelled_work(profile: StepProfile, workload: Workload, cluster: Cluster, calibration: Calibration | None) -> Work:
    """Every operator priced for the cluster's device at the batch that was traced, the copies over the cluster's links."""
    calibration = calibration or load_calibration()
    parts = [_group_work(group.ops, group.num_repeats, workload, cluster, calibration) for group in workload.groups if len(group.ops)]
    has_optimizer = any(bool((group.ops.phase == PHASES.index("optimizer")).any()) for group in workload.groups)
    if not has_optimizer:
        parts.append(_optimizer_work(profile, workload, cluster, calibration))
    parts += _copy_work(profile, workload, cluster)
    work = Work.joined(parts)
    idle_s = _host_gap_s(work, workload, cluster.device, calibration)
    return Work.joined([work, Work.single("idle", seconds=idle_s)]) if idle_s > 0 else work


def _group_work(ops: OpTable, repeats: int, workload: Workload, cluster: Cluster, calibration: Calibration) -> Work:
    device, samples = cluster.device, float(workload.traced_batch)
    seconds = op_seconds(
        ops,
        device,
        micro_batch=samples,
        compute_dtype=workload.compute_dtype,
        calibration=calibration,
        in_order=keeps_order(workload.groups),
    )
    flops = op_flops(ops, samples)
    num_bytes = ops.bytes_per_sample * samples + ops.bytes_fixed
    peak = np.where(
        ops.kind == PRICING_KINDS.index("convolution"), peak_flops_per_s(device, workload.compute_dtype, convolution=True),
        peak_flops_per_s(device, workload.compute_dtype),
    )  # fmt: skip
    here = ~np.isin(ops.op_class, _LINK_CLASSES)  # copies come from the profile, collectives belong to a plan
    table = Work(
        op_class=ops.op_class, seconds=seconds * repeats, flops=flops * repeats, num_bytes=num_bytes * repeats,
        ideal_compute_s=flops * repeats / peak, ideal_move_s=num_bytes * repeats / device.memory_bytes_per_s,
        num_kernels=ops.num_kernels * repeats, num_calls=np.full(len(ops), float(repeats)),
    )  # fmt: skip
    return Work(**{f.name: getattr(table, f.name)[here] for f in fields(Work)})


def op_flops(ops: OpTable, micro_batch: float) -> FloatArray:
    """Flops of each operator for a micro-batch: 2 m n k per product; attention has two products (five in backward, as FlashAttention)."""
    sizes = ops.m * ops.n * ops.k * ops.batch * np.where(ops.batch_dim == BATCH_DIMS.index("none"), 1.0, micro_batch)
    attention = np.where(ops.phase == PHASES.index("backward"), 4.0 * FLASH_BACKWARD_FACTOR, 4.0)
    factor = np.select([ops.kind == PRICING_KINDS.index("attention"), ops.kind == PRICING_KINDS.index("memory")], [attention, 0.0], 2.0)
    return np.asarray(factor * sizes * ops.work_share, dtype=np.float64)


def _optimizer_work(profile: StepProfile, workload: Workload, cluster: Cluster, calibration: Calibration) -> Work:
    """One micro-batch's share of the optimizer step, by the bytes it moves.

    That is what the profile's optimizer operators read and write, and at least what a fused optimizer must (the cost model's count):
    optimizers that run operator by operator over lists of tensors, torch's default, move about twice as much. Arithmetic is ignored.
    """
    spec, share = workload.optimizer, 1.0 / max(profile.meta.accumulation, 1)
    rows = profile.operators[(profile.operators["phase"] == "optimizer") & (profile.operators["op_class"] == "optimizer")]
    least = workload.num_trainable_params * float(optimizer_bytes_per_param(*(np.array(size) for size in (
        spec.state_bytes_per_param, workload.master_bytes, workload.param_bytes, workload.grad_bytes))))  # fmt: skip
    num_bytes = max(float((rows["read_bytes"] + rows["written_bytes"]).sum()), least) * share
    ideal_s = num_bytes / cluster.device.memory_bytes_per_s
    rate_share = calibration.value("memory_rate_share", family=cluster.device.family)
    return Work.single("optimizer", seconds=ideal_s / rate_share, num_bytes=num_bytes, ideal_move_s=ideal_s,
                       num_kernels=spec.num_kernels * share)  # fmt: skip


def _copy_work(profile: StepProfile, workload: Workload, cluster: Cluster) -> list[Work]:
    """Copies between devices: the profile's copy rows, or the input batch where the script showed no copy of it."""
    if is_cpu(cluster.device):
        return []
    rows, works = profile.operators, []
    for op_class in CROSS_COPIES:
        of_class = rows[rows["op_class"] == op_class]
        num_bytes, num_calls = float(of_class["written_bytes"].sum()), len(of_class)
        if op_class == "copy-host-to-device":
            num_bytes, num_calls = max(num_bytes, workload.input_bytes * workload.traced_batch), max(num_calls, 1)
        if num_bytes:
            between = op_class == "copy-device-to-device"
            ideal_s = num_bytes / (cluster.intra.bytes_per_s if between else cluster.host_bytes_per_s)
            latency_s = cluster.intra.latency_s if between else 0.0
            works.append(Work.single(op_class, seconds=ideal_s + latency_s * num_calls, num_bytes=num_bytes, ideal_move_s=ideal_s,
                                     num_kernels=num_calls, num_calls=num_calls))  # fmt: skip
    return works


def _host_gap_s(work: Work, workload: Workload, device: Device, calibration: Calibration) -> float:
    """Seconds the device waits for the host to launch kernels: (d^4 + h^4)^(1/4) - d, with h from the kernels launched.

    Kernels of the backward pass take the host longer, as in the cost model (`backward_launch_share`).
    """
    if is_cpu(device):
        return 0.0
    per_kernel_s = workload.measured_host_s_per_kernel or calibration.value("host_s_per_kernel", family=device.family)
    more = calibration.value("backward_launch_share", family=device.family) - 1.0
    launches = float(work.num_kernels.sum()) + more * sum(_backward_kernels(group.ops) * group.num_repeats for group in workload.groups)
    device_s, host_s = float(work.seconds.sum()), launches * per_kernel_s
    longest_s = max(device_s, host_s)
    if not longest_s:
        return 0.0
    blend: float = ((device_s / longest_s) ** _OVERLAP_EXPONENT + (host_s / longest_s) ** _OVERLAP_EXPONENT) ** (1 / _OVERLAP_EXPONENT)
    return max(longest_s * blend - device_s, 0.0)


def _backward_kernels(ops: OpTable) -> float:
    counted = (ops.phase == PHASES.index("backward")) & ~np.isin(ops.op_class, _LINK_CLASSES)
    return float(ops.num_kernels[counted].sum())


def _class_index(classes: pd.Series[str]) -> IntArray:
    known = {name: index for index, name in enumerate(OP_CLASSES)}
    return np.array([known.get(c, known["other"]) for c in classes], dtype=np.int64)


def _peaks(rows: pd.DataFrame, workload: Workload, device: Device) -> FloatArray:
    """Peak rate for each row's own dtype; fp32 products run in TF32 where the workload says so."""
    peaks: dict[tuple[str, bool], float] = {}
    keys = list(zip(rows["dtype"].astype(str), (rows["op_class"] == "convolution"), strict=True))
    for dtype, convolution in set(keys):
        name = dtype if dtype in _FLOAT_DTYPES else "fp32"
        name = "tf32" if name == "fp32" and workload.compute_dtype == "tf32" else name
        peaks[dtype, convolution] = peak_flops_per_s(device, name, convolution=bool(convolution))
    return np.array([peaks[key] for key in keys], dtype=np.float64)


def _rates(op_class: IntArray, cluster: Cluster) -> FloatArray:
    """Bytes a second that each entry could move at best: device memory, or the link of a copy."""
    rates = np.full(len(OP_CLASSES), cluster.device.memory_bytes_per_s)
    for name in ("copy-host-to-device", "copy-device-to-host"):
        rates[OP_CLASSES.index(name)] = cluster.host_bytes_per_s
    for name in ("copy-device-to-device", "collective"):
        rates[OP_CLASSES.index(name)] = cluster.intra.bytes_per_s
    return np.asarray(rates[op_class], dtype=np.float64)
