"""Measured seconds beside traced shapes: matched call by call, what doesn't match shared out so that the total is kept."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from advisor.profiling.events import MeasuredCall
from advisor.profiling.schema import StepProfile

#: Where a call outside modules and backward may belong, most likely first.
_OUTSIDE = ("data", "forward", "optimizer")


def merge(profile: StepProfile, calls: Sequence[MeasuredCall], *, device: str, step_time_s: float, idle_s: float | None,
          peak_memory_bytes: int | None, counts_kernels: bool) -> StepProfile:  # fmt: skip
    """The traced profile with seconds in it.

    Calls are matched by module, phase, operator and order; with accumulation a row gets the mean over the micro-batches. Seconds
    that match no row go to the unmatched rows of the same module and phase by their bytes, else to all rows of that module, of
    that phase, or of the step, in proportion.
    """
    table = profile.operators.copy()
    rows: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for i, key in enumerate(zip(table["module"], table["phase"], table["operator"], strict=True)):
        rows[key].append(i)
    share = np.where(table["phase"] == "optimizer", 1.0, 1.0 / max(profile.meta.accumulation, 1))
    seconds, kernels = np.zeros(len(table)), np.zeros(len(table))
    matched = np.zeros(len(table), dtype=bool)
    left: dict[tuple[str, str], float] = defaultdict(float)
    measured: dict[tuple[str, str, str], list[MeasuredCall]] = defaultdict(list)
    for call in calls:
        key = _key(call, rows)
        if call.operator and key in rows:
            measured[key].append(call)
        else:
            left[key[0], key[1]] += call.seconds
    for key, found in measured.items():
        places = rows[key]
        for i, call in enumerate(found):
            place = places[i % len(places)]
            seconds[place] += call.seconds * share[place]
            kernels[place] += call.num_kernels * share[place]
            matched[place] = True
    _share_out(table, seconds, matched, left, share, on_device=counts_kernels)
    table["measured_s"] = seconds
    if counts_kernels:
        table["num_kernels"] = np.where(matched, np.rint(kernels), table["num_kernels"]).astype(int)
    meta = dataclasses.replace(profile.meta, source="measured", device=device, step_time_s=step_time_s, idle_s=idle_s,
                               peak_memory_bytes=peak_memory_bytes)  # fmt: skip
    return dataclasses.replace(profile, meta=meta, operators=table)


def _key(call: MeasuredCall, rows: dict[tuple[str, str, str], list[int]]) -> tuple[str, str, str]:
    if call.phase:
        return call.module, call.phase, call.operator
    return next(
        ((call.module, p, call.operator) for p in _OUTSIDE if (call.module, p, call.operator) in rows), (call.module, "", call.operator)
    )


def _share_out(table: Any, seconds: Any, matched: Any, left: dict[tuple[str, str], float], share: Any, *, on_device: bool) -> None:
    weight = (table["read_bytes"] + table["written_bytes"]).to_numpy(float) + 1.0
    modules, phases = table["module"].to_numpy(), table["phase"].to_numpy()
    possible = np.full(len(table), fill_value=True) if on_device else (table["copy_from"] == "").to_numpy()  # a CPU copies to no device
    for (module, phase), total in left.items():
        in_phase = phases == phase if phase else np.ones(len(table), dtype=bool)
        here = in_phase & (modules == module)
        for chosen in (here & ~matched & possible, here & possible, in_phase & possible, np.ones(len(table), dtype=bool)):
            if chosen.any():
                part = weight * chosen
                seconds += total * share * part / part.sum()
                break
