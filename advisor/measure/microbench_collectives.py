"""One rank of the collective benchmark: `python -m advisor.measure.microbench_collectives OUT BACKEND RANK NUM_RANKS STORE [--full]`.

Rank 0 writes a JSON list of CollectiveRate fields to OUT. Seconds are those of the slowest rank, as nccl-tests reports them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_SIZES_BYTES = (4 * 1024, 64 * 1024, 1024**2, 16 * 1024**2, 64 * 1024**2)
_FULL_SIZES_BYTES = (1024, 16 * 1024, 256 * 1024, 4 * 1024**2, 256 * 1024**2)
_BUDGET_S = {True: 0.5, False: 2.0}  # per operation and size, quick or not


def _operations(num_bytes: int, num_ranks: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """The collectives on one tensor of `num_bytes` (float32), the whole of it for all three as in nccl-tests."""
    count = max(num_bytes // 4 // num_ranks, 1) * num_ranks
    whole = torch.ones(count, device=device)
    part = torch.ones(count // num_ranks, device=device)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }


def _slowest_s(action: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Median over repetitions of the slowest rank's seconds; all ranks repeat equally often."""
    samples: list[float] = []
    deadline = time.perf_counter() + budget_s
    while True:
        dist.barrier()
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken = torch.tensor([time.perf_counter() - start, float(time.perf_counter() > deadline)], device=device, dtype=torch.float64)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        samples.append(float(taken[0]))
        if len(samples) > 3 and (len(samples) >= 30 or bool(taken[1])):
            return statistics.median(samples[1:])


def _measure(backend: str, rank: int, num_ranks: int, *, quick: bool) -> list[dict[str, Any]]:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found: list[dict[str, Any]] = []
    for num_bytes in sorted(_SIZES_BYTES + (() if quick else _FULL_SIZES_BYTES)):
        for operation, action in _operations(num_bytes, num_ranks, device).items():
            seconds = _slowest_s(action, device, _BUDGET_S[quick])
            factor = (num_ranks - 1) / num_ranks * (2 if operation == "all_reduce" else 1)
            found.append({"operation": operation, "backend": backend, "num_ranks": num_ranks, "message_bytes": num_bytes,
                          "seconds": seconds, "bus_bytes_per_s": num_bytes / seconds * factor})  # fmt: skip
    return found


def main(arguments: list[str]) -> int:
    """Join the group, measure, and let rank 0 write."""
    out, backend, rank, num_ranks, store = Path(arguments[0]), arguments[1], int(arguments[2]), int(arguments[3]), arguments[4]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks)
        found = _measure(backend, rank, num_ranks, quick="--full" not in arguments)
        if rank == 0:
            out.write_text(json.dumps(found), encoding="utf8")
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"failed: {(str(error).strip().splitlines() or [type(error).__name__])[0][:200]}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
