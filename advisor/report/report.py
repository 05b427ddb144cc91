"""Report: everything the advisor found, as one frozen value. Terminal, HTML, JSON and frames only draw it.

`to_json` gives report.json (schema_version 1, documented in the README). Base units; every number's unit is in its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Hotspot:
    """One class of operators on one GPU and one micro-batch (forward, backward and its share of the optimizer step)."""

    op_class: str  # "class" in JSON; one of cost_models.types.OP_CLASSES
    time_share: float  # of the step; all shares sum to 1
    time_s: float
    flops: float
    bytes: float
    achieved_flops_per_s: float
    roofline_share: float  # achieved / what the roofline allows at this intensity
    bound_by: str  # "compute", "memory", "latency", "communication" or "host"
    num_calls: int
    source: str  # "measured" or "modelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    """One ranked plan with its price."""

    rank: int
    label: str
    plan: Mapping[str, Any]  # fields of cost_models.types.Plan
    estimate: Mapping[str, Any]  # step_time_s low_s high_s samples_per_s tokens_per_s mfu peak_memory_bytes available_bytes
    # ... allocated_memory_bytes load_memory_bytes save_memory_bytes breakdown_s breakdown_bytes communication_share
    reasons: tuple[str, ...]  # why it ranks here; the first one is shown in the table
    launch: str = ""  # command line to paste
    folder: str = ""  # below the output folder; "" when no files were written


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedEntry:
    """A plan (or family of plans) that can't be had, and why."""

    label: str
    plan: Mapping[str, Any]
    reason: str
    needed_bytes: float | None
    available_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingEntry:
    """A rule and what it said."""

    rule: str
    title: str
    status: str  # "fired", "silent", "not-applicable", "not-evaluated"
    severity: str  # "warning" or "note"
    message: str
    action: str
    source: str
    confidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """The best plan of one cluster size."""

    num_gpus: int
    label: str
    step_time_s: float | None  # None: nothing fits
    low_s: float | None
    high_s: float | None
    samples_per_s: float | None
    peak_memory_bytes: float | None
    short_by_bytes: float | None  # how far the smallest plan is over, when nothing fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The product. Mappings hold what report.json holds under the same name."""

    inputs: Mapping[str, Any]  # script, arguments, command line, options, versions, when
    model: Mapping[str, Any]  # name class num_params num_trainable_params tied layer_groups optimizer precision batch_size ...
    profile: Mapping[str, Any]  # source device step_time_s idle_s peak_memory_bytes framework saved_bytes
    hotspots: tuple[Hotspot, ...]
    memory: Mapping[str, Any]  # one GPU, no parallelism: parameters_bytes gradients_bytes optimizer_bytes activations_bytes ...
    cluster: Mapping[str, Any]  # name -> {"value": ..., "unit": ..., "source": ...}
    plans: tuple[PlanEntry, ...]
    rejected: tuple[RejectedEntry, ...]
    findings: tuple[FindingEntry, ...]
    scaling: tuple[ScalingPoint, ...] = ()
    accuracy: Mapping[str, Any] = field(default_factory=dict)  # calibration: num_runs, held-out error, interval
    assumptions: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # written, relative to the output folder
    warnings: tuple[str, ...] = ()
    operators: pd.DataFrame = field(default_factory=pd.DataFrame, compare=False, repr=False)  # not in JSON

    def to_json(self) -> dict[str, Any]:
        """The content of report.json."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "operators"}
        data = {k: [dataclasses.asdict(v) for v in value] if value and isinstance(value, tuple) and dataclasses.is_dataclass(value[0]) else value
                for k, value in data.items()}  # fmt: skip
        for row in data["hotspots"]:
            row["class"] = row.pop("op_class")
        return {"schema_version": SCHEMA_VERSION, **data}
