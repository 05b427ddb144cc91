"""Measure the device that is there, and collectives between its ranks. Everything runs in child processes with a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from advisor.errors import AdvisorError
from advisor.measure.microbench_values import CollectiveRate, MatmulRate, Measurements, cluster_figures, cpu_device, measured_cluster

__all__ = ["CollectiveRate", "MatmulRate", "Measurements", "cluster_figures", "cpu_device", "measure_collectives", "measure_device",
           "measured_cluster"]  # fmt: skip

Progress = Callable[[str], None]
#: Seconds after which a child is given up.
_QUICK_LIMIT_S, _FULL_LIMIT_S = 120.0, 600.0


def measure_device(
    *, quick: bool = True, device: str = "auto", progress: Progress | None = None, timeout_s: float | None = None
) -> Measurements:
    """Matrix rates, memory rate, host copies and launch overhead of the CUDA device if there is one, else of the CPU.

    Args:
        quick: few sizes (about 10 seconds on a small CPU); otherwise more sizes and larger arrays.
        device: "auto", "cuda" or "cpu".
        progress: called with the name of each section as it starts.
        timeout_s: time limit of the child process; two minutes when quick, else ten.

    Returns:
        The figures. When "auto" finds a CUDA device that crashes or hangs, those of the CPU, with a warning.

    Raises:
        AdvisorError: the device could not be measured.
    """
    limit_s = timeout_s or (_QUICK_LIMIT_S if quick else _FULL_LIMIT_S)
    extra = () if quick else ("--full",)
    try:
        return Measurements.from_mapping(_child_result("microbench_device", [device, *extra], limit_s, progress))
    except AdvisorError as error:
        if device != "auto":
            raise
        found = _child_result("microbench_device", ["cpu", *extra], limit_s, progress)
        warnings = [f"the accelerator could not be measured, the CPU was: {error.message}", *found["warnings"]]
        return Measurements.from_mapping({**found, "warnings": warnings})


def measure_collectives(
    backend: str = "gloo", nproc: int = 2, *, quick: bool = True, progress: Progress | None = None, timeout_s: float | None = None
) -> tuple[CollectiveRate, ...]:
    """All-reduce, all-gather and reduce-scatter between processes of this machine, by size, as nccl-tests defines bus bandwidth.

    Args:
        backend: "nccl" (one GPU per process) or "gloo" (CPU).
        nproc: number of processes.
        quick: fewer sizes.
        progress: called once per started group.
        timeout_s: time limit of the whole.

    Raises:
        AdvisorError: fewer than two processes, an unknown backend, too few GPUs, or the group failed.
    """
    if backend not in ("gloo", "nccl"):
        raise AdvisorError(f'Collectives can be measured over "gloo" or "nccl", not "{backend}".')
    if nproc < 2:
        raise AdvisorError(f"Collectives need at least two processes, not {nproc}.")
    if progress:
        progress(f"{backend} collectives between {nproc} processes")
    with tempfile.TemporaryDirectory() as folder:
        out, store = Path(folder) / "out.json", str(Path(folder) / "store")
        commands = [[str(out), backend, str(rank), str(nproc), store, *(() if quick else ("--full",))] for rank in range(nproc)]
        _run("microbench_collectives", commands, timeout_s or (_QUICK_LIMIT_S if quick else _FULL_LIMIT_S), None)
        return tuple(CollectiveRate(**row) for row in _read(out))


def _child_result(module: str, arguments: Sequence[str], limit_s: float, progress: Progress | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        _run(module, [[str(out), *arguments]], limit_s, progress)
        found: dict[str, Any] = _read(out)
        return found


def _read(out: Path) -> Any:
    try:
        return json.loads(out.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise AdvisorError(f"The measurement left no result ({error}).") from error


def _run(module: str, commands: Sequence[Sequence[str]], limit_s: float, progress: Progress | None) -> None:
    """Run one child per command, all at once; the first that fails, or the time limit, ends them all."""
    start = [sys.executable, "-P", "-m", f"advisor.measure.{module}"]
    children = [
        subprocess.Popen([*start, *c], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
        for c in commands
    ]
    lines: list[str] = []
    readers = [threading.Thread(target=_follow, args=(child, lines, progress), daemon=True) for child in children]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + limit_s
    try:
        while any(child.poll() is None for child in children):
            if any(child.poll() for child in children):
                break
            if time.monotonic() > deadline:
                raise AdvisorError(f"The measurement did not end within {limit_s:.0f} s.", hint="Is the device busy, or its driver stuck?")
            time.sleep(0.05)
    finally:
        _end(children)
    for reader in readers:
        reader.join(timeout=5)
    failed = [child.returncode for child in children if child.returncode]
    if failed:
        said = next((line.removeprefix("failed: ") for line in lines if line.startswith("failed: ")), lines[-1] if lines else "")
        raise AdvisorError(f"The measurement failed with status {failed[0]}: {said or 'no message'}.")


def _follow(child: subprocess.Popen[str], lines: list[str], progress: Progress | None) -> None:
    """Keep what a child says on stderr; report its sections."""
    for line in child.stderr or ():
        text = line.strip()
        if text:
            lines.append(text)
            if progress and text in ("matrix products", "device memory", "host copies", "launch overhead"):
                progress(text)


def _end(children: Sequence[subprocess.Popen[str]]) -> None:
    for child in children:
        if child.poll() is None:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    for child in children:
        child.wait(timeout=30)
