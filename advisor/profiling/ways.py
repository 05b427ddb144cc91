"""Which way a step is captured, and what is tried when one way fails."""

from __future__ import annotations

import time
from collections.abc import Callable

from advisor.profiling import source as sources
from advisor.profiling.launch import ChildFailure, Job, run_child, script_error
from advisor.profiling.schema import StepProfile

WAYS = ("auto", "traced", "live")
_LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "env://")


def capture_step(script: str, *, entry: str | None, args: tuple[str, ...], way: str, timeout_s: float, batch_size: int | None, verbose: bool,
                 progress: Callable[[str], None] | None) -> StepProfile:  # fmt: skip
    """See `advisor.profiling.capture`."""
    if way not in WAYS:
        raise ValueError(f"capture is one of {', '.join(WAYS)}, not {way!r}")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be positive, not {timeout_s}")
    source = sources.read_source(script, entry)
    job = Job(source=source, script=str(source.path), args=args, batch_size=batch_size, verbose=verbose, deadline=time.monotonic() + timeout_s)
    tell = progress or (lambda _text: None)
    tell("tracing one step of the script")
    return traced(job, tell)


def traced(job: Job, tell: Callable[[str], None]) -> StepProfile:
    """A step without a device: on fake tensors, else on real ones on the CPU.

    Raises:
        ScriptError: both ways failed.
    """
    result = run_child(job, "fake")
    environment = False
    if isinstance(result, ChildFailure) and result.kind == "crash" and any(name in result.message for name in _LAUNCHER_NAMES):
        environment = True
        result = run_child(job, "fake", launcher_environment=True)
    if isinstance(result, StepProfile):
        return result
    if result.kind not in ("crash", "died") or job.left_s() < 5.0 or result.host_model_bytes > 0.3 * _free_memory_bytes():
        raise script_error(job, result)
    tell("the script needs real values: running one small step on the CPU")
    note = "The step was recorded on real tensors on the CPU, because the script needs values that a trace without a device does not have."
    real = run_child(job, "real", launcher_environment=environment, warnings=[note])
    if isinstance(real, StepProfile):
        return real
    raise script_error(job, real if real.kind != "timeout" else result)


def _free_memory_bytes() -> float:
    import os

    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):
        return 8e9
