"""Writes an advice folder as a whole or not at all.

Everything is staged in a hidden sibling folder, then swapped in by rename. A folder is ours when it holds the marker file,
which lists what we wrote: files that others put in are never lost, they make us refuse.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from advisor.errors import OutputError
from advisor.report.html import render_html
from advisor.report.report import Report

MARKER = ".parallel-advisor"
#: What running the generated files leaves behind; nobody misses it.
_LEFTOVERS = ("__pycache__", ".ipynb_checkpoints", ".DS_Store")
_ELSEWHERE = "Choose another folder with --out."


def check_output(folder: Path) -> None:
    """Whether an advice may be written there; touches nothing. To be asked before hours of profiling.

    Raises:
        OutputError: the folder holds something else, or can't be written.
    """
    try:
        is_link, exists = folder.is_symlink(), folder.exists()
    except (OSError, ValueError) as error:  # a name too long, or with a NUL
        raise OutputError(f"{str(folder)[:60]} can't be a folder's name ({error}).", hint=_ELSEWHERE) from error
    if is_link:
        raise OutputError(f"{folder} is a symbolic link.", hint=_ELSEWHERE)
    _check_parent(folder)
    if not exists:
        return
    if not folder.is_dir():
        raise OutputError(f"{folder} is a file, not a folder.", hint=_ELSEWHERE)
    try:
        resolved, here = folder.resolve(), Path.cwd()
        if resolved == here or resolved in here.parents:
            raise OutputError(f"{folder} is the folder you are in, or holds it; it can't be replaced as a whole.",
                              hint="Choose a folder below it, such as --out advice.")  # fmt: skip
        foreign = _foreign_files(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    if foreign and not (folder / MARKER).is_file():
        raise OutputError(f"{folder} holds files that `advise` did not write, such as {foreign[0]}.", hint=_ELSEWHERE)
    if foreign:
        raise OutputError(f"{folder} is an earlier advice, but you added or edited files in it, such as {foreign[0]}; replacing it would lose them.",
                          hint="Move them away, or choose another folder with --out.")  # fmt: skip


def _check_parent(folder: Path) -> None:
    """The nearest existing ancestor must be a folder that can be written."""
    parent = folder.absolute().parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise OutputError(f"{folder} can't be made: {parent} is not a folder.", hint=_ELSEWHERE)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{folder} can't be written: no permission in {parent}.", hint=_ELSEWHERE)


def _foreign_files(folder: Path) -> list[str]:
    """What is in the folder beside the files that its marker lists, unchanged; relative to it; all of it where there is no marker."""
    marker = folder / MARKER
    if not marker.is_file():
        return sorted(p.name for p in folder.iterdir())
    written: dict[str, str] = {}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        written = dict(json.loads(marker.read_text(encoding="utf8"))["files"])
    names = [n for n in _files_below(folder) if n != MARKER and not any(part in _LEFTOVERS for part in Path(n).parts)]
    return [n for n in names if written.get(n) != _digest(folder / n)]


def _digest(path: Path) -> str:
    return "" if path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest()


def _files_below(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())


def write_advice(report: Report, folder: Path, write_plans: Callable[[Path], Sequence[str]] | None = None) -> Report:
    """Write report.json, report.html and the plans' folders; an earlier advice there is replaced as a whole.

    Args:
        report: what to write.
        folder: the advice folder; its parents are made where missing.
        write_plans: writes the plans' folders below the folder it is given; returns the names of the files, relative to it.

    Returns:
        The report with `files` and `inputs["out"]` filled, as it stands in report.json.

    Raises:
        OutputError: the folder isn't ours to replace or can't be written; nothing was changed.
    """
    check_output(folder)
    try:
        with _staging(folder) as stage:
            names = write_plans(stage) if write_plans else ()
            written = {**report.inputs, "out": str(folder)}
            report = dataclasses.replace(report, inputs=written, files=("report.html", "report.json", *names))
            _write_reports(report, stage)
            _swap(stage, folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return report


def _write_reports(report: Report, stage: Path) -> None:
    text = json.dumps(report.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
    (stage / "report.json").write_text(text + "\n", encoding="utf8", errors="backslashreplace")
    (stage / "report.html").write_text(render_html(report), encoding="utf8", errors="backslashreplace")
    marker = {"written_by": "parallel-advisor", "files": {name: _digest(stage / name) for name in _files_below(stage)}}
    (stage / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf8")


def add_file(folder: Path, name: str, text: str) -> None:
    """Put one more file of ours into an advice: its marker lists it, so that a later advice may replace the folder.

    Args:
        folder: of an advice; in a folder without marker the file is written all the same.
        name: relative to the folder, whose subfolders must exist.
        text: of the file, which replaces an older one in one go.

    Raises:
        OutputError: it can't be written.
    """
    try:
        _replace(folder / name, text)
        marker = folder / MARKER
        if marker.is_file():
            listed = json.loads(marker.read_text(encoding="utf8"))
            listed["files"][name] = _digest(folder / name)
            _replace(marker, json.dumps(listed, indent=1) + "\n")
    except OSError as error:
        raise _unwritable(folder / name, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{folder / MARKER} is damaged ({error}).", hint="Run `advise` again into another folder.") from error


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        fresh.write_text(text, encoding="utf8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


@contextlib.contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A hidden sibling to write into, gone at the end; parents made for it go too if the writing fails."""
    parent = folder.absolute().parent
    made = [p for p in (parent, *parent.parents) if not p.exists()]
    stage = parent / f".{folder.name}.{secrets.token_hex(4)}.tmp"
    done = False
    try:
        parent.mkdir(parents=True, exist_ok=True)
        stage.mkdir()
        yield stage
        done = True
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if not done:
            for p in made:
                with contextlib.suppress(OSError):
                    p.rmdir()


def _swap(stage: Path, folder: Path) -> None:
    """Put the staged folder in place; whatever interrupts it, the folder is the old advice or the new one."""
    if not folder.exists():
        stage.rename(folder)
        return
    old = stage.with_suffix(".old")
    try:
        folder.rename(old)
        stage.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> OutputError:
    why = error.strerror or type(error).__name__
    return OutputError(f"{folder} can't be written: {why.lower()}.", hint="Nothing was changed. Choose another folder with --out.")
