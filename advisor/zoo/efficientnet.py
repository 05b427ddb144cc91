"""EfficientNet (Tan and Le 2019) and EfficientNetV2 (2021): inverted residual blocks with squeeze-and-excitation."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Network, classifier


class Stage(NamedTuple):
    """Equal blocks; the first one has the stride and changes the channels."""

    expansion: int
    kernel: int
    stride: int
    channels: int
    blocks: int
    fused: bool = False  # one full convolution in place of expansion and depthwise convolution, no excitation
    wide_excitation: bool = False  # squeezed to a quarter of the expanded channels, not of the block's


_B0 = (
    Stage(1, 3, 1, 16, 1), Stage(6, 3, 2, 24, 2), Stage(6, 5, 2, 40, 2), Stage(6, 3, 2, 80, 3), Stage(6, 5, 1, 112, 3),
    Stage(6, 5, 2, 192, 4), Stage(6, 3, 1, 320, 1),
)  # fmt: skip
#: Width and depth multipliers and image side of B0 to B7.
_SCALES = {
    "b0": (1.0, 1.0, 224), "b1": (1.0, 1.1, 240), "b2": (1.1, 1.2, 260), "b3": (1.2, 1.4, 300), "b4": (1.4, 1.8, 380), "b5": (1.6, 2.2, 456),
    "b6": (1.8, 2.6, 528), "b7": (2.0, 3.1, 600),
}  # fmt: skip
_V2 = {
    "v2-s": (
        Stage(1, 3, 1, 24, 2, True), Stage(4, 3, 2, 48, 4, True), Stage(4, 3, 2, 64, 4, True), Stage(4, 3, 2, 128, 6), Stage(6, 3, 1, 160, 9),
        Stage(6, 3, 2, 256, 15),
    ),
    "v2-m": (
        Stage(1, 3, 1, 24, 3, True), Stage(4, 3, 2, 48, 5, True), Stage(4, 3, 2, 80, 5, True), Stage(4, 3, 2, 160, 7), Stage(6, 3, 1, 176, 14),
        Stage(6, 3, 2, 304, 18), Stage(6, 3, 1, 512, 5),
    ),
}  # fmt: skip
_WIDE = "widese-"
#: Image side that the second version is trained with last; its training grows images up to this side.
_V2_SIDES = {"v2-s": 300, "v2-m": 380}


def rounded(channels: float) -> int:
    """The nearest multiple of 8, but no less than 90% of the number."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels else near


class Excitation(nn.Module):
    """Channels scaled by what their means say."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze, self.expand = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.expand(functional.silu(self.squeeze(x.mean((2, 3), keepdim=True)))))


def convolution(channels_in: int, channels: int, kernel: int, stride: int = 1, groups: int = 1, *, active: bool = True) -> nn.Sequential:
    """Convolution, batch norm and, unless told otherwise, SiLU."""
    layers: list[nn.Module] = [nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, groups=groups, bias=False)]
    layers.append(nn.BatchNorm2d(channels))
    return nn.Sequential(*layers, nn.SiLU(inplace=True)) if active else nn.Sequential(*layers)


class Block(nn.Module):
    """Inverted residual block."""

    def __init__(self, channels_in: int, channels: int, stage: Stage, stride: int) -> None:
        super().__init__()
        wide, kernel = channels_in * stage.expansion, stage.kernel
        layers: list[nn.Module] = []
        if stage.fused and stage.expansion == 1:
            layers.append(convolution(channels_in, channels, kernel, stride))
        elif stage.fused:
            layers += [convolution(channels_in, wide, kernel, stride), convolution(wide, channels, 1, active=False)]
        else:
            if stage.expansion > 1:
                layers.append(convolution(channels_in, wide, 1))
            layers += [
                convolution(wide, wide, kernel, stride, groups=wide),
                Excitation(wide, max(1, (wide if stage.wide_excitation else channels_in) // 4)),
            ]
            layers.append(convolution(wide, channels, 1, active=False))
        self.layers = nn.Sequential(*layers)
        self.is_residual = stride == 1 and channels_in == channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + x if self.is_residual else self.layers(x)


class EfficientNet(nn.Module):
    """Stem, stages of blocks, a last 1 x 1 convolution, average and classifier."""

    def __init__(self, stem: int, stages: tuple[Stage, ...], last: int, dropout: float) -> None:
        super().__init__()
        self.stem, channels = convolution(3, stem, 3, 2), stem
        self.stages = nn.ModuleList()
        for stage in stages:
            blocks = []
            for i in range(stage.blocks):
                blocks.append(Block(channels, stage.channels, stage, 1 if i else stage.stride))
                channels = stage.channels
            self.stages.append(nn.Sequential(*blocks))
        self.last = convolution(channels, last, 1)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.last(x).mean((2, 3)))


def build(variant: str) -> EfficientNet:
    """An EfficientNet by its variant: b0 to b7, with "widese-" before for NVIDIA's wide excitation, v2-s, v2-m."""
    if variant in _V2:
        return EfficientNet(24, _V2[variant], 1280, 0.2)
    is_wide, (width, depth, _) = variant.startswith(_WIDE), _SCALES[variant.removeprefix(_WIDE)]
    stages = tuple(
        s._replace(channels=rounded(s.channels * width), blocks=math.ceil(s.blocks * depth), wide_excitation=is_wide) for s in _B0
    )
    return EfficientNet(rounded(32 * width), stages, rounded(1280 * width), 0.2)


def network(name: str, _seq_len: int = 0) -> Network:
    """A classifier of images of the side that its authors used, trained with RMSProp as they did."""
    variant = name.removeprefix("efficientnet-")
    side = _V2_SIDES.get(variant) or _SCALES[variant.removeprefix(_WIDE)][2]
    return classifier(lambda: build(variant), side=side, optimizer="rmsprop")
