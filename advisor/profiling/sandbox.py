"""Nothing that a script writes reaches the user's files: writes go to a folder of the child's own, deletions hide a file from the script only.

Held back: `open`, `io.open`, `os.open`, everything of `os`, `shutil` and `pathlib` that changes files, `sqlite3.connect`, `torch.save`,
`torch.jit.save` and `safetensors.torch`. Reading back what was written works, `torch.load` included. Not held back: other programs and
Python processes that the script starts (they are named in the profile's warnings) and libraries that write through C code of their own
(HDF5, Arrow). What opens files for writing from Python in another way, such as `io.FileIO`, is refused. `torch.multiprocessing.spawn` starts nothing: rank 0 runs in this process (see `single_process.py`).

Also here: loaders without workers and compilers that compile nothing.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import shutil
import sys
import sysconfig
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from advisor.profiling.overlay import Overlay

#: What `torch.save` writes instead of tensors that may have no values; `torch.load` finds the object by it.
_SAVED = b"advisor-saved:"
_MAX_SAVED = 64  # objects kept to be loaded back


def protect_files(private: Path) -> Overlay:
    """Keep writes of this process in the folder `private` and deletions and renames outside of it from happening; see the module's text."""
    inside = str(private.resolve()) + os.sep
    root = private.resolve() / "written"
    root.mkdir(exist_ok=True)
    overlay = Overlay(str(root), inside)
    plain: Any = builtins
    plain_io: Any = io
    plain_tar: Any = tarfile
    plain.open = plain_io.open = plain_tar.bltn_open = overlay.open
    plain_os: Any = os
    plain_os.open = overlay.os_open
    plain_os.remove = plain_os.unlink = overlay.unlink
    plain_os.rename = plain_os.replace = overlay.rename
    plain_os.link = plain_os.symlink = overlay.link
    for name in ("stat", "lstat", "access", "listdir", "scandir", "chdir", "mkdir", "rmdir", "truncate"):
        setattr(os, name, getattr(overlay, name))
    for name in ("chmod", "fchmod", "lchmod", "chown", "fchown", "lchown", "utime", "setxattr", "removexattr", "mkfifo", "mknod"):
        if hasattr(os, name):
            setattr(os, name, overlay.only_ours(getattr(os, name)))
    for name in ("listxattr", "getxattr", "readlink", "statvfs"):
        if hasattr(os, name):
            setattr(os, name, overlay.reads(getattr(os, name)))
    tree: Any = shutil
    tree.rmtree = overlay.rmtree
    with contextlib.suppress(ImportError):
        _redirect_databases(overlay)
    sys.addaudithook(lambda event, arguments: _refuse(overlay, arguments) if event == "open" else None)
    return overlay


def _refuse(overlay: Overlay, arguments: tuple[Any, ...]) -> None:
    """Python's own ways to open a file that went past the overlay (`io.FileIO`, an `open` kept from before) fail rather than write."""
    file, _, flags = arguments
    if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC) and isinstance(file, (str, bytes, os.PathLike)):
        path = overlay.place(file)
        if path is not None:
            raise PermissionError(errno.EACCES, "The advisor can't hold back what would be written here", path)


def _redirect_databases(overlay: Overlay) -> None:
    import sqlite3

    module: Any = sqlite3
    plain: Callable[..., Any] = sqlite3.connect

    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        named = os.fsdecode(os.fspath(database))
        if named.startswith("file:"):
            return plain(database if "mode=ro" in named or "immutable=1" in named else ":memory:", *args, **kwargs)
        path = None if named in {"", ":memory:"} else overlay.place(database)
        return plain(database if path is None else overlay.writing(path, keeps=True), *args, **kwargs)

    module.connect = module.dbapi2.connect = connect


def note_processes(started: list[str]) -> None:
    """Tell where the script (not a library on its behalf) starts another program or process.

    Args:
        started: gets "file.py:line", each once.
    """
    libraries = tuple({sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")})
    ours = str(Path(__file__).parent)
    after_fork: list[bool] = []

    def hook(event: str, _arguments: Any, skips: int = 0) -> None:
        if event not in _STARTS or after_fork:
            return
        frame: Any = sys._getframe(1 + skips)
        while frame is not None:
            name = frame.f_code.co_filename
            if "site-packages" in name or "dist-packages" in name or name.startswith(ours):
                return
            if not name.startswith((*libraries, "<")):
                where = f"{Path(name).name}:{frame.f_lineno}"
                if where not in started:
                    started.append(where)
                return
            frame = frame.f_back

    sys.addaudithook(hook)
    process: Any = __import__("multiprocessing.process", fromlist=["BaseProcess"]).BaseProcess
    plain_start: Callable[..., None] = process.start

    def start(self: Any) -> None:
        hook("os.spawn", (), skips=1)
        plain_start(self)

    process.start = start
    os.register_at_fork(after_in_child=lambda: after_fork.append(True))


_STARTS = frozenset({"subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.spawn", "pty.spawn"})


def never_raise_warnings() -> None:
    """A filter that turns warnings into errors is taken as one that ignores them: some warnings here are of our making."""
    module: Any = warnings
    for name in ("simplefilter", "filterwarnings"):
        setattr(module, name, _without_errors(getattr(warnings, name)))
    warnings.resetwarnings()
    warnings.simplefilter("ignore")


def _without_errors(plain: Callable[..., None]) -> Callable[..., None]:
    def chosen(action: Any, *args: Any, **kwargs: Any) -> None:
        plain("ignore" if action == "error" else action, *args, **kwargs)

    return chosen


def keep_saved(overlay: Overlay) -> None:
    """`torch.save` and its like write a short mark, by which loading gives the same object back."""
    import torch
    from torch.utils._pytree import tree_map

    kept: dict[bytes, Any] = {}
    any_torch: Any = torch

    def save(obj: Any, f: Any, *_: Any, **__: Any) -> None:
        mark = _SAVED + str(len(kept)).encode() + b"\n"
        while mark in kept:
            mark = _SAVED + str(int(mark[len(_SAVED) :]) + 1).encode() + b"\n"
        kept[mark] = obj
        if len(kept) > _MAX_SAVED:
            del kept[next(iter(kept))]
        if hasattr(f, "write"):
            f.write(mark)
            return
        with overlay.open(f, "wb") as out:
            out.write(mark)

    def loader(plain: Callable[..., Any]) -> Callable[..., Any]:
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            mark = _mark_of(overlay, f)
            if mark:
                return tree_map(lambda leaf: leaf, kept[mark])  # containers of its own
            return plain(f if hasattr(f, "read") else overlay.reading(f), *args, **kwargs)

        return load

    any_torch.save, any_torch.load = save, loader(torch.load)
    any_torch.jit.save = save
    any_torch.jit.load = loader(torch.jit.load)
    any_torch.jit.script, any_torch.jit.trace = _can_save(torch.jit.script, save), _can_save(torch.jit.trace, save)
    any_torch.jit.ScriptModule.save = any_torch.jit.RecursiveScriptModule.save = lambda self, f, **__: save(self, f)
    with contextlib.suppress(ImportError):
        safe: Any = __import__("safetensors.torch", fromlist=["save_file"])
        safe.save_file, safe.load_file = save, loader(safe.load_file)
        safe.save_model = lambda model, f, *_, **__: save(model.state_dict(), f)


def _can_save(plain: Callable[..., Any], save: Callable[..., None]) -> Callable[..., Any]:
    """`torch.jit.script` and its like give modules that can save themselves, also where they compile nothing."""

    def made(thing: Any, *args: Any, **kwargs: Any) -> Any:
        module = plain(thing, *args, **kwargs)
        if not hasattr(module, "save") and hasattr(module, "state_dict"):
            module.save = lambda f, **_: save(module, f)
        return module

    return made


def _mark_of(overlay: Overlay, f: Any) -> bytes:
    """The mark of a saved object at the start of a file; b"" if there is none."""
    if hasattr(f, "read"):
        if not hasattr(f, "seek"):
            return b""
        at = f.tell()
        head = f.read(len(_SAVED) + 24)
        f.seek(at)
    else:
        with overlay.open(f, "rb") as file:
            head = file.read(len(_SAVED) + 24)
    return head.partition(b"\n")[0] + b"\n" if isinstance(head, bytes) and head.startswith(_SAVED) else b""


def quiet_torch(asked_workers: list[int], *, keeps_workers: bool = False) -> None:
    """Loaders load in this process and nothing is compiled.

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
    any_torch.compile = lambda model=None, **_: (lambda fn: fn) if model is None else model
    any_torch.nn.Module.compile = lambda *_, **__: None
