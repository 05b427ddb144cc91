"""Which way a step is captured, and what is tried when one way fails."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from advisor.profiling import machine
from advisor.profiling import source as sources
from advisor.profiling.launch import ChildFailure, Job, Measurement, run_child, run_live, script_error
from advisor.profiling.merge import merge
from advisor.profiling.schema import StepProfile

WAYS = ("auto", "traced", "live")
_LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "env://")
#: A real run on the CPU must be over in about this many seconds, or "auto" doesn't start it.
MAX_CPU_RUN_S = 20.0
_START_S = 8.0  # import torch, build the model
_MEMORY_SHARE = 0.8  # of what is free now
Tell = Callable[[str], None]


def capture_step(script: str, *, entry: str | None, args: tuple[str, ...], way: str, timeout_s: float, batch_size: int | None, verbose: bool,
                 progress: Tell | None) -> StepProfile:  # fmt: skip
    """See `advisor.profiling.capture`."""
    if way not in WAYS:
        raise ValueError(f"capture is one of {', '.join(WAYS)}, not {way!r}")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be positive, not {timeout_s}")
    source = sources.read_source(script, entry)
    job = Job(
        source=source, script=str(source.path), args=args, batch_size=batch_size, verbose=verbose, deadline=time.monotonic() + timeout_s
    )
    tell: Tell = progress or (lambda _text: None)
    tell("tracing one step of the script")
    profile = traced(job, tell)
    if way == "traced":
        return profile
    return measured(job, profile, tell, insists=way == "live")


def traced(job: Job, tell: Tell) -> StepProfile:
    """A step without a device: on fake tensors, else on real ones on the CPU.

    Raises:
        ScriptError: both ways failed.
    """
    settings: dict[str, Any] = {}
    result = run_child(job, "fake")
    for _ in range(2):
        if isinstance(result, StepProfile):
            return result
        if result.kind == "crash" and any(name in result.message for name in _LAUNCHER_NAMES):
            settings["launcher_environment"] = True
        elif result.kind == "one-device":
            settings["num_devices"] = 1
        else:
            break
        result = run_child(job, "fake", **settings)
    if isinstance(result, StepProfile):
        return result
    if result.kind not in ("crash", "died") or job.left_s() < 5.0:
        raise script_error(job, result)
    if result.host_model_bytes > 0.25 * machine.free_memory_bytes():  # too large to be run for real
        return _guessed(job, result, settings)
    tell("the script needs real values: running one small step on the CPU")
    note = "The step was recorded on real tensors on the CPU, because the script needs values that a trace without a device does not have."
    real = run_child(job, "real", warnings=[note], **settings)
    if isinstance(real, StepProfile):
        return real
    raise script_error(job, real if real.kind != "timeout" else result)


def _guessed(job: Job, failure: ChildFailure, settings: dict[str, Any]) -> StepProfile:
    note = "Some shapes depend on values that a trace does not have: half of every such mask was taken to be true."
    guessed = run_child(job, "fake", guesses=True, warnings=[note], **settings)
    if isinstance(guessed, StepProfile):
        return guessed
    raise script_error(job, failure)


def measured(job: Job, profile: StepProfile, tell: Tell, *, insists: bool) -> StepProfile:
    """The traced profile with measured seconds in it, or as it is with a warning that says why nothing was measured.

    Raises:
        ScriptError: a measurement was insisted on and failed.
    """
    device = machine.first_device()
    reason = "" if insists else why_not_live(profile, device, job.left_s())
    if reason:
        return with_warning(profile, f"Nothing was measured: {reason}")
    tell(f"measuring a few steps on the {'GPU' if device is not None else 'CPU'}")
    warm_up, timed = (3, 3) if device is not None else (1, 1)
    result = run_live(job, profile, warm_up_steps=warm_up, timed_steps=timed)
    if isinstance(result, ChildFailure) and result.kind == "few-steps":
        result = run_live(job, profile, warm_up_steps=1, timed_steps=0)
    if isinstance(result, Measurement):
        return merge(profile, result.calls, device=result.device, step_time_s=result.step_time_s, idle_s=result.idle_s,
                     peak_memory_bytes=result.peak_memory_bytes, counts_kernels=result.on_device)  # fmt: skip
    if insists:
        raise script_error(job, result)
    return with_warning(profile, f"Nothing was measured: the live run failed ({result.message})")


def why_not_live(profile: StepProfile, device: machine.DeviceMemory | None, left_s: float) -> str:
    """Why a live step is not tried: it would not fit the memory or the time; "" if it would."""
    needed = memory_needed_bytes(profile)
    free = device.free_bytes if device is not None else machine.free_memory_bytes()
    where = device.name if device is not None else "this machine"
    if needed > _MEMORY_SHARE * free:
        return f"a step needs about {needed / 1e9:.1f} GB and {where} has {free / 1e9:.1f} GB free."
    seconds = run_seconds(profile, device)
    limit = left_s if device is not None else min(left_s, MAX_CPU_RUN_S)
    if seconds > limit:
        return f"a few steps on {where} would take about {seconds:.0f} s, and {limit:.0f} s are left for them."
    return ""


def memory_needed_bytes(profile: StepProfile) -> float:
    """Parameters, gradients, optimizer state and what is kept for backward, with a fifth on top for temporaries."""
    meta, parameters = profile.meta, profile.parameters
    width = {"fp32": 4, "fp64": 8}.get(meta.param_dtype, 2)
    states = meta.num_trainable_params * (width + meta.optimizer_state_bytes_per_param)
    others = sum(meta.other_models.values()) * width
    return 1.2 * (float(parameters["num_elements"].sum()) * width + others + states + meta.saved_bytes + meta.buffer_bytes)


def run_seconds(profile: StepProfile, device: machine.DeviceMemory | None) -> float:
    """Rough seconds of a live run: at 50 GFLOP/s and 5 GB/s per CPU core, or 20 TFLOP/s and 200 GB/s on a GPU, which are cautious."""
    table = profile.operators
    times = table["phase"].map(lambda phase: 1 if phase == "optimizer" else profile.meta.accumulation)
    cores = machine.num_cores()
    rate, move_rate, steps = (20e12, 200e9, 8) if device is not None else (50e9 * cores, 5e9 * cores, 3)
    step = float((table["flops"] * times).sum()) / rate + float(((table["read_bytes"] + table["written_bytes"]) * times).sum()) / move_rate
    return _START_S + steps * step


def with_warning(profile: StepProfile, text: str) -> StepProfile:
    """The profile with one more warning."""
    return dataclasses.replace(profile, meta=dataclasses.replace(profile.meta, warnings=[*profile.meta.warnings, text]))
