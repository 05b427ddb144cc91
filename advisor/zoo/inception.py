"""Inception v3 (Szegedy et al. 2015) with its auxiliary classifier, on 299 x 299 images."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network

_SIDE, _AUXILIARY_WEIGHT = 299, 0.4
Kernel = int | tuple[int, int]


class Convolution(nn.Sequential):
    """Convolution, batch norm and ReLU; padded so that stride 1 keeps the side, unless told otherwise."""

    def __init__(self, channels_in: int, channels: int, kernel: Kernel, *, stride: int = 1, padded: bool = True) -> None:
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (sides[0] // 2, sides[1] // 2) if padded else 0
        super().__init__(
            nn.Conv2d(channels_in, channels, sides, stride, padding, bias=False), nn.BatchNorm2d(channels, 0.001), nn.ReLU(inplace=True)
        )


def chain(channels: int, *layers: tuple[int, Kernel]) -> nn.Sequential:
    """Convolutions after each other, each with its channels and kernel."""
    made = []
    for width, kernel in layers:
        made.append(Convolution(channels, width, kernel))
        channels = width
    return nn.Sequential(*made)


class Branches(nn.Module):
    """Branches side by side, whose channels are joined; a pooled branch is given as the last one."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _pooled(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), Convolution(channels, width, 1))


def _level_35(channels: int, pooled: int) -> Branches:
    return Branches(
        chain(channels, (64, 1)), chain(channels, (48, 1), (64, 5)), chain(channels, (64, 1), (96, 3), (96, 3)), _pooled(channels, pooled)
    )


def _level_17(width: int) -> Branches:
    long = chain(768, (width, 1), (width, (7, 1)), (width, (1, 7)), (width, (7, 1)), (192, (1, 7)))
    return Branches(chain(768, (192, 1)), chain(768, (width, 1), (width, (1, 7)), (192, (7, 1))), long, _pooled(768, 192))


def _level_8(channels: int) -> Branches:
    def fork() -> Branches:
        return Branches(chain(384, (384, (1, 3))), chain(384, (384, (3, 1))))

    return Branches(
        chain(channels, (320, 1)), nn.Sequential(*chain(channels, (384, 1)), fork()), nn.Sequential(*chain(channels, (448, 1), (384, 3)), fork()),
        _pooled(channels, 192),
    )  # fmt: skip


def _halved(channels: int, layers: list[tuple[tuple[int, Kernel], ...]], widths: list[int]) -> Branches:
    """Branches that end in a 3 x 3 convolution of stride 2, and a maximum."""
    branches = []
    for before, width in zip(layers, widths, strict=True):
        last = Convolution(before[-1][0] if before else channels, width, 3, stride=2, padded=False)
        branches.append(nn.Sequential(*chain(channels, *before), last))
    return Branches(*branches, nn.MaxPool2d(3, 2))


class InceptionV3(nn.Module):
    """Stem, blocks at sides 35, 17 and 8, classifier; and a second classifier on the 17 x 17 map. Returns both scores."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            Convolution(3, 32, 3, stride=2, padded=False), Convolution(32, 32, 3, padded=False), Convolution(32, 64, 3), nn.MaxPool2d(3, 2),
            Convolution(64, 80, 1), Convolution(80, 192, 3, padded=False), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.early = nn.Sequential(
            _level_35(192, 32), _level_35(256, 64), _level_35(288, 64), _halved(288, [(), ((64, 1), (96, 3))], [384, 96]),
            _level_17(128), _level_17(160), _level_17(160), _level_17(192),
        )  # fmt: skip
        self.auxiliary = nn.Sequential(
            nn.AvgPool2d(5, 3), Convolution(768, 128, 1), Convolution(128, 768, 5, padded=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(768, 1000),
        )  # fmt: skip
        self.late = nn.Sequential(
            _halved(768, [((192, 1),), ((192, 1), (192, (1, 7)), (192, (7, 1)))], [320, 192]), _level_8(1280), _level_8(2048),
            nn.AdaptiveAvgPool2d(1), nn.Dropout(), nn.Flatten(), nn.Linear(2048, 1000),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.early(self.stem(images))
        return self.late(x), self.auxiliary(x)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of both classifiers."""
    images, labels = batch
    scores, auxiliary = model(images)
    return functional.cross_entropy(scores.float(), labels) + _AUXILIARY_WEIGHT * functional.cross_entropy(auxiliary.float(), labels)


def network(_name: str, _seq_len: int = 0) -> Network:
    """A classifier of ImageNet."""

    def make_batch(batch_size: int) -> Batch:
        return torch.empty(batch_size, 3, _SIDE, _SIDE), torch.zeros(batch_size, dtype=torch.int64)

    return Network(build_model=InceptionV3, make_batch=make_batch, loss_fn=loss, optimizer="rmsprop")
