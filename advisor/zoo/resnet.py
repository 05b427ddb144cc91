"""ResNet (He et al. 2015; stride on the 3 x 3 convolution), ResNeXt (Xie et al. 2016) and their squeeze-and-excitation form (Hu et al. 2017)."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Network, classifier

#: Blocks per stage; whether blocks are bottlenecks; groups, width per group and reduction of the excitation (0: none).
_VARIANTS: dict[str, tuple[tuple[int, ...], bool, int, int, int]] = {
    "resnet18": ((2, 2, 2, 2), False, 1, 64, 0),
    "resnet34": ((3, 4, 6, 3), False, 1, 64, 0),
    "resnet50": ((3, 4, 6, 3), True, 1, 64, 0),
    "resnet101": ((3, 4, 23, 3), True, 1, 64, 0),
    "resnet152": ((3, 8, 36, 3), True, 1, 64, 0),
    "wide-resnet50-2": ((3, 4, 6, 3), True, 1, 128, 0),
    "wide-resnet101-2": ((3, 4, 23, 3), True, 1, 128, 0),
    "resnext50-32x4d": ((3, 4, 6, 3), True, 32, 4, 0),
    "resnext101-32x4d": ((3, 4, 23, 3), True, 32, 4, 0),
    "resnext101-32x8d": ((3, 4, 23, 3), True, 32, 8, 0),
    "resnext101-64x4d": ((3, 4, 23, 3), True, 64, 4, 0),
    "se-resnet50": ((3, 4, 6, 3), True, 1, 64, 16),
    "se-resnext50-32x4d": ((3, 4, 6, 3), True, 32, 4, 16),
    "se-resnext101-32x4d": ((3, 4, 23, 3), True, 32, 4, 16),
}
STAGE_WIDTHS = (64, 128, 256, 512)


class SqueezeExcitation(nn.Module):
    """Channels scaled by what their means say."""

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        self.squeeze, self.expand = nn.Linear(channels, channels // reduction), nn.Linear(channels // reduction, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.sigmoid(self.expand(functional.relu(self.squeeze(x.mean((2, 3))))))
        return x * scale[:, :, None, None]


class Block(nn.Module):
    """Residual block: two 3 x 3 convolutions, or the bottleneck of 1 x 1, 3 x 3 and 1 x 1 to four times the width."""

    def __init__(
        self, channels_in: int, width: int, stride: int, *, bottleneck: bool, groups: int, group_width: int, reduction: int
    ) -> None:
        super().__init__()
        channels = 4 * width if bottleneck else width
        if bottleneck:
            inner = width * group_width * groups // 64
            shapes = [(channels_in, inner, 1, 1, 1), (inner, inner, 3, stride, groups), (inner, channels, 1, 1, 1)]
        else:
            shapes = [(channels_in, width, 3, stride, 1), (width, width, 3, 1, 1)]
        self.convs = nn.ModuleList(nn.Conv2d(i, o, k, s, k // 2, groups=g, bias=False) for i, o, k, s, g in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, *_ in shapes)
        self.excitation = SqueezeExcitation(channels, reduction) if reduction else nn.Identity()
        self.shortcut = nn.Sequential()
        if stride > 1 or channels_in != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            if i + 1 < len(self.convs):
                y = functional.relu(y, inplace=True)
        y = self.excitation(y)
        y += self.shortcut(x)
        return functional.relu(y, inplace=True)


class ResNet(nn.Module):
    """Stem, four stages of blocks, average and classifier.

    Args:
        name: one of this family's.
        num_classes: of the classifier.
    """

    def __init__(self, name: str, num_classes: int = 1000) -> None:
        super().__init__()
        blocks, bottleneck, groups, group_width, reduction = _VARIANTS[name]
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        self.stages, channels = nn.ModuleList(), 64
        make = partial(Block, bottleneck=bottleneck, groups=groups, group_width=group_width, reduction=reduction)
        for i, (num, width) in enumerate(zip(blocks, STAGE_WIDTHS, strict=True)):
            out = 4 * width if bottleneck else width
            first = make(channels, width, 2 if i else 1)
            self.stages.append(nn.Sequential(first, *(make(out, width, 1) for _ in range(num - 1))))
            channels = out
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def network(name: str, _seq_len: int = 0) -> Network:
    """A classifier of 224 x 224 images."""
    return classifier(lambda: ResNet(name), side=224)
