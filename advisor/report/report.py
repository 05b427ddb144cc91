"""Report: everything the advisor found, as one frozen value. Terminal, HTML, JSON and frames only draw it.

`to_json` gives report.json (schema_version 1, documented in the README). Base units; every number's unit is in its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pandas as pd

from advisor.errors import AdvisorError
from advisor.report.plain import frozen, thawed

SCHEMA_VERSION = 1
#: Python's name and JSON's, where they differ.
_JSON_NAMES = {"op_class": "class"}

Entry = TypeVar("Entry")


def _freeze_fields(value: Any) -> None:
    """Bring every field of a new entry into frozen, JSON-safe form."""
    for f in dataclasses.fields(value):
        if f.name != "operators":
            object.__setattr__(value, f.name, frozen(getattr(value, f.name), f"{type(value).__name__}.{f.name}"))


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

    def __post_init__(self) -> None:
        _freeze_fields(self)


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
    check: str = ""  # command line that checks the plan before the long run; "" when there is none
    launch_needs: str = ""  # what pip must install beside PyTorch for `launch`
    launch_plain: str = ""  # command line with PyTorch alone, where `launch` needs more; "" where there is none
    no_files: str = ""  # clause on why no engine has files for it; "" where one has

    def __post_init__(self) -> None:
        _freeze_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedEntry:
    """A plan (or family of plans) that can't be had, and why."""

    label: str
    plan: Mapping[str, Any]
    reason: str
    needed_bytes: float | None
    available_bytes: float | None

    def __post_init__(self) -> None:
        _freeze_fields(self)


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

    def __post_init__(self) -> None:
        _freeze_fields(self)


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

    def __post_init__(self) -> None:
        _freeze_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """The product. Mappings hold what report.json holds under the same name; they are frozen too."""

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
    smallest_num_gpus: Mapping[str, int | None] = field(default_factory=dict)  # strategy -> fewest GPUs that hold it; None: none tried
    accuracy: Mapping[str, Any] = field(default_factory=dict)  # num_runs, unseen_source_median_share, unseen_model_p90_share ...
    assumptions: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # written, relative to the output folder
    warnings: tuple[str, ...] = ()
    operators: pd.DataFrame = field(default_factory=pd.DataFrame, compare=False, repr=False)  # not in JSON

    def __post_init__(self) -> None:
        for name, kind in _ENTRY_KINDS.items():
            entries = getattr(self, name)
            if not all(isinstance(entry, kind) for entry in entries):
                raise ValueError(f"{name} must hold {kind.__name__} values")
            object.__setattr__(self, name, tuple(entries))
        for f in dataclasses.fields(self):
            if f.name != "operators" and f.name not in _ENTRY_KINDS:
                object.__setattr__(self, f.name, frozen(getattr(self, f.name), f"Report.{f.name}"))

    def to_json(self) -> dict[str, Any]:
        """The content of report.json: fresh dicts and lists, no NaN, no infinity, nothing but JSON's own types."""
        data: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        for f in dataclasses.fields(self):
            if f.name != "operators":
                value = getattr(self, f.name)
                data[f.name] = [_entry_to_json(entry) for entry in value] if f.name in _ENTRY_KINDS else thawed(value)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """The report that wrote this JSON, without its operators. Unknown fields are left out: later versions may add some.

        Raises:
            AdvisorError: not a report, or one of another schema version.
        """
        version = data.get("schema_version") if isinstance(data, Mapping) else None
        if version != SCHEMA_VERSION:
            raise AdvisorError(f"This is no report of schema version {SCHEMA_VERSION} (found {version}).",
                               hint="Run `advise` again to write a new one.")  # fmt: skip
        try:
            values = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
            for name, kind in _ENTRY_KINDS.items():
                values[name] = tuple(_entry_from_json(kind, row) for row in values.get(name, ()))
            return cls(**values)
        except (AttributeError, TypeError, ValueError) as error:
            raise AdvisorError(f"This report is damaged ({error}).", hint="Run `advise` again to write a new one.") from error

    def plans_frame(self) -> pd.DataFrame:
        """One row per ranked plan: rank, label, the plan's degrees, the estimate's figures and its time parts (`<part>_s`)."""
        rows = []
        for entry in self.plans:
            figures = {key: value for key, value in entry.estimate.items() if not isinstance(value, Mapping)}
            parts = {f"{part}_s": value for part, value in (entry.estimate.get("breakdown_s") or {}).items()}
            reason = entry.reasons[0] if entry.reasons else ""
            rows.append({"rank": entry.rank, "label": entry.label, **entry.plan, **figures, **parts, "reason": reason})
        return pd.DataFrame(rows)

    def hotspots_frame(self) -> pd.DataFrame:
        """One row per operator class, largest share of time first; `flops_per_byte` is the arithmetic intensity."""
        columns = [f.name for f in dataclasses.fields(Hotspot)]
        frame = pd.DataFrame([{c: getattr(h, c) for c in columns} for h in self.hotspots], columns=columns)
        frame["flops_per_byte"] = frame["flops"] / frame["bytes"].where(frame["bytes"] > 0)
        return frame.sort_values("time_share", ascending=False, ignore_index=True)

    def memory_frame(self) -> pd.DataFrame:
        """Peak memory of one GPU in bytes, a row per plan, a column per part (`<part>_bytes`); parts sum to the peak."""
        rows = [{f"{part}_bytes": value for part, value in (p.estimate.get("breakdown_bytes") or {}).items()} for p in self.plans]
        return pd.DataFrame(rows, index=pd.Index([p.label for p in self.plans], name="plan"))

    def operators_frame(self) -> pd.DataFrame:
        """One row per operator call of the step (columns: `advisor.profiling.schema`); empty for a report read from JSON."""
        return self.operators.copy()

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.compare))

    def __repr__(self) -> str:
        """One line: what was looked at and what is recommended; the frames and `to_json` hold the rest."""
        best = f"{self.plans[0].label}, {self.plans[0].estimate.get('step_time_s', 0):.3g} s a step" if self.plans else "no plan fits"
        return f"<Report on {self.inputs.get('script', '?')}: {best}; {len(self.plans)} plans, {len(self.rejected)} rejected>"

    def _repr_html_(self) -> str:
        """What a notebook shows for a report: the recommendation, the ranking and the hotspots."""
        from advisor.report.html import render_compact

        return render_compact(self)


_ENTRY_KINDS: Mapping[str, type[Any]] = {
    "hotspots": Hotspot, "plans": PlanEntry, "rejected": RejectedEntry, "findings": FindingEntry, "scaling": ScalingPoint,
}  # fmt: skip


def _entry_to_json(entry: Any) -> dict[str, Any]:
    return {_JSON_NAMES.get(f.name, f.name): thawed(getattr(entry, f.name)) for f in dataclasses.fields(entry)}


def _entry_from_json(kind: type[Entry], row: Mapping[str, Any]) -> Entry:
    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values = {name: row[_JSON_NAMES.get(name, name)] for name in names if _JSON_NAMES.get(name, name) in row}
    return kind(**values)


__all__ = [
    "SCHEMA_VERSION", "FindingEntry", "Hotspot", "PlanEntry", "RejectedEntry", "Report", "ScalingPoint",
]  # fmt: skip
