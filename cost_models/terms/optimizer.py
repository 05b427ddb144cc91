"""Seconds that a step spends once: the optimizer, states kept on the host, stragglers and a constant."""

from __future__ import annotations

import numpy as np

from cost_models.types import FloatArray


def optimizer_bytes_per_param(
    state_bytes: FloatArray, master_bytes: FloatArray, param_bytes: FloatArray, grad_bytes: FloatArray
) -> FloatArray:  # fmt: skip
    """Device traffic per updated parameter: states and master copy (or weights) read and written, weights written, gradients touched
    three times (norm, step, zero).
    """
    copy_bytes = np.where(master_bytes > 0, master_bytes, param_bytes)
    return np.asarray(2 * state_bytes + 2 * copy_bytes + param_bytes + 3 * grad_bytes, dtype=np.float64)


def optimizer_s(num_params: FloatArray, bytes_per_param: FloatArray, memory_bytes_per_s: FloatArray) -> FloatArray:
    """Update of `num_params` at the device's achieved memory rate."""
    return num_params * bytes_per_param / memory_bytes_per_s


def offload_s(
    num_params: FloatArray, *, copied_bytes: FloatArray, touched_bytes: FloatArray, host_bytes_per_s: FloatArray, cpu_bytes_per_s: FloatArray
) -> FloatArray:  # fmt: skip
    """States on the host: gradients go down, the CPU reads and writes states, weights come back; nothing of it overlaps.

    Source: ZeRO-Offload (Ren 2021), without delayed update. Ignored: NUMA, limits of pinned memory.

    Args:
        num_params: updated by one rank.
        copied_bytes: per parameter, over the link between host and device.
        touched_bytes: per parameter, read and written in host memory.
        host_bytes_per_s: copy rate of one device.
        cpu_bytes_per_s: rate of one device's share of the host.
    """
    return num_params * (copied_bytes / host_bytes_per_s + touched_bytes / cpu_bytes_per_s)


def streamed_s(
    num_params: FloatArray, num_micro_batches: FloatArray, *, param_bytes: FloatArray, grad_bytes: FloatArray, host_bytes_per_s: FloatArray
) -> FloatArray:  # fmt: skip
    """Sharded parameters that live on the host: each micro-batch brings them up for forward and for backward, and takes gradients down.

    Source: torch FSDP2's CPUOffloadPolicy. Ignored: copies that hide under compute (only the next unit's are prefetched), and that the
    last micro-batch's gradients are counted with the update.

    Args:
        num_params: of one rank's shard.
        num_micro_batches: forward passes a step.
        param_bytes: per parameter.
        grad_bytes: per parameter.
        host_bytes_per_s: copy rate of one device.
    """
    return num_params * (2 * num_micro_batches * param_bytes + (num_micro_batches - 1) * grad_bytes) / host_bytes_per_s


def host_accumulation_s(
    num_params: FloatArray, num_micro_batches: FloatArray, *, grad_bytes: FloatArray, host_bytes_per_s: FloatArray
) -> FloatArray:  # fmt: skip
    """Sharded gradients that accumulate on the host: each micro-batch but the first brings the sum up, adds, and takes it down again.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, async_accumulate_grad_in_cpu_via_gpu; the copies run between the kernels of the
    backward pass, not beside them. Ignored: the first micro-batch's way down.

    Args:
        num_params: of one rank's shard.
        num_micro_batches: a step.
        grad_bytes: per parameter.
        host_bytes_per_s: copy rate of one device.
    """
    return num_params * 2 * (num_micro_batches - 1) * grad_bytes / host_bytes_per_s


def straggler_share(num_nodes: FloatArray, per_doubling: FloatArray) -> FloatArray:
    """Share by which the slowest of many nodes delays the rest."""
    return per_doubling * np.log2(np.maximum(num_nodes, 1.0))


TERMS = (optimizer_s, offload_s, streamed_s, host_accumulation_s, straggler_share)
