"""VGG16 (Simonyan and Zisserman 2014), MobileNetV2 (Sandler et al. 2018) and V3 (Howard et al. 2019), DenseNet-121 (Huang et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.efficientnet import rounded
from advisor.zoo.network import Network, classifier

_VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


def vgg16() -> nn.Module:
    """Five stages of 3 x 3 convolutions, each halved by a maximum, and three dense layers."""
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in _VGG16:
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    dense = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Flatten(), *dense, nn.Linear(4096, 1000))


class Inverted(NamedTuple):
    """An inverted residual block: kernel, widened and final channels, stride, whether it is excited, its activation."""

    kernel: int
    wide: int
    channels: int
    stride: int
    excited: bool = False
    activation: type[nn.Module] = nn.ReLU6


def _convolution(
    channels_in: int, channels: int, kernel: int, stride: int, activation: type[nn.Module] | None, *, groups: int = 1
) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, groups=groups, bias=False)]
    layers.append(nn.BatchNorm2d(channels))
    return layers if activation is None else [*layers, activation(inplace=True)]


class HardExcitation(nn.Module):
    """Squeeze-and-excitation with a piecewise linear gate."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = rounded(channels / 4)
        self.squeeze, self.expand = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * functional.hardsigmoid(self.expand(functional.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))


class InvertedBlock(nn.Module):
    """1 x 1 to more channels, depthwise, 1 x 1 to fewer."""

    def __init__(self, channels_in: int, block: Inverted) -> None:
        super().__init__()
        layers = _convolution(channels_in, block.wide, 1, 1, block.activation) if block.wide != channels_in else []
        layers += _convolution(block.wide, block.wide, block.kernel, block.stride, block.activation, groups=block.wide)
        layers += [HardExcitation(block.wide)] if block.excited else []
        self.layers = nn.Sequential(*layers, *_convolution(block.wide, block.channels, 1, 1, None))
        self.is_residual = block.stride == 1 and block.channels == channels_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.is_residual else self.layers(x)


def _inverted(stem: int, activation: type[nn.Module], blocks: list[Inverted], last: int, head: list[nn.Module]) -> nn.Module:
    layers, channels = _convolution(3, stem, 3, 2, activation), stem
    for block in blocks:
        layers.append(InvertedBlock(channels, block))
        channels = block.channels
    return nn.Sequential(*layers, *_convolution(channels, last, 1, 1, activation), nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head)


def mobilenet_v2() -> nn.Module:
    """MobileNetV2 of width 1."""
    blocks, channels = [], 32
    for expansion, width, depth, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for i in range(depth):
            blocks.append(Inverted(3, expansion * channels, width, 1 if i else stride))
            channels = width
    return _inverted(32, nn.ReLU6, blocks, 1280, [nn.Dropout(0.2), nn.Linear(1280, 1000)])


def mobilenet_v3_large() -> nn.Module:
    """MobileNetV3-Large of width 1."""
    re, hs = nn.ReLU, nn.Hardswish
    blocks = [
        Inverted(3, 16, 16, 1, False, re), Inverted(3, 64, 24, 2, False, re), Inverted(3, 72, 24, 1, False, re), Inverted(5, 72, 40, 2, True, re),
        Inverted(5, 120, 40, 1, True, re), Inverted(5, 120, 40, 1, True, re), Inverted(3, 240, 80, 2, False, hs), Inverted(3, 200, 80, 1, False, hs),
        Inverted(3, 184, 80, 1, False, hs), Inverted(3, 184, 80, 1, False, hs), Inverted(3, 480, 112, 1, True, hs), Inverted(3, 672, 112, 1, True, hs),
        Inverted(5, 672, 160, 2, True, hs), Inverted(5, 960, 160, 1, True, hs), Inverted(5, 960, 160, 1, True, hs),
    ]  # fmt: skip
    return _inverted(16, hs, blocks, 960, [nn.Linear(960, 1280), hs(inplace=True), nn.Dropout(0.2), nn.Linear(1280, 1000)])


class DenseLayer(nn.Module):
    """Adds `growth` channels to all that came before in its stage."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(inplace=True), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, self.layers(x)), 1)


def densenet121(growth: int = 32) -> nn.Module:
    """Four stages of 6, 12, 24 and 16 dense layers, halved in between."""
    layers: list[nn.Module] = [*_stem(64)]
    channels = 64
    for i, depth in enumerate((6, 12, 24, 16)):
        if i:
            layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(depth):
            layers.append(DenseLayer(channels, growth))
            channels += growth
    layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return nn.Sequential(*layers)


def _stem(width: int) -> list[nn.Module]:
    return [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]


_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "vgg16": vgg16, "mobilenet-v2": mobilenet_v2, "mobilenet-v3-large": mobilenet_v3_large, "densenet121": densenet121,
}  # fmt: skip


def network(name: str, _seq_len: int = 0) -> Network:
    """A classifier of 224 x 224 images."""
    optimizer = "rmsprop" if name.startswith("mobilenet") else "sgd-momentum"
    return classifier(_BUILDERS[name], side=224, optimizer=optimizer)
