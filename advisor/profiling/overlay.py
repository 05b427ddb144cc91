"""A second set of files over the user's own: what a script writes is kept here, and reading it back finds it.

A path that was written lies in a tree of its own under `root`; a path that was removed is remembered. Nothing outside of `root` changes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

from advisor.profiling import plain_files as plain

_WRITES = frozenset("wax+")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Entry:
    """What `os.scandir` yields of a merged folder."""

    def __init__(self, overlay: Overlay, folder: str, name: str) -> None:
        self.name, self.path, self._overlay = name, os.path.join(folder, name), overlay  # noqa: PTH118

    def __fspath__(self) -> str:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._overlay.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())  # noqa: PTH112

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())  # noqa: PTH113

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)  # noqa: PTH114


class Entries:
    """The iterator and context manager that `os.scandir` returns."""

    def __init__(self, entries: list[Any]) -> None:
        self._left = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._left

    def __next__(self) -> Any:
        return next(self._left)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._left = iter(())


class Overlay:
    """Replacements of the functions of `os` and of `open`, over the tree `root`.

    Args:
        root: folder of the written files.
        private: prefix of the paths that are ours: they are used as they are.
    """

    def __init__(self, root: str, private: str) -> None:
        self.root, self.private = root, private
        self.gone: set[str] = set()

    # -- paths ---------------------------------------------------------------------------------------------------------------------

    def place(self, file: Any, dir_fd: int | None = None) -> str | None:
        """Absolute path of a file that we stand in for; None for open files, devices and what is ours."""
        if isinstance(file, int) or file is None:
            return None
        name = os.fsdecode(os.fspath(file))
        if dir_fd is not None:
            name = os.path.join(plain.readlink(f"/proc/self/fd/{dir_fd}"), name)  # noqa: PTH118
        path = os.path.abspath(name)  # noqa: PTH100
        return None if f"{path}/".startswith(("/dev/", "/proc/", "/sys/", self.private)) else path

    def shadow(self, path: str) -> str:
        """Where a path lies if it was written."""
        return self.root + path

    def _is_written(self, path: str) -> bool:
        return plain.exists(self.root + path)

    def _is_gone(self, path: str) -> bool:
        return bool(self.gone) and any(path == p or path.startswith(p + "/") for p in self.gone)

    def reading(self, file: Any, dir_fd: int | None = None) -> Any:
        """Path to read a file from."""
        path = self.place(file, dir_fd)
        if path is None:
            return file
        return self.shadow(path) if self._is_written(path) or self._is_gone(path) else file

    def writing(self, path: str, *, keeps: bool) -> str:
        """Path to write a file to, whose parent exists.

        Args:
            path: what the script names.
            keeps: what is in the file already is wanted.
        """
        target = self.shadow(path)
        plain.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH120
        if keeps and not plain.exists(target) and not self._is_gone(path) and plain.is_file(path):
            plain.copy(path, target)
        return target

    def _is_there(self, path: str) -> bool:
        return self._is_written(path) or (plain.exists(path) and not self._is_gone(path))

    # -- replacements --------------------------------------------------------------------------------------------------------------

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """`open`."""
        path = self.place(file)
        if path is None:
            return plain.open(file, mode, *args, **kwargs)
        if not _WRITES & set(mode):
            return plain.open(self.reading(file), mode, *args, **kwargs)
        if ("x" in mode and self._is_there(path)) or os.path.isdir(path):  # noqa: PTH112
            raise (
                FileExistsError(errno.EEXIST, "File exists", path)
                if "x" in mode
                else IsADirectoryError(errno.EISDIR, "Is a directory", path)
            )
        if "r" in mode and not self._is_there(path):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return plain.open(self.writing(path, keeps="w" not in mode), mode, *args, **kwargs)

    def os_open(self, file: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """`os.open`."""
        path = self.place(file, dir_fd)
        if path is None:
            return plain.os_open(file, flags, mode, dir_fd=dir_fd)
        if not flags & _WRITE_FLAGS:
            found = self.reading(file, dir_fd)
            return plain.os_open(found, flags, mode, dir_fd=dir_fd if found is file else None)
        if flags & os.O_CREAT and flags & os.O_EXCL and self._is_there(path):
            raise FileExistsError(errno.EEXIST, "File exists", path)
        if not flags & os.O_CREAT and not self._is_there(path):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return plain.os_open(self.writing(path, keeps=not flags & os.O_TRUNC), flags | os.O_CREAT, mode)

    def stat(self, file: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        """`os.stat`."""
        found = self.reading(file, dir_fd)
        return plain.stat(found, dir_fd=dir_fd if found is file else None, follow_symlinks=follow_symlinks)

    def lstat(self, file: Any, *, dir_fd: int | None = None) -> os.stat_result:
        """`os.lstat`."""
        return self.stat(file, dir_fd=dir_fd, follow_symlinks=False)

    def access(self, file: Any, mode: int, **kwargs: Any) -> bool:
        """`os.access`."""
        return plain.access(self.reading(file, kwargs.get("dir_fd")), mode, **kwargs)

    def listdir(self, folder: Any = ".") -> list[Any]:
        """`os.listdir`."""
        path = self.place(folder)
        if path is None or not (self._is_written(path) or self.gone):
            return plain.listdir(folder)
        names = set(plain.listdir(path)) if plain.exists(path) and not self._is_gone(path) else set()
        names = {n for n in names if not self._is_gone(f"{path}/{n}")}
        names |= set(plain.listdir(self.shadow(path))) if self._is_written(path) or not plain.exists(path) else set()
        return [os.fsencode(n) for n in sorted(names)] if isinstance(folder, bytes) else sorted(names)

    def scandir(self, folder: Any = ".") -> Any:
        """`os.scandir`."""
        path = self.place(folder)
        if path is None or isinstance(folder, bytes) or not (self._is_written(path) or self.gone):
            return plain.scandir(folder)
        return Entries([Entry(self, os.fspath(folder), name) for name in self.listdir(folder)])

    def chdir(self, folder: Any) -> None:
        """`os.chdir`; into a folder that the script made, if it made it."""
        path = self.place(folder)
        if path is None and not isinstance(folder, int):
            inside = os.path.abspath(os.fspath(folder))  # noqa: PTH100
            if inside.startswith(self.root) and plain.exists(inside[len(self.root) :]):  # out of a folder that the script made
                folder = inside[len(self.root) :]
        plain.chdir(folder if path is None or plain.exists(path) else self.shadow(path))

    def mkdir(self, folder: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        """`os.mkdir`."""
        path = self.place(folder, dir_fd)
        if path is None:
            plain.mkdir(folder, mode, dir_fd=dir_fd)
        elif self._is_there(path):
            raise FileExistsError(errno.EEXIST, "File exists", path)
        elif not self._is_there(os.path.dirname(path)):  # noqa: PTH120
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        else:
            plain.makedirs(self.shadow(path))

    def unlink(self, file: Any, *, dir_fd: int | None = None) -> None:
        """`os.unlink` and `os.remove`."""
        self._remove(file, dir_fd, plain.unlink)

    def rmdir(self, folder: Any, *, dir_fd: int | None = None) -> None:
        """`os.rmdir`."""
        path = self.place(folder, dir_fd)
        if path is not None and self._is_there(path) and self.listdir(path):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        self._remove(folder, dir_fd, plain.rmdir)

    def _remove(self, file: Any, dir_fd: int | None, original: Any) -> None:
        path = self.place(file, dir_fd)
        if path is None:
            original(file, dir_fd=dir_fd)
            return
        if not self._is_there(path):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        if self._is_written(path):
            original(self.shadow(path))
        self.gone.add(path)

    def rmtree(self, folder: Any, *args: Any, **kwargs: Any) -> None:
        """`shutil.rmtree`."""
        path = self.place(folder)
        if path is None:
            plain.rmtree(folder, *args, **kwargs)
            return
        plain.rmtree(self.shadow(path), ignore_errors=True)
        self.gone.add(path)

    def rename(self, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        """`os.rename` and `os.replace`; a folder of the user's stays where it is."""
        old, new = self.place(source, src_dir_fd), self.place(target, dst_dir_fd)
        if old is None and new is None:
            plain.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            return
        found = self.reading(source, src_dir_fd)
        place = target if new is None else self.writing(new, keeps=False)
        if old is None or found is not source:
            plain.rename(found, place)
        elif plain.is_file(old):
            plain.copy(old, place)
        elif not plain.exists(old):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", old)
        else:
            return
        if old is not None:
            self.gone.add(old)

    def link(self, source: Any, target: Any, *_: Any, **__: Any) -> None:
        """`os.link` and `os.symlink`: a copy of a file, for a link could lead a later write out to the user's file."""
        new = self.place(target)
        base = os.path.join(os.path.dirname(new or os.path.abspath(target)), os.fspath(source))  # noqa: PTH100, PTH118, PTH120
        found = self.reading(base if os.path.exists(base) else source)  # noqa: PTH110
        if plain.is_file(found):
            plain.copy(found, self.writing(new, keeps=False) if new is not None else target)

    def truncate(self, file: Any, length: int) -> None:
        """`os.truncate`."""
        path = self.place(file)
        plain.truncate(file if path is None else self.writing(path, keeps=True), length)

    def reads(self, original: Any) -> Any:
        """A function that reads something about its first argument."""

        def read(file: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self.reading(file, kwargs.get("dir_fd")), *args, **kwargs)

        return read

    def only_ours(self, original: Any) -> Any:
        """A function that changes the mode, owner or times of its first argument, doing nothing to files of the user's."""

        def guarded(file: Any, *args: Any, **kwargs: Any) -> Any:
            named = f"/proc/self/fd/{file}" if isinstance(file, int) else file
            named = plain.readlink(named) if isinstance(file, int) and plain.exists(named) else file
            return original(file, *args, **kwargs) if self.place(named, kwargs.get("dir_fd")) is None else None

        return guarded
