"""Seconds that a step spends once: the optimizer, states kept on the host, stragglers and a constant."""

from __future__ import annotations

import numpy as np

from cost_models.types import FloatArray


def optimizer_bytes_per_param(
    state_bytes: FloatArray, master_bytes: FloatArray, param_bytes: FloatArray, grad_bytes: FloatArray
) -> FloatArray:
    """Device traffic per parameter that a rank updates: states and master copy read and written, weights written, gradients read twice (norm, step) and zeroed."""
    return 2 * state_bytes + 2 * np.where(master_bytes > 0, master_bytes, param_bytes) + param_bytes + 3 * grad_bytes  # type: ignore[no-any-return]


def optimizer_s(num_params: FloatArray, bytes_per_param: FloatArray, memory_bytes_per_s: FloatArray) -> FloatArray:
    """Update of `num_params` at the device's achieved memory rate."""
    return num_params * bytes_per_param / memory_bytes_per_s


def offload_s(
    num_params: FloatArray, grad_bytes: FloatArray, param_bytes: FloatArray, state_bytes: FloatArray, host_bytes_per_s: FloatArray,
    cpu_bytes_per_s: FloatArray,
) -> FloatArray:  # fmt: skip
    """States on the host: gradients go down, the CPU reads and writes states, weights come back; nothing of it overlaps.

    Source: DeepSpeed ZeRO-Offload (Ren 2021), without delayed update. Ignored: NUMA, pinned-memory limits.
    """
    copies = num_params * (grad_bytes + param_bytes) / host_bytes_per_s
    return copies + num_params * (2 * state_bytes + grad_bytes + param_bytes) / cpu_bytes_per_s


def straggler_share(num_nodes: FloatArray, per_doubling: FloatArray) -> FloatArray:
    """Share by which the slowest of many nodes delays the rest."""
    return per_doubling * np.log2(np.maximum(num_nodes, 1.0))  # type: ignore[no-any-return]


TERMS = (optimizer_s, offload_s, straggler_share)
