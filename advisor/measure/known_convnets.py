"""Convolutional networks of published tables that the cost models can build without a script."""

from __future__ import annotations

from cost_models.convnet import resnet50_workload
from cost_models.types import Workload


def convnet_workload(name: str, precision: str) -> Workload | None:
    """Workload of a network by its name in a table; None where there is none."""
    if name.lower().replace("-", "").startswith("resnet50"):
        return resnet50_workload(precision=precision, name=name)
    return None
