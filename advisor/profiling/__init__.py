"""Profiles of one training step: traced without a device, measured live, or read from somebody else's trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from advisor.profiling.schema import StepProfile, load_profile, save_profile

__all__ = ["StepProfile", "capture", "load_profile", "save_profile"]


def capture(script: str, *, entry: str | None = None, args: Sequence[str] = (), capture: str = "auto", timeout_s: float = 300.0,
            batch_size: int | None = None, verbose: bool = False, progress: Callable[[str], None] | None = None) -> StepProfile:  # fmt: skip
    """One training step of a script, as a profile. The script runs in a child process and nothing of it is changed.

    Args:
        script: path of a Python file, or "path:ENTRY" with the name of the function that builds the model.
        entry: the same name, given apart.
        args: the script's own arguments.
        capture: "traced" (no device, nothing computed), "live" (measured on the CUDA device, else on the CPU), or "auto": traced,
            then measured as well where a step fits this machine's memory and the time limit.
        timeout_s: seconds for everything together.
        batch_size: samples per forward pass for scripts that declare `make_batch(batch_size)`.
        verbose: show the script's output on stderr.
        progress: told in a few words what is going on.

    Raises:
        ScriptError: the script is missing, broken, or takes no training step.
        ValueError: `capture` is none of the three, or `timeout_s` is not positive.
    """
    from advisor.profiling.ways import capture_step

    return capture_step(script, entry=entry, args=tuple(args), way=capture, timeout_s=timeout_s, batch_size=batch_size, verbose=verbose,
                        progress=progress)  # fmt: skip
