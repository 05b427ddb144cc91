"""Networks of published tables that can be priced without a script: ResNet-50 by arithmetic alone, the rest by tracing the zoo's."""

from __future__ import annotations

from advisor.zoo.names import find_network
from advisor.zoo.workload import presumed, zoo_workload
from cost_models.convnet import resnet50_workload
from cost_models.types import Workload


def network_workload(name: str, precision: str, seq_len: int = 0) -> tuple[Workload, tuple[str, ...]] | None:
    """Workload of a network by its name in a table, and what the name doesn't settle; None where nobody knows the network.

    Args:
        name: however it is spelled.
        precision: as in `resnet50_workload`.
        seq_len: tokens of a sample as the table states them; 0: not stated.
    """
    network = find_network(name)
    if network is None:
        return None
    if network == "resnet50" and precision not in ("fp8", "fp4"):
        return resnet50_workload(precision=precision, name=name), ()
    return zoo_workload(network, precision, seq_len), presumed(network, seq_len)
