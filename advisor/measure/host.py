"""The memory of this machine's host."""

from __future__ import annotations

import os
from pathlib import Path

#: Where a container's limit stands, by version of control groups.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory_bytes() -> float:
    """Bytes of host memory that processes here can have: what is installed, or a container's limit where it is lower."""
    installed = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min([installed, *(limit for path in _LIMITS if (limit := _limit(Path(path))))])


def _limit(path: Path) -> float:
    """The limit in a control group's file, bytes; 0 where there is none."""
    try:
        text = path.read_text(encoding="utf8").strip()
    except OSError:
        return 0.0
    return float(text) if text.isdecimal() else 0.0
