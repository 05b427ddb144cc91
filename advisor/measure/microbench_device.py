"""The microbenchmarks of one device, run in a child process: `python -m advisor.measure.microbench_device OUT DEVICE [--full]`.

Writes one JSON object with the fields of Measurements to OUT, and the section it is at to stderr. Alone in its process because a broken
driver can kill or hang it.
"""

from __future__ import annotations

import functools
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from advisor.measure.host import host_memory_bytes

#: Sides of the square products, and the skinny ones of a transformer block (tokens, hidden, 4 x hidden).
_CUDA_SIZES = ((512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (8192, 1024, 4096),
               (2048, 16384, 4096))  # fmt: skip
_CUDA_FULL_SIZES = ((16384, 4096, 4096), (16384, 8192, 8192), (128, 8192, 8192), (1024, 8192, 8192), (4096, 32000, 4096), (8192, 8192, 128))
_CPU_SIZES = ((128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (512, 3072, 768))
_CPU_FULL_SIZES = ((2048, 2048, 2048), (64, 2048, 2048), (2048, 8192, 512))
#: Longest time one product may be expected to take, and how long each is repeated.
_POINT_LIMIT_S = {"cuda": 0.5, "cpu": 0.6}
_REPEAT_S = {"cuda": 0.05, "cpu": 0.25}
_MIB = 2**20


class _Clock:
    """Seconds of an action on the device: waits for it before and after."""

    def __init__(self, device: str) -> None:
        self.device = device

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], object], *, repeat_s: float, limit: int = 200) -> float:
        """Seconds of the action in the fastest of a few batches, about `repeat_s` together: what the device can do, other load aside."""
        action()
        self.wait()
        first = self._once(action, 1)
        calls = max(1, min(limit, int(repeat_s / 5 / max(first, 1e-7))))
        return min(self._once(action, calls) for _ in range(5 if first * 5 < 4 * repeat_s else 3))

    def _once(self, action: Callable[[], object], calls: int) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(calls):
            action()
        self.wait()
        return (time.perf_counter() - start) / calls


def measure(device: str, *, quick: bool) -> dict[str, Any]:
    """All figures of a device as plain values; a section that fails leaves zeros and a warning."""
    start = time.perf_counter()
    clock, found = _Clock(device), _identity(device)
    warnings: list[str] = []
    sections: tuple[tuple[str, Callable[[], dict[str, Any]]], ...] = (
        ("matrix products", lambda: {"matmul": _matmul(device, clock, quick=quick, warnings=warnings)}),
        ("device memory", lambda: _memory(device, clock, quick=quick)),
        ("host copies", lambda: _host_copies(device, clock, quick=quick)),
        ("launch overhead", lambda: _launch(device, clock)),
    )
    for name, section in sections:
        sys.stderr.write(name + "\n")
        sys.stderr.flush()
        try:
            found.update(section())
        except (RuntimeError, MemoryError) as error:
            warnings.append(f"{name}: {_first_line(error)}")
    return {**found, "warnings": warnings, "duration_s": time.perf_counter() - start}


def _identity(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"device_kind": device, "framework": f"torch {torch.__version__}"}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return {**found, "device_name": properties.name, "memory_bytes": float(properties.total_memory),
                "num_multiprocessors": properties.multi_processor_count}  # fmt: skip
    return {**found, "device_name": _processor_name(), "memory_bytes": host_memory_bytes(), "num_multiprocessors": torch.get_num_threads()}


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def _matmul(device: str, clock: _Clock, *, quick: bool, warnings: list[str]) -> list[dict[str, Any]]:
    sizes = {"cuda": _CUDA_SIZES, "cpu": _CPU_SIZES}[device] + (() if quick else {"cuda": _CUDA_FULL_SIZES, "cpu": _CPU_FULL_SIZES}[device])
    rates: list[dict[str, Any]] = []
    for dtype in _dtypes(device):
        slowest_rate = 0.0  # flops/s of the previous size: what the next one is expected to take
        for m, n, k in sizes:
            flops = 2.0 * m * n * k
            if slowest_rate and flops / slowest_rate > _POINT_LIMIT_S[device]:
                continue
            try:
                seconds = clock.seconds(_product(device, dtype, m, n, k), repeat_s=_REPEAT_S[device])
            except (RuntimeError, MemoryError) as error:
                warnings.append(f"{dtype} product {m} x {n} x {k}: {_first_line(error)}")
                break
            slowest_rate = flops / seconds
            rates.append({"dtype": dtype, "m": m, "n": n, "k": k, "seconds": seconds, "achieved_flops_per_s": flops / seconds})
    return rates


def _dtypes(device: str) -> tuple[str, ...]:
    if device == "cpu":
        return ("fp32", "bf16")
    major, minor = torch.cuda.get_device_capability()
    if torch.version.hip:
        return ("fp32", "fp16", "bf16")
    modern = ("tf32", "bf16") if major >= 8 else ()
    return ("fp32", "fp16", *modern, *(("fp8",) if (major, minor) >= (8, 9) else ()))


def _product(device: str, dtype: str, m: int, n: int, k: int) -> Callable[[], object]:
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    if dtype == "fp8":
        a = torch.ones(m, k, device=device).to(torch.float8_e4m3fn)
        b = torch.ones(n, k, device=device).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    kind = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    left, right = torch.randn(m, k, device=device).to(kind), torch.randn(k, n, device=device).to(kind)
    out = torch.empty(m, n, device=device, dtype=kind)
    return lambda: torch.mm(left, right, out=out)


def _memory(device: str, clock: _Clock, *, quick: bool) -> dict[str, float]:
    """Bytes read and written per second by a copy and by an addition of arrays that no cache holds."""
    num_bytes = {"cuda": 512, "cpu": 192}[device] * (1 if quick else 2) * _MIB
    a = torch.ones(num_bytes // 4, device=device)
    b, c = torch.ones_like(a), torch.empty_like(a)
    copy_s = clock.seconds(lambda: c.copy_(a), repeat_s=_REPEAT_S[device])
    add_s = clock.seconds(lambda: torch.add(a, b, out=c), repeat_s=_REPEAT_S[device])
    return {"memory_copy_bytes_per_s": 2 * num_bytes / copy_s, "memory_add_bytes_per_s": 3 * num_bytes / add_s}


def _host_copies(device: str, clock: _Clock, *, quick: bool) -> dict[str, float]:
    """Bytes per second, one direction. On a CPU there is only a memcpy, the same for all four."""
    num_bytes = {"cuda": 256, "cpu": 64}[device] * (1 if quick else 2) * _MIB
    there, found = torch.ones(num_bytes, dtype=torch.uint8, device=device), {}
    for kind in ("pinned", "pageable"):
        host = torch.ones(num_bytes, dtype=torch.uint8)
        if device == "cuda" and kind == "pinned":
            host = host.pin_memory()
        for direction, target, source in (("host_to_device", there, host), ("device_to_host", host, there)):
            seconds = clock.seconds(functools.partial(target.copy_, source, non_blocking=True), repeat_s=_REPEAT_S[device], limit=20)
            found[f"{direction}_{kind}_bytes_per_s"] = num_bytes / seconds
    return found


def _launch(device: str, clock: _Clock) -> dict[str, float]:
    """Seconds per tiny operator, launched from Python; and per kernel of a CUDA graph, which the host does not slow."""
    x = torch.ones(1, device=device)
    launch_s = clock.seconds(lambda: x.add_(1.0), repeat_s=0.25, limit=2000)
    if device != "cuda":
        return {"launch_s": launch_s, "kernel_s": launch_s}
    graph, num_kernels = torch.cuda.CUDAGraph(), 200
    with torch.cuda.graph(graph):
        for _ in range(num_kernels):
            x.add_(1.0)
    return {"launch_s": launch_s, "kernel_s": clock.seconds(graph.replay, repeat_s=0.1) / num_kernels}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def main(arguments: list[str]) -> int:
    """Measure and write; exit status 1 with one line on stderr when the device can't be used at all."""
    out, device = Path(arguments[0]), arguments[1]
    try:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        found = measure(device, quick="--full" not in arguments)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was compiled with CUDA
        sys.stderr.write(f"failed: {_first_line(error)}\n")
        return 1
    out.write_text(json.dumps(found), encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
