"""Every process that a child started, also those in sessions of their own: found in /proc, ended without mercy."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

#: Variable that a child and what it starts carry in their environment.
MARK = "ADVISOR_CAPTURE"
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they can be found (Linux; nothing happens elsewhere)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> set[int]:
    """Processes started by `pid`, by those, and so on."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((folder / "stat").read_text(encoding="utf8", errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found: set[int] = set()
    left = [pid]
    while left:
        fresh = [c for c in children.get(left.pop(), ()) if c not in found]
        found.update(fresh)
        left += fresh
    return found


def marked(mark: str) -> set[int]:
    """Processes in whose environment `mark` was when they started."""
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid() and mark.encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
    return found


def end(pids: set[int]) -> None:
    """Kill these processes."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
