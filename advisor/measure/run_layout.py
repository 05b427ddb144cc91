"""Layout and recomputation of a row that leaves them open: what fits the device's memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from advisor.measure.run_values import Fields, Skip
from cost_models.terms.memory import memory_costs, memory_costs_rows
from cost_models.traits import Runtime
from cost_models.types import Cluster, Plan, PlanTable, Workload

_SHARDS_PARAMETERS = 3
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

    Blank tensor and pipeline degrees become the smallest that fit, tensor ranks within a node first, then pipeline stages (Narayanan et
    al. 2021, section 3.4); blank recomputation the least of the runtime's `presumed_recompute` that fits, after larger degrees. Where nothing
    fits, what needs least memory: the run did, somehow. A micro-batch that isn't stated is then one sample. What was filled in is named in the row's `assumed`.
    Ignored: offloaded activations.
    """
    are_open = [r for r in rows if r.is_transformer and (not r.row.text("activation_ckpt") or _any_layout(r))]
    if not are_open:
        return
    plans = PlanTable.from_plans([r.plan for r in are_open])
    peak_bytes = memory_costs_rows([r.workload for r in are_open], [r.cluster for r in are_open], plans).peak
    for read, peak in zip(are_open, peak_bytes, strict=True):
        if peak > read.cluster.device.memory_bytes:
            _fill(read)


def _any_layout(read: ReadRow) -> bool:
    """Neither degree is stated, and parameters are whole on each rank: sharded ones (ZeRO-3) need no such division."""
    return not read.row.text("tp") and not read.row.text("pp") and read.plan.zero_stage < _SHARDS_PARAMETERS


def _fill(read: ReadRow) -> None:
    choices, plans = [], []
    for choice in _choices(read):
        with contextlib.suppress(Skip):
            plans.append(read.plan_of(Fields({**read.row.record, **choice})))
            choices.append(choice)
    peak_bytes = memory_costs(read.workload, read.cluster, PlanTable.from_plans(plans)).peak
    fits = peak_bytes <= read.cluster.device.memory_bytes
    best = int(np.argmax(fits) if fits.any() else np.argmin(peak_bytes))
    replaced = (*choices[best], "tp,")
    read.row.assumed = [name for name in read.row.assumed if name.split(" ")[0] not in replaced]
    read.row.assumed += [f"{name} = {value}" for name, value in choices[best].items()]
    read.plan = plans[best]


def _choices(read: ReadRow) -> Iterator[Choice]:
    """Values of the open fields, the plain defaults first."""
    row, any_layout = read.row, _any_layout(read)
    one_sample: Choice = {"micro_batch": 1} if any_layout and not row.text("micro_batch") and row.text("global_batch") else {}
    recompute: list[Choice] = (
        [{"activation_ckpt": mode} for mode in read.runtime.presumed_recompute] if not row.text("activation_ckpt") else [{}]
    )
    layouts: list[Choice] = list(_layouts(read.workload, read.cluster)) if any_layout else [{}]
    for mode, layout in itertools.product(recompute, layouts):
        yield layout | one_sample | mode


def _layouts(workload: Workload, cluster: Cluster) -> Iterator[Choice]:
    """Tensor degrees up to a node's, then with the largest of them pipelines of equal stages."""
    num_layers = max(group.num_repeats for group in workload.groups)
    tensor = [n for n in _DEGREES if n <= cluster.gpus_per_node and workload.num_heads % n == 0]
    for tp in tensor:
        yield {"tp": tp, "pp": 1}
    for pp in _DEGREES[1:]:
        if num_layers % pp == 0:
            yield {"tp": tensor[-1], "pp": pp}
