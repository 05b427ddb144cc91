"""The functions of `os` and `shutil` that read and change files, as they were before `sandbox.py` put others in their place."""

from __future__ import annotations

import builtins
import os
import shutil
from typing import Any

#: A larger file that is opened for appending or updating is not copied: the script sees one of the same size, full of zeros.
MAX_COPIED_BYTES = 256 << 20

open, os_open, stat, lstat, listdir, scandir = builtins.open, os.open, os.stat, os.lstat, os.listdir, os.scandir
mkdir, makedirs, rename, unlink, rmdir, truncate = os.mkdir, os.makedirs, os.rename, os.unlink, os.rmdir, os.truncate
chdir, access, readlink, rmtree = os.chdir, os.access, os.readlink, shutil.rmtree


def exists(path: Any) -> bool:
    """Whether there is something of this name, a broken link included."""
    try:
        lstat(path)
    except (OSError, ValueError):
        return False
    return True


def is_file(path: Any) -> bool:
    """Whether this is a regular file, or a link to one."""
    try:
        return stat(path).st_mode & 0o170000 == 0o100000
    except (OSError, ValueError):
        return False


def copy(source: Any, target: Any) -> None:
    """Copy a file, or make one of the same size if it is large."""
    size = stat(source).st_size
    if size > MAX_COPIED_BYTES:
        with open(target, "wb"):
            pass
        truncate(target, size)
        return
    with open(source, "rb") as old, open(target, "wb") as new:
        shutil.copyfileobj(old, new)
