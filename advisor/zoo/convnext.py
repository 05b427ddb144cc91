"""ConvNeXt (Liu et al. 2022): depthwise 7 x 7 convolutions, layer norm over channels and a feed-forward per pixel."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Network, classifier

#: Blocks and widths of the stages.
_SIZES = {
    "tiny": ((3, 3, 9, 3), (96, 192, 384, 768)), "small": ((3, 3, 27, 3), (96, 192, 384, 768)), "base": ((3, 3, 27, 3), (128, 256, 512, 1024)),
    "large": ((3, 3, 27, 3), (192, 384, 768, 1536)),
}  # fmt: skip


class PixelNorm(nn.LayerNorm):
    """Layer norm over the channels of images."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """Depthwise convolution, norm, four times as many channels and back, scaled per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down, self.scale = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Parameter(torch.empty(width, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.scale * self.down(functional.gelu(self.up(y))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Patches of 4 x 4, four stages with halving in between, average and classifier."""

    def __init__(self, depths: tuple[int, ...], widths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 4, 4), PixelNorm(widths[0], eps=1e-6))
        self.stages = nn.ModuleList()
        for i, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            halved = [PixelNorm(widths[i - 1], eps=1e-6), nn.Conv2d(widths[i - 1], width, 2, 2)] if i else []
            self.stages.append(nn.Sequential(*halved, *(Block(width) for _ in range(depth))))
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x.mean((2, 3))))


def network(name: str, _seq_len: int = 0) -> Network:
    """A classifier of 224 x 224 images."""
    depths, widths = _SIZES[name.rpartition("-")[2]]
    return classifier(lambda: ConvNeXt(depths, widths), side=224, optimizer="adamw")
