"""Calibration: constants that physics doesn't give, fitted on measured runs, with the data they came from and their error.

A constant of a run is generic value x runtime's factor x GPU family's factor; an unknown runtime or family has factor 1.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from cost_models.types import FloatArray

#: Every constant and what it means.
CONSTANTS: Mapping[str, str] = {
    "gemm_rate_share": "large matrix product, of the peak rate",
    "gemm_half_m": "rows at which a product's rate halves",
    "gemm_half_n": "columns, likewise",
    "gemm_half_k": "inner size, likewise",
    "wave_exponent": "weight of partly filled waves of tiles",
    "low_precision_rate_share": "fp8 and fp4 products, times gemm_rate_share",
    "scalar_rate_share": "fp32 products and convolutions without matrix units, of the peak",
    "convolution_rate_share": "16-bit convolutions on matrix units with the layout changes around them, of the peak",
    "tf32_convolution_gain": "the same share in TF32, times that of 16 bits",
    "map_traffic": "bytes of memory-bound operators between convolutions, against a count of their operands",
    "grouped_traffic": "the same of convolutions with few channels a group",
    "attention_rate_share": "fused attention of long sequences by kernels written for the GPU family, of the peak",
    "attention_half_rows": "keys at which its rate halves",
    "batched_rate_share": "attention's products where it is not fused, of the peak",
    "expert_imbalance": "slowest expert rank against the mean, and what an expert's product of its own loses against one large product",
    "memory_rate_share": "device memory, of the data sheet's rate",
    "memory_traffic": "bytes of memory-bound operators, against a count of their operands",
    "host_s_per_kernel": "launch and Python, per kernel",
    "backward_launch_share": "the same in the backward pass, of that: hooks and accumulation come with its kernels",
    "host_s_per_collective": "more of it per tensor-parallel all-reduce",
    "host_s_per_micro_batch": "more of it per micro-batch",
    "step_s": "once per step",
    "optimizer_traffic": "bytes of the optimizer step, against a count",
    "intra_rate_share": "ring inside a node, of the one-way link rate",
    "pcie_rate_share": "the same over PCIe",
    "inter_rate_share": "ring between nodes, of the node's network adapters",
    "tcp_bytes_per_s": "what a node's processors copy through TCP, over Ethernet without RDMA",
    "reduction_rate_share": "gradient reductions, of these rates: small buckets, copied in and out, and the node's other groups reduce at the same time",
    "inter_decay": "achieved rate between nodes falls as nodes^-decay",
    "inter_decay_whole_node": "the same for groups that fill most of a node",
    "all_reduce_discount": "all-reduce against two ring passes",
    "intra_latency_s": "of a collective between two devices of a node; grows with the logarithm of the group",
    "inter_latency_s_per_node": "of a collective between nodes, per node",
    "inter_latency_growth": "that latency grows as nodes^growth",
    "dp_hidden_share": "of the last backward pass that hides the gradient reduction",
    "fsdp_hidden_share": "of compute that hides gathers and scatters",
    "overlap_contention": "hidden traffic that comes back as slower compute",
    "p2p_rate_share": "transfers between pipeline stages, of the link rate",
    "p2p_latency_s": "of such a transfer",
    "all_to_all_rate_share": "expert all-to-all, of the link rate",
    "straggler_share": "slowdown per doubling of the nodes",
    "cpu_optimizer_bytes_per_s": "optimizer states read and written by one GPU's share of the host",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Fitted constants; `constants` documents each by its name (units as everywhere: `_s`, `_share`, `_bytes`)."""

    name: str
    constants: Mapping[str, float]  # generic values
    by_runtime: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # runtime -> constant -> factor
    by_family: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # GPU family or catalogue name -> constant -> factor
    memory: Mapping[str, Any] = field(default_factory=dict)  # constants of the memory model
    interval: Mapping[str, float] = field(default_factory=dict)  # known_runtime_factor, unknown_runtime_factor: x or / this holds 80%
    data: Mapping[str, Any] = field(default_factory=dict)  # what it was fitted on
    error: Mapping[str, Any] = field(default_factory=dict)  # held-out error

    def value(self, constant: str, runtime: str = "", family: str = "", device: str = "") -> float:
        """One constant for a runtime on a GPU; `device` is its catalogue name, for cards that differ from their family."""
        own = self.by_runtime.get(runtime, {}).get(constant, 1.0) * self.by_family.get(family, {}).get(constant, 1.0)
        return self.constants[constant] * own * (self.by_family.get(device, {}).get(constant, 1.0) if device != family else 1.0)

    def table(self, pairs: Sequence[tuple[str, str, str]]) -> dict[str, FloatArray]:
        """Every constant for each (runtime, family, device), as arrays of len(pairs)."""
        return {name: np.array([self.value(name, *pair) for pair in pairs]) for name in self.constants}


def load_calibration(path: str | Path | None = None) -> Calibration:
    """Read a calibration file; without a path the one shipped with the package.

    Args:
        path: TOML file as `advise calibrate` writes it. Constants it doesn't name keep the shipped values.

    Raises:
        ValueError: the file is no calibration, or names a constant that doesn't exist.
    """
    shipped = _shipped()
    if path is None:
        return shipped
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} is not a calibration file: {error}") from error
    own = _from_toml(data, str(path))
    unknown = sorted(set(own.constants) - set(shipped.constants))
    if unknown:
        raise ValueError(f"{path} names constants that the cost model does not have: {', '.join(unknown)}")
    return Calibration(
        name=own.name, constants={**shipped.constants, **own.constants}, by_runtime={**shipped.by_runtime, **own.by_runtime},
        by_family={**shipped.by_family, **own.by_family}, memory={**shipped.memory, **own.memory},
        interval={**shipped.interval, **own.interval}, data=own.data or shipped.data, error=own.error or shipped.error,
    )  # fmt: skip


def calibration_toml(calibration: Calibration) -> str:
    """The text of a calibration file."""
    lines = [f"name = {_toml(calibration.name)}", ""]
    for section in ("data", "error", "interval"):
        lines += _section(section, getattr(calibration, section))
    lines += ["[constants]", *(f"{k} = {_toml(v)}  # {CONSTANTS.get(k, '')}" for k, v in calibration.constants.items()), ""]
    for section in ("by_runtime", "by_family"):
        for key, values in sorted(getattr(calibration, section).items()):
            lines += _section(f'{section}."{key}"', values)
    lines += _section("memory", calibration.memory)
    return "\n".join(lines).rstrip() + "\n"


@functools.cache
def _shipped() -> Calibration:
    text = (resources.files("cost_models") / "calibration" / "default.toml").read_text(encoding="utf8")
    return _from_toml(tomllib.loads(text), "default.toml")


def _from_toml(data: Mapping[str, Any], where: str) -> Calibration:
    constants = data.get("constants", {})
    factors = [v for group in ("by_runtime", "by_family") for values in data.get(group, {}).values() for v in values.values()]
    for value in [*constants.values(), *factors]:
        if not isinstance(value, int | float) or not np.isfinite(value) or value < 0:
            raise ValueError(f"{where}: {value!r} is not a constant (a finite number, 0 or more)")
    return Calibration(
        name=str(data.get("name", where)), constants=constants, by_runtime=data.get("by_runtime", {}), by_family=data.get("by_family", {}),
        memory=data.get("memory", {}), interval=data.get("interval", {}), data=data.get("data", {}), error=data.get("error", {}),
    )  # fmt: skip


def _section(title: str, values: Mapping[str, Any]) -> list[str]:
    if not values:
        return []
    return [f"[{title}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, float | np.floating):
        return f"{float(value):.6g}" if float(value) % 1 or abs(float(value)) >= 1e6 else f"{float(value):.1f}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
