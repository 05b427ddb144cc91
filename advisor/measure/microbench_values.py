"""What the microbenchmarks found: a frozen value, kept as TOML, and what it says about a Device and its links."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from advisor.errors import AdvisorError
from cost_models import Calibration, load_calibration, op_seconds
from cost_models.types import BATCH_DIMS, OP_CLASSES, PHASES, PRICING_KINDS, TP_SPLITS, Cluster, Device, OpTable


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRate:
    """One product (m x k) (k x n)."""

    dtype: str  # fp32, tf32, fp16, bf16, fp8
    m: int
    n: int
    k: int
    seconds: float  # fastest of the repetitions
    achieved_flops_per_s: float  # 2 m n k / seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRate:
    """One collective at one size, as nccl-tests defines its figures."""

    operation: str  # all_reduce, all_gather, reduce_scatter
    backend: str
    num_ranks: int
    message_bytes: int  # of the whole (gathered) tensor
    seconds: float  # median over repetitions of the slowest rank
    bus_bytes_per_s: float  # message / seconds x 2(n-1)/n for all-reduce, x (n-1)/n for the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Figures of one device of this machine; 0 where something could not be measured (`warnings` says why)."""

    device_name: str  # as the driver names it: "NVIDIA H200"; a processor's model name on a CPU
    device_kind: str  # "cuda" or "cpu"
    framework: str  # "torch 2.13.0"
    memory_bytes: float  # of the device; of the host on a CPU
    num_multiprocessors: int  # threads on a CPU
    matmul: tuple[MatmulRate, ...] = ()
    memory_copy_bytes_per_s: float = 0.0  # read + written by a copy of large arrays
    memory_add_bytes_per_s: float = 0.0  # read + written by c = a + b
    host_to_device_pinned_bytes_per_s: float = 0.0  # one direction; a memcpy on a CPU
    host_to_device_pageable_bytes_per_s: float = 0.0
    device_to_host_pinned_bytes_per_s: float = 0.0
    device_to_host_pageable_bytes_per_s: float = 0.0
    launch_s: float = 0.0  # per tiny operator, launched one after the other without waiting
    kernel_s: float = 0.0  # device seconds of a tiny kernel, launched from a CUDA graph; on a CPU as launch_s
    collectives: tuple[CollectiveRate, ...] = ()
    warnings: tuple[str, ...] = ()
    duration_s: float = 0.0

    def best_matmul(self, dtype: str) -> MatmulRate | None:
        """The fastest product of a dtype."""
        of_dtype = [rate for rate in self.matmul if rate.dtype == dtype]
        return max(of_dtype, key=lambda rate: rate.achieved_flops_per_s) if of_dtype else None

    def to_toml(self) -> str:
        """Text that `from_toml` reads back to an equal value."""
        scalars, tables = [], []
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name in ("matmul", "collectives"):
                tables += [f"[[{f.name}]]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in dataclasses.asdict(row).items()) for row in value]
            else:
                scalars.append(f"{f.name} = {_toml(value)}\n")
        return "\n".join(["".join(scalars), *tables])

    @classmethod
    def from_toml(cls, text: str, *, where: str = "measurements") -> Measurements:
        """Read what `to_toml` wrote.

        Raises:
            AdvisorError: the text is no such file.
        """
        try:
            return cls.from_mapping(tomllib.loads(text))
        except (tomllib.TOMLDecodeError, TypeError, ValueError, AttributeError) as error:
            raise AdvisorError(f"{where} holds no measurements ({error}).", hint="Measure again with `advise measure -o FILE`.") from error

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Measurements:
        """From plain values, as TOML or JSON give them."""
        values = dict(data)
        values["matmul"] = tuple(MatmulRate(**row) for row in values.get("matmul", ()))
        values["collectives"] = tuple(CollectiveRate(**row) for row in values.get("collectives", ()))
        values["warnings"] = tuple(values.get("warnings", ()))
        return cls(**values)


def cluster_figures(measurements: Measurements, calibration: Calibration | None = None, *, family: str = "") -> dict[str, Any]:
    """Overrides for a Cluster, each with source "measured".

    The cost model multiplies a device's rates with fitted shares (a product reaches about 77% of the peak, copies 81% of the
    memory rate). A measured rate is divided by the share at the measured size, so that the model gives the measured seconds back.

    Args:
        measurements: of one device of the cluster.
        calibration: the constants the figures will be used with; the shipped ones by default.
        family: the device's family, for its constants; "cpu" on a CPU.

    Returns:
        `peak_flops_per_s` (by dtype), `memory_bytes_per_s`, `host_bytes_per_s`, `memory_bytes` (only those measured), and
        `sources`, from figure to "measured".
    """
    calibration = calibration or load_calibration()
    family = "cpu" if measurements.device_kind == "cpu" else family
    figures: dict[str, Any] = {"peak_flops_per_s": _peaks(measurements, calibration, family)}
    moved = max(measurements.memory_copy_bytes_per_s, measurements.memory_add_bytes_per_s)
    figures["memory_bytes_per_s"] = moved / calibration.value("memory_rate_share", family=family)
    figures["host_bytes_per_s"] = measurements.host_to_device_pinned_bytes_per_s or measurements.host_to_device_pageable_bytes_per_s
    figures["memory_bytes"] = measurements.memory_bytes
    figures = {name: value for name, value in figures.items() if value}
    return {**figures, "sources": dict.fromkeys(figures, "measured")}


def cpu_device(measurements: Measurements, calibration: Calibration | None = None) -> Device:
    """The host's processor as a Device, from its measured rates, so that runs on the CPU can be predicted.

    Raises:
        AdvisorError: the measurements are not of a CPU, or hold no rates.
    """
    figures = cluster_figures(measurements, calibration)
    if measurements.device_kind != "cpu" or not {"peak_flops_per_s", "memory_bytes_per_s"} <= set(figures):
        raise AdvisorError("These measurements hold no matrix and memory rates of a CPU.", hint="Measure again with `advise measure`.")
    return Device(
        name="cpu", family="cpu", memory_bytes=measurements.memory_bytes, memory_bytes_per_s=figures["memory_bytes_per_s"],
        peak_flops_per_s=figures["peak_flops_per_s"], num_multiprocessors=max(measurements.num_multiprocessors, 1),
    )  # fmt: skip


def measured_cluster(cluster: Cluster, measurements: Measurements, calibration: Calibration | None = None) -> Cluster:
    """A cluster with its device's figures replaced by measured ones; links keep theirs. Peaks of dtypes not measured stay."""
    figures = cluster_figures(measurements, calibration, family=cluster.device.family)
    device = dataclasses.replace(
        cluster.device, memory_bytes_per_s=figures.get("memory_bytes_per_s", cluster.device.memory_bytes_per_s),
        peak_flops_per_s={**cluster.device.peak_flops_per_s, **figures.get("peak_flops_per_s", {})},
    )  # fmt: skip
    sources = {name: "measured" for name in figures["sources"] if name != "memory_bytes"}
    return dataclasses.replace(cluster, device=device, host_bytes_per_s=figures.get("host_bytes_per_s", cluster.host_bytes_per_s),
                               sources={**cluster.sources, **sources})  # fmt: skip


def _peaks(measurements: Measurements, calibration: Calibration, family: str) -> dict[str, float]:
    """Peak per dtype at which the cost model gives the measured seconds of the large products, in the geometric mean.

    Large: at least an eighth of the largest product's work; small ones say more about overhead than about the peak.
    """
    peaks = {}
    for dtype in dict.fromkeys(rate.dtype for rate in measurements.matmul):
        rates = [rate for rate in measurements.matmul if rate.dtype == dtype]
        largest = max(rate.m * rate.n * rate.k for rate in rates)
        unit = Device(name="", family=family, memory_bytes=0.0, memory_bytes_per_s=1e30, peak_flops_per_s={dtype: 1e12},
                      num_multiprocessors=max(measurements.num_multiprocessors, 1))  # fmt: skip
        logs = [
            math.log(float(op_seconds(_product(rate), unit, micro_batch=1, compute_dtype=dtype, calibration=calibration)[0]) / rate.seconds)
            for rate in rates if 8 * rate.m * rate.n * rate.k >= largest
        ]  # fmt: skip
        peaks[dtype] = 1e12 * math.exp(sum(logs) / len(logs))
    return peaks


def _product(rate: MatmulRate) -> OpTable:
    one, zero = np.ones(1), np.zeros(1)
    code = {name: np.array([known.index(value)], dtype=np.int64) for name, known, value in (
        ("op_class", OP_CLASSES, "matmul"), ("kind", PRICING_KINDS, "gemm"), ("phase", PHASES, "forward"), ("batch_dim", BATCH_DIMS, "none"),
        ("tp_split", TP_SPLITS, "none"))}  # fmt: skip
    return OpTable(**code, m=one * rate.m, n=one * rate.n, k=one * rate.k, batch=one, work_share=one, bytes_per_sample=zero, bytes_fixed=zero,
                   num_kernels=one)  # fmt: skip


def _toml(value: object) -> str:
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else " " for c in escaped) + '"'
