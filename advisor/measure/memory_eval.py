"""Predicted against published memory: errors, fold errors, and the fit of the memory model's constants.

A published figure is one of three (tensors allocated, memory reserved by the allocator, device memory in use) of one rank (the fullest,
the first, the last); both depend on who published it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.measure.run_memory import published_as
from advisor.measure.runs import RunTable
from cost_models.terms.memory import RawMemory, finish, raw_rows
from cost_models.terms.memory_traits import GIB, MemoryConstants, MemoryTraits, memory_traits
from cost_models.types import Cluster, FloatArray, IntArray, PlanTable, Workload

COUNTED = ("allocated", "reserved", "device")
#: Constants that figures identify, with the values tried; all others keep the shipped value.
GRID: Mapping[str, tuple[float, ...]] = {
    "reserved_factor": (1.02, 1.04, 1.06, 1.08, 1.1, 1.12, 1.14, 1.16),
    "context_bytes": (0.6 * GIB, 0.9 * GIB, 1.2 * GIB, 1.6 * GIB, 2.0 * GIB),
    "group_bytes": (0.0, 0.2 * GIB, 0.35 * GIB, 0.5 * GIB, 0.7 * GIB),
}
#: Constants that a user's own runs move, with the values tried, and how far they usually lie from the shipped ones (standard deviation of
#: the logarithm).
OWN_GRID: Mapping[str, tuple[float, ...]] = {
    "activation_scale": tuple(round(0.7 + 0.05 * i, 2) for i in range(19)),
    "reserved_factor": tuple(round(1.02 + 0.02 * i, 2) for i in range(15)),
    "context_bytes": tuple(GIB * x for x in (0.5, 0.8, 1.2, 1.6, 2.0, 3.0, 4.0)),
}
DEVIATIONS: Mapping[str, float] = {"activation_scale": 0.1, "reserved_factor": 0.05, "context_bytes": 0.4}
_USUAL_ERROR = 0.05  # of a run's figure when all constants are right
#: Values before any figure was seen, where a fit starts.
NEUTRAL: Mapping[str, float] = {"reserved_factor": 1.1, "context_bytes": 0.9 * GIB, "group_bytes": 0.35 * GIB}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRuns:
    """Runs with a published memory figure; everything is parallel."""

    workloads: tuple[Workload, ...]
    clusters: tuple[Cluster, ...]
    plans: PlanTable
    measured_bytes: FloatArray
    counted: npt.NDArray[np.str_]  # of COUNTED
    rank: npt.NDArray[np.str_]  # as in memory_costs
    source: npt.NDArray[np.str_]
    model: npt.NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.workloads)

    def take(self, index: IntArray) -> MemoryRuns:
        """Some of the runs."""
        pick = [int(i) for i in index]
        return MemoryRuns(
            workloads=tuple(self.workloads[i] for i in pick), clusters=tuple(self.clusters[i] for i in pick), plans=self.plans.take(index),
            measured_bytes=self.measured_bytes[index], counted=self.counted[index], rank=self.rank[index], source=self.source[index],
            model=self.model[index],
        )  # fmt: skip


def memory_runs(table: RunTable) -> MemoryRuns:
    """The runs of a table that have a memory figure."""
    index = np.flatnonzero(np.isfinite(table.peak_mem_gib))
    some = table.take(index)
    source, notes = some.column("source_repo_or_doc", "own").astype(str), some.column("notes").astype(str)
    published = [published_as(name, text) for name, text in zip(source, notes, strict=True)]
    return MemoryRuns(
        workloads=some.workloads, clusters=some.clusters, plans=some.plans, measured_bytes=some.peak_mem_gib * np.array([p.unit_bytes for p in published]),
        counted=np.array([p.counted for p in published], dtype=np.str_), rank=np.array([p.rank_on(c) for p, c in zip(published, some.clusters, strict=True)], dtype=np.str_),
        source=source, model=some.column("model_name").astype(str),
    )  # fmt: skip


def price_runs(
    runs: MemoryRuns, *, traits_of: Callable[[str], MemoryTraits] = memory_traits, constants: MemoryConstants | None = None
) -> RawMemory:
    """Runs priced up to the constants of allocator and driver; of `constants` only `activation_scale` counts here."""
    ranks = [str(r) for r in runs.rank]
    return raw_rows(runs.workloads, runs.clusters, runs.plans, constants or MemoryConstants(), ranks=ranks, traits_of=traits_of)


def predicted(runs: MemoryRuns, raw: RawMemory, constants: MemoryConstants) -> tuple[FloatArray, FloatArray]:
    """Bytes predicted for what each run's figure counts, and the cautious end of it."""
    costs = finish(raw, constants)
    value = np.select([runs.counted == name for name in COUNTED], [costs.allocated, costs.reserved, costs.peak], costs.peak)
    return value, value + costs.high - costs.peak


def log_errors(
    runs: MemoryRuns, constants: MemoryConstants | None = None, *, traits_of: Callable[[str], MemoryTraits] = memory_traits
) -> FloatArray:
    """Logarithm of predicted over measured."""
    raw = price_runs(runs, traits_of=traits_of, constants=constants)
    return np.log(predicted(runs, raw, constants or MemoryConstants())[0] / runs.measured_bytes)


def fit_memory_constants(
    runs: MemoryRuns, raw: RawMemory, train: npt.NDArray[np.bool_], start: Mapping[str, float] = NEUTRAL
) -> MemoryConstants:
    """Constants with the smallest mean absolute logarithmic error, each source counting alike; coordinate descent over GRID.

    Args:
        runs: figures to fit.
        raw: the same runs priced.
        train: runs that count.
        start: where to begin; a constant that no figure identifies stays there.
    """
    sources = [np.flatnonzero(train & (runs.source == s)) for s in np.unique(runs.source[train])]

    def loss(values: Mapping[str, float]) -> float:
        error = np.abs(np.log(predicted(runs, raw, MemoryConstants.from_mapping(values))[0] / runs.measured_bytes))
        return float(np.mean([error[index].mean() for index in sources]))

    constants, best = dict(start), loss(start)
    for _ in range(3):
        before = best
        for name, values in GRID.items():
            for value in values:
                now = loss(constants | {name: value})
                if now < best - 1e-6:
                    best, constants = now, constants | {name: value}
        if best == before:
            break
    return MemoryConstants.from_mapping(constants)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMemoryFit:
    """The `memory` table refitted on a user's own runs, with absolute errors (shares) before, and after on runs left out."""

    table: dict[str, float]
    error_before: FloatArray
    error_after: FloatArray


def calibrate_memory(runs: MemoryRuns, start: MemoryConstants | None = None) -> dict[str, float]:
    """The `memory` table of a calibration for a user's own runs, near the constants started from.

    Each constant pays for its distance as much as one run that is off by as many standard deviations: few runs move little.

    Args:
        runs: the user's runs with a memory figure; at least one.
        start: constants to stay near; the shipped ones by default.
    """
    return _own_fit(runs, _raws_by_scale(runs), start or MemoryConstants(), np.ones(len(runs), dtype=bool))


def cross_validated_memory(runs: MemoryRuns, start: MemoryConstants | None = None, num_folds: int = 5) -> OwnMemoryFit:
    """As `calibrate_memory`, with the error on runs that the refit had not seen; of the refit itself where there is one run."""
    start, raws = start or MemoryConstants(), _raws_by_scale(runs)
    table, number = _own_fit(runs, raws, start, np.ones(len(runs), dtype=bool)), np.arange(len(runs))
    fold = np.random.default_rng(0).permutation(number % min(num_folds, len(runs)))
    after = np.zeros(len(runs))
    for k in range(fold.max() + 1):
        values = _own_fit(runs, raws, start, fold != k) if len(runs) > 1 else table
        after[fold == k] = _own_errors(runs, raws, dataclasses.asdict(start) | values)[fold == k]
    return OwnMemoryFit(table=table, error_before=np.abs(np.expm1(log_errors(runs, start))), error_after=np.expm1(after))


def _raws_by_scale(runs: MemoryRuns) -> dict[float, RawMemory]:
    return {scale: price_runs(runs, constants=MemoryConstants(activation_scale=scale)) for scale in OWN_GRID["activation_scale"]}


def _own_errors(runs: MemoryRuns, raws: Mapping[float, RawMemory], values: Mapping[str, float]) -> FloatArray:
    """Absolute logarithmic error of each run."""
    value = predicted(runs, raws[values["activation_scale"]], MemoryConstants.from_mapping(values))[0]
    return np.asarray(np.abs(np.log(value / runs.measured_bytes)))


def _own_fit(runs: MemoryRuns, raws: Mapping[float, RawMemory], start: MemoryConstants, train: npt.NDArray[np.bool_]) -> dict[str, float]:
    shipped = dataclasses.asdict(start)

    def loss(values: Mapping[str, float]) -> float:
        error = _own_errors(runs, raws, values)[train]
        moved = sum(abs(np.log(values[name] / max(shipped[name], 1e-9))) / DEVIATIONS[name] for name in OWN_GRID)
        return float(np.minimum(error, 3 * _USUAL_ERROR).sum() / _USUAL_ERROR + moved)

    values = dict(shipped) | {"activation_scale": min(raws, key=lambda scale: abs(scale - shipped["activation_scale"]))}
    best = loss(values)
    for _ in range(3):
        for name, candidates in OWN_GRID.items():
            for candidate in candidates:
                now = loss(values | {name: candidate})
                if now < best - 1e-9:
                    best, values = now, values | {name: candidate}
    return {name: float(values[name]) for name in OWN_GRID}


def fold_errors(
    runs: MemoryRuns, groups: npt.NDArray[np.str_], *, traits_of: Callable[[str], MemoryTraits] = memory_traits,
    held_out: MemoryRuns | None = None,
) -> tuple[FloatArray, FloatArray]:  # fmt: skip
    """Logarithmic errors of the prediction and of its cautious end, each group priced by constants fitted without it.

    Args:
        runs: all figures.
        groups: name of the fold of each run: its source, or its model.
        traits_of: `documented_traits` where the fold's own runs must not have taught the runtime's habits.
        held_out: the same runs as they are known when their fold is priced, for example without their framework; None: as in `runs`.
    """
    known = price_runs(runs)
    priced = known if traits_of is memory_traits and held_out is None else price_runs(held_out or runs, traits_of=traits_of)
    error, high_error = np.zeros(len(runs)), np.zeros(len(runs))
    for group in np.unique(groups):
        inside = groups == group
        value, high = predicted(runs, priced, fit_memory_constants(runs, known, ~inside))
        error[inside] = np.log(value[inside] / runs.measured_bytes[inside])
        high_error[inside] = np.log(high[inside] / runs.measured_bytes[inside])
    return error, high_error


def summary(error: FloatArray, labels: npt.NDArray[np.str_]) -> pd.DataFrame:
    """Error per label and over all: number, median and 90th percentile of the absolute error, bias, share under by more than 5%."""

    def row(values: FloatArray) -> dict[str, float]:
        share = np.expm1(values)
        return {
            "num_runs": float(len(values)), "median": float(np.median(np.abs(share))), "p90": float(np.quantile(np.abs(share), 0.9)),
            "bias": float(np.median(share)), "under_by_5_percent": float((share < -0.05).mean()),
        }  # fmt: skip

    return pd.DataFrame({str(name): row(error[labels == name]) for name in np.unique(labels)} | {"all": row(error)}).T
