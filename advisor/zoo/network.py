"""What a family of the zoo says of one network: the functions that a user's script would declare, and what was presumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """One network with its loss and a batch of inputs."""

    build_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]  # number of samples -> inputs and targets, on the host
    loss_fn: Callable[[nn.Module, Batch], torch.Tensor]
    optimizer: str = "sgd-momentum"  # of its authors' recipe; one of advisor.workload.precision.OPTIMIZERS
    assumed: tuple[str, ...] = ()  # sizes that its name does not settle
    units_per_sample: float = 1.0  # what its published throughput counts: 1 image, so many tokens
    unit: str = "images"  # images, tokens or samples
    cuts_all_stacks: bool = False  # pipelines of it cut every stack of equal blocks, not only the largest
    usual_batch: int = 256  # samples of a step on one GPU with memory enough, by its authors' recipe or the reference's
    shares_batch: bool = False  # the recipe's batch is that of all GPUs together
    accumulates: bool = False  # steps of about two million tokens are made up of micro-batches
    counted: tuple[tuple[str, float], ...] = ()  # other units that tables of its throughput count, and how many a sample has
    repeats: tuple[tuple[str, int], ...] = ()  # layer groups that really run so many times as often as they are traced


def classify_images(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of class scores."""
    images, labels = batch
    return functional.cross_entropy(model(images).float(), labels)


def classifier(build: Callable[[], nn.Module], *, side: int, optimizer: str = "sgd-momentum") -> Network:
    """A network that classifies square RGB images of `side` pixels into ImageNet's classes."""

    def make_batch(batch_size: int) -> Batch:
        return torch.empty(batch_size, 3, side, side), torch.zeros(batch_size, dtype=torch.int64)

    return Network(build_model=build, make_batch=make_batch, loss_fn=classify_images, optimizer=optimizer)
