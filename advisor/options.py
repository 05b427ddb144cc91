"""What a user may ask for; the same names on the command line (with dashes) and in Python (with underscores)."""

from __future__ import annotations

import numbers
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from advisor.errors import AdvisorError

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")
OBJECTIVES = ("throughput", "memory", "gpus")
_LARGEST_BATCH = 10_000_000  # samples of one optimizer step
#: Engines that files can be had for; `advisor.engines` holds them.
ENGINE_NAMES = (
    "ddp", "fsdp2", "fsdp1", "tensor_parallel", "pipeline", "deepspeed", "accelerate", "trainer", "lightning", "torchtitan", "megatron",
    "colossalai",
)  # fmt: skip
CAPTURES = ("auto", "traced", "live")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How the script is seen."""

    entry: str | None = None  # build_model-like function, where a script has several
    args: Sequence[str] = ()  # the script's own arguments
    capture: str = "auto"
    profile_timeout: float = 300.0  # seconds for everything that runs the user's code
    batch_size: int | None = None  # for make_batch(batch_size)
    verbose: bool = False  # show the script's own output

    def __post_init__(self) -> None:
        _one_of("capture", self.capture, CAPTURES)
        _positive("profile-timeout", self.profile_timeout)
        object.__setattr__(self, "batch_size", _count("batch-size", self.batch_size))
        _text("entry", self.entry)
        if not isinstance(self.args, list | tuple) or not all(isinstance(a, str) for a in self.args):
            raise AdvisorError(f"args is a list of strings, not {self.args!r}.", hint='Write args=["--batch-size", "8"].')


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is planned for."""

    gpu: str | None = None
    gpus_per_node: int | None = None
    nodes: int | None = None
    intra: str | None = None
    inter: str | None = None
    cluster: str | None = None  # TOML file
    global_batch: int | None = None  # samples per optimizer step
    precision: str | None = None
    optimizer: str | None = None
    objective: str = "throughput"
    max_memory_share: float = 0.95
    calibration: str | None = None  # TOML file of `advise calibrate`
    plans: int = 3  # plans to write files for
    engine: Sequence[str] = ()  # names of the engines to write files for; all that can express the plan

    def __post_init__(self) -> None:
        _one_of("objective", self.objective, OBJECTIVES)
        if self.precision is not None:
            _one_of("precision", self.precision, PRECISIONS)
        for name in ("gpus_per_node", "nodes", "global_batch", "plans"):
            object.__setattr__(self, name, _count(name.replace("_", "-"), getattr(self, name)))
        if self.global_batch is not None and self.global_batch > _LARGEST_BATCH:
            raise AdvisorError(
                f"--global-batch {self.global_batch} is more than {_LARGEST_BATCH:,} samples.", hint="Count samples, not tokens."
            )
        for name in ("gpu", "intra", "inter", "cluster", "optimizer", "calibration"):
            _text(name, getattr(self, name))
        if not isinstance(self.engine, list | tuple) or not all(isinstance(name, str) for name in self.engine):
            raise AdvisorError(f"engine is a list of names, not {self.engine!r}.", hint='Write engine=["fsdp2"].')
        for name in self.engine:
            _one_of("engine", name, ENGINE_NAMES)
        _positive("max-memory-share", self.max_memory_share)
        if not 0 < self.max_memory_share <= 1:
            raise AdvisorError(
                f"--max-memory-share must be above 0 and at most 1, not {self.max_memory_share:g}.", hint="0.9 keeps a tenth free."
            )


def split_options(options: dict[str, Any]) -> tuple[ProfileOptions, PlanOptions]:
    """Sort keyword options into the two groups.

    Raises:
        AdvisorError: an option that doesn't exist; names the nearest.
    """
    import difflib

    seeing, planning = ({f.name for f in fields(kind)} for kind in (ProfileOptions, PlanOptions))
    for name in options:
        if name not in seeing | planning:
            near = difflib.get_close_matches(name, seeing | planning, n=1)
            raise AdvisorError(f"There is no option {name!r}.", hint=f"Did you mean {near[0]!r}?" if near else "See help(advisor.advise).")
    return (
        ProfileOptions(**{k: v for k, v in options.items() if k in seeing}),
        PlanOptions(**{k: v for k, v in options.items() if k in planning}),
    )


def _one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise AdvisorError(f"--{name} is one of {', '.join(allowed)}, not {value!r}.")


def _positive(name: str, value: object, *, whole: bool = False) -> None:
    if not isinstance(value, numbers.Integral if whole else numbers.Real) or isinstance(value, bool):
        raise AdvisorError(f"--{name} must be a {'whole ' if whole else ''}number, not {value!r}.")
    if not float(value) > 0:
        raise AdvisorError(f"--{name} must be above 0, not {float(value):g}.")


def _count(name: str, value: object) -> int | None:
    """A whole number above 0, also one of NumPy's; None where none is given."""
    if value is None:
        return None
    _positive(name, value, whole=True)
    return operator.index(value)  # type: ignore[arg-type]


def _text(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str | os.PathLike):
        raise AdvisorError(f"--{name} must be text, not {value!r}.")
