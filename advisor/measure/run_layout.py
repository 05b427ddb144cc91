"""Layout and recomputation of a row that leaves them open: what fits the device's memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from advisor.measure.run_values import Fields, Skip
from cost_models import estimate
from cost_models.terms.memory import memory_costs_rows
from cost_models.traits import Runtime
from cost_models.types import Cluster, Plan, PlanTable, Workload

_MICRO_BATCHES = (1, 2, 4)
_DEGREES = tuple(2**i for i in range(11))

Choice = dict[str, str | int]
PlanOf = Callable[[Fields], Plan]


@dataclass(slots=True, kw_only=True)
class ReadRow:
    """One row as read."""

    position: int = 0  # in the table
    row: Fields
    workload: Workload
    cluster: Cluster
    plan: Plan
    states_batch: bool
    runtime: Runtime
    plan_of: PlanOf  # plan of a row with more of its fields filled in
    is_transformer: bool  # by its sizes; else a network by its name
    units_per_sample: float = 1.0  # of the unit in which the row counts throughput

    @property
    def assumed(self) -> tuple[str, ...]:
        """Fields that got a default, each once."""
        return tuple(dict.fromkeys(self.row.assumed))


def fill_open(rows: Sequence[ReadRow]) -> None:
    """Fill in what rows leave open of layout and recomputation, where they would not fit their devices with the plain defaults.

    Blank tensor and pipeline degrees: the fastest layout that fits, with the recomputation and micro-batch that it needs where these
    are blank too. Blank recomputation alone: the fastest of the runtime's `presumed_recompute` that fits. Where nothing fits, what needs
    least: the run did, somehow. What was filled in is named in the row's `assumed`.
    Ignored: offloaded activations.
    """
    are_open = [r for r in rows if r.is_transformer and (not r.row.text("activation_ckpt") or _any_layout(r.row))]
    if not are_open:
        return
    plans = PlanTable.from_plans([r.plan for r in are_open])
    peak_bytes = memory_costs_rows([r.workload for r in are_open], [r.cluster for r in are_open], plans).peak
    for read, peak in zip(are_open, peak_bytes, strict=True):
        if peak > read.cluster.device.memory_bytes:
            _fill(read)


def _any_layout(row: Fields) -> bool:
    return not row.text("tp") and not row.text("pp")


def _fill(read: ReadRow) -> None:
    choices, plans = [], []
    for choice in _choices(read):
        with contextlib.suppress(Skip):
            plans.append(read.plan_of(Fields({**read.row.record, **choice})))
            choices.append(choice)
    found = estimate(read.workload, read.cluster, PlanTable.from_plans(plans))
    fits = found.peak_memory_bytes <= read.cluster.device.memory_bytes
    best = int(np.argmin(np.where(fits, found.step_time_s, np.inf) if fits.any() else found.peak_memory_bytes))
    replaced = (*choices[best], "tp,")
    read.row.assumed = [name for name in read.row.assumed if name.split(" ")[0] not in replaced]
    read.row.assumed += [f"{name} = {value}" for name, value in choices[best].items()]
    read.plan = plans[best]


def _choices(read: ReadRow) -> Iterator[Choice]:
    """Values of the open fields, the plain defaults first."""
    row = read.row
    any_layout, any_batch = _any_layout(row), not row.text("micro_batch") and bool(row.text("global_batch"))
    recompute: list[Choice] = (
        [{}] if row.text("activation_ckpt") else [{"activation_ckpt": mode} for mode in read.runtime.presumed_recompute]
    )
    micro: list[Choice] = [{"micro_batch": n} for n in _MICRO_BATCHES] if any_layout and any_batch else [{}]
    layouts: list[Choice] = list(_layouts(read.workload, read.cluster)) if any_layout else [{}]
    for layout, samples, mode in itertools.product(layouts, micro, recompute):
        yield layout | samples | mode


def _layouts(workload: Workload, cluster: Cluster) -> Iterator[Choice]:
    """Tensor degrees in a node, pipelines of equal stages."""
    num_layers = max(group.num_repeats for group in workload.groups)
    for tp, pp in itertools.product(_DEGREES, _DEGREES):
        if tp <= cluster.gpus_per_node and workload.num_heads % tp == 0 and num_layers % pp == 0:
            yield {"tp": tp, "pp": pp}
