"""Precisions that a device has no units for: what it can't run at all, and what it emulates at the price of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from advisor.errors import AdvisorError
from advisor.search import Request, SearchResult, resized, search
from advisor.search.reasons import seconds
from cost_models.types import Device, Workload

#: PyTorch multiplies these on every CUDA device: without units for them as fp32, converted on the way, which is how they are priced.
_EMULATED = ("bf16", "fp16")


def check_precision(device: Device, precision: str | None) -> None:
    """Refuse what the device neither has nor emulates.

    Raises:
        AdvisorError: with what it has.
    """
    have = device.peak_flops_per_s
    if precision is None or precision in have or (precision in _EMULATED and "fp32" in have):
        return
    raise AdvisorError(f"{device.name} has no {precision} arithmetic; it has {', '.join(have)}.", hint="Choose one with --precision.")


def warning(request: Request, result: SearchResult, reshaped: Callable[[str], Workload]) -> tuple[str, ...]:
    """A sentence on an emulated precision, with the step time in the half precision that the device does have; nothing for other ones.

    Args:
        request: what was searched.
        result: what was found.
        reshaped: the workload in another precision.
    """
    device, precision = request.cluster.device, request.workload.compute_dtype
    if precision in device.peak_flops_per_s:
        return ()
    said = f"{device.name} has no {precision} units: PyTorch emulates {precision} at about the rate of fp32, which is what is priced."
    if not result.candidates or "fp16" not in device.peak_flops_per_s:
        return (said,)
    best = result.candidates[0]
    cluster = resized(request.cluster, best.plan.world_size)
    other = search(dataclasses.replace(request, workload=reshaped("fp16"), cluster=cluster), num_candidates=1).candidates
    here = seconds(best.estimate["step_time_s"])
    gain = f" its best plan would take {seconds(other[0].estimate['step_time_s'])} a step in place of {here}" if other else ""
    return (f"{said} Use fp16 with loss scaling:{gain} (--precision fp16).",)
