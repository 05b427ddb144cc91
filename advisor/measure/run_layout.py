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
_WIDEST, _MOST_STAGES = 8, 64  # tensor ranks and pipeline stages that are presumed

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
    al. 2021, section 3.4), and one shard of everything (ZeRO-3) for runtimes whose users don't divide layers; blank recomputation the least
    of the runtime's `presumed_recompute` that fits, after larger degrees. Where nothing fits, what needs least memory: the run did, somehow.
    A micro-batch that isn't stated is then one sample. What was filled in is named in the row's `assumed`; a row whose stated fields
    leave no other layout stays as it is.
    Ignored: offloaded activations.
    """
    are_open = [r for r in rows if r.is_transformer and (not r.row.text("activation_ckpt") or _any_layout(r) or _any_sharding(r))]
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


def _any_sharding(read: ReadRow) -> bool:
    """Nothing is said of what data ranks shard."""
    return not read.row.text("zero_stage") and not read.row.text("sharding") and read.plan.dp_degree > 1


def _fill(read: ReadRow) -> None:
    choices, plans = [], []
    for choice in _choices(read):
        with contextlib.suppress(Skip):
            plans.append(read.plan_of(Fields({**read.row.record, **choice})))
            choices.append(choice)
    if not plans:
        return
    peak_bytes = memory_costs(read.workload, read.cluster, PlanTable.from_plans(plans)).peak
    fits = peak_bytes <= read.cluster.device.memory_bytes
    best = int(np.argmax(fits) if fits.any() else np.argmin(peak_bytes))
    filled = choices[best]
    replaced = {*filled, "tp," if "tp" in filled else ""}
    read.row.assumed = [name for name in read.row.assumed if name.split(" ")[0] not in replaced]
    read.row.assumed += [f"{name} = {value}" for name, value in filled.items()]
    read.plan = plans[best]


def _choices(read: ReadRow) -> Iterator[Choice]:
    """Values of the open fields, the plain defaults first."""
    row, any_layout = read.row, _any_layout(read)
    one_sample: Choice = (
        {"micro_batch": 1} if any_layout and row.number("micro_batch") is None and row.number("global_batch") is not None else {}
    )
    modes = (*read.runtime.presumed_recompute, *(["full"] if any_layout else []))
    recompute: list[Choice] = [{"activation_ckpt": mode} for mode in dict.fromkeys(modes)] if not row.text("activation_ckpt") else [{}]
    layouts: list[Choice] = list(_layouts(read)) if any_layout else _shards(read)
    for mode, layout in itertools.product(recompute, layouts):
        yield layout | one_sample | mode


def _layouts(read: ReadRow) -> Iterator[Choice]:
    """Layouts, least divided first.

    Runtimes that divide layers: tensor degrees up to a node's, then with the largest of them pipelines of equal stages, of mixtures of experts
    with as many expert ranks as go; others, and where all that is too little, shards of everything.
    """
    workload = read.workload
    if read.runtime.divides_layers or not _any_sharding(read):
        num_layers, num_gpus = max(group.num_repeats for group in workload.groups), int(read.row.number("n_gpus") or 1)
        tensor = [n for n in _DEGREES if n <= read.cluster.gpus_per_node and n <= _WIDEST and workload.num_heads % n == 0]
        degrees = [(n, 1) for n in tensor] + [(tensor[-1], n) for n in range(2, _MOST_STAGES + 1) if num_layers % n == 0]
        for tp, pp in degrees:
            if num_gpus % (tp * pp):
                continue
            yield {"tp": tp, "pp": pp} | _experts(read, num_gpus // pp)
    if _any_sharding(read):
        yield {"tp": 1, "pp": 1, "zero_stage": _SHARDS_PARAMETERS}


def _shards(read: ReadRow) -> list[Choice]:
    """Sharding of a stated layout."""
    is_open = _any_sharding(read) and not read.runtime.divides_layers
    return [{}, {"zero_stage": _SHARDS_PARAMETERS}] if is_open else [{}]


def _experts(read: ReadRow, num_ranks: int) -> Choice:
    """The largest expert degree that a power of two allows within a stage."""
    if read.workload.num_experts <= 1 or read.row.text("ep"):
        return {}
    return {"ep": max(n for n in _DEGREES if n <= max(num_ranks, 1) and read.workload.num_experts % n == 0)}
