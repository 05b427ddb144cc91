"""Swin Transformer (Liu et al. 2021): attention in windows of 7 x 7 patches, shifted in every other block."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Network, classifier

#: Blocks of the stages and width of the first one.
_SIZES = {"tiny": ((2, 2, 6, 2), 96), "small": ((2, 2, 18, 2), 96), "base": ((2, 2, 18, 2), 128), "large": ((2, 2, 18, 2), 192)}
_HEAD, _WINDOW, _PATCH, _SIDE = 32, 7, 4, 224


class WindowAttention(nn.Module):
    """Attention inside each window, with a learned bias per distance."""

    index: torch.Tensor
    mask: torch.Tensor

    def __init__(self, width: int, side: int, shift: int) -> None:
        super().__init__()
        area = _WINDOW**2
        self.heads, self.shift, self.windows = width // _HEAD, shift, side // _WINDOW
        self.projection, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.biases = nn.Parameter(torch.empty((2 * _WINDOW - 1) ** 2, self.heads))
        self.register_buffer("index", torch.zeros(area * area, dtype=torch.int64))
        if shift:
            self.register_buffer("mask", torch.empty(self.windows**2, 1, area, area))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, side = x.shape[0], x.shape[1]
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.view(batch, self.windows, _WINDOW, self.windows, _WINDOW, -1).transpose(2, 3).reshape(-1, _WINDOW**2, x.shape[-1])
        query, key, value = (t.view(*t.shape[:2], self.heads, _HEAD).transpose(1, 2) for t in self.projection(x).chunk(3, -1))
        scores = torch.matmul(query * _HEAD**-0.5, key.transpose(-1, -2)) + self.biases[self.index].view(
            _WINDOW**2, _WINDOW**2, -1
        ).permute(2, 0, 1)
        if self.shift:
            scores = (scores.view(batch, -1, *scores.shape[1:]) + self.mask).flatten(0, 1)
        y = torch.matmul(functional.softmax(scores, -1), value).transpose(1, 2).flatten(2)
        y = self.out(y).view(batch, self.windows, self.windows, _WINDOW, _WINDOW, -1).transpose(2, 3).reshape(batch, side, side, -1)
        return torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y


class Block(nn.Module):
    """Attention in windows and feed-forward, each after a norm."""

    def __init__(self, width: int, side: int, shift: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), WindowAttention(width, side, shift)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Merging(nn.Module):
    """Four neighbours become one of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2])
        return self.reduction(self.norm(torch.cat(parts, -1)))


class Swin(nn.Module):
    """Patches, four stages with merging in between, average and classifier."""

    def __init__(self, depths: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.patches, self.patch_norm = nn.Conv2d(3, width, _PATCH, _PATCH), nn.LayerNorm(width)
        side, stages = _SIDE // _PATCH, []
        for i, depth in enumerate(depths):
            merging = [Merging(width)] if i else []
            width, side = (2 * width, side // 2) if i else (width, side)
            shift = _WINDOW // 2 if side > _WINDOW else 0
            stages.append(nn.Sequential(*merging, *(Block(width, side, shift if j % 2 else 0) for j in range(depth))))
        self.stages, self.norm, self.head = nn.ModuleList(stages), nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch_norm(self.patches(images).permute(0, 2, 3, 1))
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x).mean((1, 2)))


def network(name: str, _seq_len: int = 0) -> Network:
    """A classifier of 224 x 224 images."""
    depths, width = _SIZES[name.rpartition("-")[2]]
    return classifier(lambda: Swin(depths, width), side=_SIDE, optimizer="adamw")
