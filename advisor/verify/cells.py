"""The parent's side of the workers: starts torchrun, follows it, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from advisor.errors import AdvisorError
from advisor.profiling import processes

_POLL_S = 0.1
#: Seconds for torchrun and the imports, beside the cells' own limits.
_START_LIMIT_S = 180.0
_PORTS, _NUM_PARTS = range(16_000, 32_000), 16
_HOME = str(Path(__file__).resolve().parents[2])

Record = dict[str, Any]


def run_cells(
    cells: Sequence[Mapping[str, Any]], folder: Path, *, num_processes: int, on_gpu: bool = False, imports: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, list[Record]]:  # fmt: skip
    """Run cells in one torchrun, in their order.

    Args:
        cells: see `worker` and `watch`; each has a `name` and a `limit_s`.
        folder: for what they leave.
        num_processes: ranks of all cells but those that run `alone`.
        on_gpu: the processes may see the GPUs.
        imports: modules imported once, before the cells.
        progress: told the name of the cell that runs.

    Returns:
        Records of the ranks by cell: what was watched, `code`, `reason` (why it was ended) and `output`.

    Raises:
        AdvisorError: torchrun itself failed.
    """
    ports = free_ports(len(cells))
    spec = folder / "cells.json"
    placed = [{**cell, "port": port} for cell, port in zip(cells, ports, strict=True)]
    spec.write_text(json.dumps({"out": str(folder), "cells": placed, "imports": list(imports)}), encoding="utf8")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes), "-m", "advisor.verify.worker",
        str(spec),
    ]  # fmt: skip
    limit_s = _START_LIMIT_S + sum(cell["limit_s"] for cell in cells)
    _follow(command, folder, _environment(folder, num_processes, on_gpu), limit_s, progress)
    return {c["name"]: [_record(folder / f"{c['name']}.{r}") for r in range(1 if c.get("alone") else num_processes)] for c in cells}


def _environment(folder: Path, num_processes: int, on_gpu: bool) -> dict[str, str]:
    (folder / "tmp").mkdir(exist_ok=True)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (environment.get("PYTHONPATH", ""), _HOME) if p)
    environment |= {
        "OMP_NUM_THREADS": str(num_threads(num_processes)), "TMPDIR": str(folder / "tmp"), "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        processes.MARK: str(folder), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1", "WANDB_MODE": "disabled", "MPLBACKEND": "Agg",
        "TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }  # fmt: skip
    if not on_gpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": environment.get("GLOO_SOCKET_IFNAME", "lo")}
    return environment


def num_threads(num_processes: int) -> int:
    """Threads of each process, so that all together fill the processor."""
    return max(1, (os.cpu_count() or 1) // num_processes)


def _follow(command: list[str], folder: Path, environment: dict[str, str], limit_s: float, progress: Callable[[str], None]) -> None:
    log, deadline, told = folder / "torchrun.txt", time.monotonic() + limit_s, ""
    with log.open("w", encoding="utf8") as stream:
        child = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                with contextlib.suppress(OSError):
                    current = (folder / "current").read_text(encoding="utf8")
                    if current and current != told:
                        told = current
                        progress(current)
        finally:
            _end(child, folder)
    if child.returncode:
        tail = " ".join(log.read_text(encoding="utf8", errors="replace").split()[-40:])
        raise AdvisorError(f"The processes could not be run (status {child.returncode}): {tail[-400:]}", hint="Does torchrun work here?")


def _end(child: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill what is left of the processes, those in groups of their own too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    while left := processes.marked(str(folder)) & _alive():
        processes.end(left)
        time.sleep(_POLL_S)
    child.wait(timeout=30)


def _alive() -> set[int]:
    """Processes that are no zombies."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if stat.read_text(encoding="utf8", errors="replace").rpartition(")")[2].split()[0] != "Z":
                found.add(int(stat.parent.name))
    return found


def _record(stem: Path) -> Record:
    done, text = Path(f"{stem}.json"), Path(f"{stem}.txt")
    output = text.read_text(encoding="utf8", errors="replace") if text.is_file() else ""
    record = json.loads(done.read_text(encoding="utf8")) if done.is_file() else {"code": 1, "steps": [], "reason": "never started"}
    return {**record, "output": output}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, for cells that start one after the other.

    They lie below those that the system gives to outgoing connections, which could take one before its cell starts. Processes that
    verify at the same time draw from different parts of them.
    """
    first = _PORTS.start + os.getpid() % _NUM_PARTS * (len(_PORTS) // _NUM_PARTS)
    found: list[int] = []
    for port in random.SystemRandom().sample(range(first, first + len(_PORTS) // _NUM_PARTS), len(_PORTS) // _NUM_PARTS):
        if len(found) == count:
            break
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("", port))
            found.append(port)
    return found
