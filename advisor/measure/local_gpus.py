"""Which GPUs this machine has and how they are joined, from the driver's own library (NVML); starts no CUDA context."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

from cost_models import catalogue
from cost_models.types import Link

#: Line rate of one NVLink, one direction, by version (NVIDIA data sheets).
_NVLINK_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
_MOST_NVLINKS = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGpus:
    """The GPUs of this machine that a run would see."""

    device_name: str  # as the driver reports it
    count: int
    memory_bytes: float  # of one GPU
    intra: Link | None  # None: the driver doesn't say
    other_names: tuple[str, ...] = ()  # further, different GPUs, left out


def local_gpus() -> LocalGpus | None:
    """The GPUs that the NVIDIA driver reports and CUDA_VISIBLE_DEVICES leaves, or None where there are none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, no permission: all mean "no GPU that we can see"
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        handles = _visible(handles, pynvml)
        if not handles:
            return None
        names = [_text(pynvml.nvmlDeviceGetName(h)) for h in handles]
        name, count = Counter(names).most_common(1)[0]
        first = handles[names.index(name)]
        return LocalGpus(
            device_name=name, count=count, memory_bytes=float(pynvml.nvmlDeviceGetMemoryInfo(first).total),
            intra=_nvlink(first, name, pynvml) or _pcie(first, pynvml), other_names=tuple(dict.fromkeys(n for n in names if n != name)),
        )  # fmt: skip
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _visible(handles: list[Any], nvml: Any) -> list[Any]:
    """Those that CUDA_VISIBLE_DEVICES names, by index or UUID; like CUDA, stop at the first that doesn't exist."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return handles
    uuids = [_text(nvml.nvmlDeviceGetUUID(h)) for h in handles]
    chosen = []
    for item in (part.strip() for part in wanted.split(",")):
        index = int(item) if item.isdecimal() else next((i for i, u in enumerate(uuids) if item and u.startswith(item)), -1)
        if not 0 <= index < len(handles):
            break
        chosen.append(handles[index])
    return chosen


def _nvlink(handle: Any, device_name: str, nvml: Any) -> Link | None:
    """All active NVLinks of a GPU together, or None without any."""
    active, version = 0, 0
    for i in range(_MOST_NVLINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, i):
                active += 1
                version = int(nvml.nvmlDeviceGetNvLinkVersion(handle, i))
        except nvml.NVMLError:
            break
    if not active:
        return None
    rate = active * _NVLINK_BYTES_PER_S.get(min(version, 5), 25e9)
    try:
        usual = catalogue.parse_link("NVLink", where="intra", gpu=device_name)
    except ValueError:
        usual = catalogue.find_link("nvlink-4")
    if abs(usual.bytes_per_s - rate) < 0.01 * rate:
        return usual
    return Link(name=f"nvlink-{active}-links", bytes_per_s=rate, latency_s=usual.latency_s, kind="nvlink")


def _pcie(handle: Any, nvml: Any) -> Link | None:
    """The slot of a GPU; the generation is the highest that card and board share (an idle card reports a lower one)."""
    try:
        generation = int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
        width = int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    except nvml.NVMLError:
        return None
    full = catalogue.find_link(f"pcie-{min(max(generation, 3), 5)}-x16")
    if width >= 16 or width < 1:
        return full
    return Link(
        name=full.name.replace("x16", f"x{width}"), bytes_per_s=full.bytes_per_s * width / 16, latency_s=full.latency_s, kind="pcie"
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
