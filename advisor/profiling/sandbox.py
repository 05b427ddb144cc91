"""Nothing that a script writes reaches the user's files: writes go to a folder of the child's own, deletions go nowhere.

Also here: loaders without workers, checkpoint writers that write nothing, and compilers that compile nothing.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WRITES = frozenset("wax+")


class Overlay:
    """Files written by the script live here instead; reading a file that was written reads it back."""

    def __init__(self, folder: Path, private: str) -> None:
        self.folder, self.private = folder, private
        self.written: dict[str, Path] = {}
        self._open = builtins.open

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """`open` that writes elsewhere."""
        path = self._path(file)
        if path is None:
            return self._open(file, mode, *args, **kwargs)
        if _WRITES & set(mode):
            return self._open(self._target(path, mode), mode, *args, **kwargs)
        return self._open(self.written.get(path, file), mode, *args, **kwargs)

    def _path(self, file: Any) -> str | None:
        if isinstance(file, int):
            return None
        path = os.path.abspath(os.fsdecode(os.fspath(file)))  # noqa: PTH100
        return None if path.startswith(("/dev/", "/proc/", self.private)) else path

    def _target(self, path: str, mode: str) -> Path:
        target = self.written.get(path)
        if target is None:
            target = self.written[path] = self.folder / f"{len(self.written)}-{Path(path).name}"
            if ("a" in mode or "+" in mode) and "w" not in mode and Path(path).is_file():
                shutil.copyfile(path, target)
        return target


def protect_files(private: Path) -> None:
    """Redirect writes of this process into the folder `private`, and make deletions and renames outside of it do nothing.

    Limits: libraries that write through their own C code are not seen.
    """
    inside = str(private.resolve()) + os.sep
    (private / "written").mkdir(exist_ok=True)
    overlay: Any = Overlay(private / "written", inside)
    plain: Any = builtins
    plain.open = overlay.open
    plain_io: Any = io
    plain_io.open = overlay.open
    for module, names in (
        (
            os,
            (
                "remove",
                "unlink",
                "rmdir",
                "removedirs",
                "rename",
                "renames",
                "replace",
                "mkdir",
                "makedirs",
                "truncate",
                "link",
                "symlink",
                "chmod",
            ),
        ),
        (shutil, ("rmtree", "move", "copy", "copy2", "copyfile", "copytree")),
    ):
        for name in names:
            setattr(module, name, _only_inside(inside, getattr(module, name)))


def _only_inside(private: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        paths = [a for a in (*args, *kwargs.values()) if isinstance(a, (str, os.PathLike))]
        target = paths[-1] if paths else ""
        if paths and os.path.abspath(os.fsdecode(os.fspath(target))).startswith(private):  # noqa: PTH100
            return plain(*args, **kwargs)
        return None

    return guarded


def quiet_torch(asked_workers: list[int], *, keeps_workers: bool = False) -> None:
    """Loaders load in this process, checkpoints aren't written, nothing is compiled.

    Args:
        asked_workers: gets `num_workers` of every loader.
        keeps_workers: leave the loaders as they are.
    """
    import torch
    from torch.utils.data import DataLoader

    loader: Any = DataLoader
    plain_init: Callable[..., None] = DataLoader.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        positional = list(args)
        asked_workers.append(int(positional[5] if len(positional) > 5 else kwargs.get("num_workers", 0)))
        del positional[5:]
        names = ("collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
        kwargs.update(zip(names, args[6:], strict=False))
        kwargs["num_workers"] = 0
        for name in ("pin_memory", "persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout", "pin_memory_device"):
            kwargs.pop(name, None)
        plain_init(self, *positional, **kwargs)

    if not keeps_workers:
        loader.__init__ = init
    any_torch: Any = torch
    any_torch.save = lambda *_, **__: None
    any_torch.compile = lambda model=None, **_: (lambda fn: fn) if model is None else model
    any_torch.nn.Module.compile = lambda *_, **__: None
    for name, writer in (("safetensors.torch", "save_file"), ("safetensors.torch", "save_model")):
        try:
            setattr(__import__(name, fromlist=[writer]), writer, lambda *_, **__: None)
        except ImportError:
            continue
