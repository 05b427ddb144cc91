"""Networks of published tables that can be priced without a script: ResNet-50 by arithmetic alone, the rest by tracing the zoo's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from advisor.zoo.names import find_network
from advisor.zoo.workload import zoo_network, zoo_workload
from cost_models.convnet import resnet50_workload
from cost_models.types import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNetwork:
    """A network and how tables of its runs are to be read."""

    workload: Workload
    assumed: tuple[str, ...] = ()  # what its name doesn't settle
    usual_batch: int = 256  # samples of a step on one GPU with memory enough
    shares_batch: bool = False  # that batch is of all GPUs together
    accumulates: bool = False  # larger steps are made up of micro-batches
    counted: Mapping[str, float] = field(default_factory=dict)  # units that its tables may count, and how many a sample has

    def units_per_sample(self, notes: str) -> float:
        """How many of the units in which a row counts its throughput ("unit mels/s") a sample has; 1 where it counts samples."""
        unit = next((part.split()[1].lower() for part in notes.split(";") if part.split()[:1] == ["unit"] and len(part.split()) > 1), "")
        return next((number for name, number in self.counted.items() if name in unit), 1.0)


def known_network(name: str, precision: str, seq_len: int = 0) -> KnownNetwork | None:
    """A network by its name in a table; None where nobody knows it.

    Args:
        name: however it is spelled.
        precision: as in `resnet50_workload`.
        seq_len: tokens of a sample as the table states them; 0: not stated.
    """
    network = find_network(name)
    if network is None:
        return None
    if network == "resnet50" and precision not in ("fp8", "fp4"):
        return KnownNetwork(workload=resnet50_workload(precision=precision, name=name))
    facts = zoo_network(network, seq_len)
    return KnownNetwork(
        workload=zoo_workload(network, precision, seq_len), assumed=facts.assumed, usual_batch=facts.usual_batch, shares_batch=facts.shares_batch,
        accumulates=facts.accumulates, counted=dict(facts.counted),
    )  # fmt: skip
