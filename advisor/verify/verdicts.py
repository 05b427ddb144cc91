"""What a verification says: checks of an engine, engines of a plan. Base units; the unit is in the name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1
PASSED, FAILED, NOT_HERE, MEASURED = "passed", "failed", "not runnable here", "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: str  # PASSED, FAILED, NOT_HERE (the detail says why) or MEASURED (a figure without a limit)
    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)  # what was compared, for programs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVerdict:
    """All checks of one engine's files."""

    engine: str  # its NAME
    title: str
    checks: tuple[Check, ...]

    @property
    def failed(self) -> bool:
        return any(check.status == FAILED for check in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVerdict:
    """All engines of one plan, and how the plan was shrunk to run here."""

    folder: str
    label: str  # of the plan
    shrunk_label: str  # of what was run; "" when nothing was
    num_processes: int
    backend: str  # "gloo" or "nccl"
    num_steps: int
    changes: tuple[str, ...]  # from the plan to what was run, in words
    engines: tuple[EngineVerdict, ...]
    reason: str = ""  # why there is no engine, in a sentence; else ""

    @property
    def failed(self) -> bool:
        return any(engine.failed for engine in self.engines)

    @property
    def ran(self) -> bool:
        """Whether any engine's files were run, and not only looked at."""
        return any(check.name != "files" and check.status != NOT_HERE for engine in self.engines for check in engine.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as they stand in verify.json."""
        return {"schema_version": SCHEMA_VERSION, "failed": self.failed, **dataclasses.asdict(self)}
