"""What this machine has, asked without importing torch."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The first GPU."""

    name: str
    free_bytes: float


def first_device() -> DeviceMemory | None:
    """The first NVIDIA GPU that processes may use, None where there is none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return None
    with contextlib.suppress(Exception):  # NVML raises its own kinds for "no driver", "no device", "no permission"
        import pynvml

        pynvml.nvmlInit()
        try:
            if pynvml.nvmlDeviceGetCount() == 0:
                return None
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            name = pynvml.nvmlDeviceGetName(handle)
            return DeviceMemory(
                name=name if isinstance(name, str) else name.decode(), free_bytes=float(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
            )
        finally:
            pynvml.nvmlShutdown()
    return None


def free_memory_bytes() -> float:
    """Bytes of host memory that can be had now; a modest 8 GB where the system doesn't say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="utf8").splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return 8e9


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
