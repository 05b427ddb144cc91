"""Vision transformers: ViT (Dosovitskiy et al. 2020), of which DeiT (Touvron et al. 2020) has the smaller sizes: patches of 16 x 16, or as named."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Network, classifier


class Size(NamedTuple):
    """Heads are 64 wide, 80 of the huge one; the feed-forward is four times as wide as the model."""

    layers: int
    hidden: int


_SIZES = {"tiny": Size(12, 192), "small": Size(12, 384), "base": Size(12, 768), "large": Size(24, 1024), "huge": Size(32, 1280)}
_HEAD, _SIDE = 64, 224


class Block(nn.Module):
    """Attention and feed-forward, each after a norm.

    Args:
        hidden: width.
        head: width of a head.
        causal: whether a position sees only earlier ones.
        fast_gelu: the sigmoid form of GELU.
    """

    def __init__(self, hidden: int, head: int = _HEAD, *, causal: bool = False, fast_gelu: bool = False) -> None:
        super().__init__()
        self.head, self.causal, self.fast_gelu = head, causal, fast_gelu
        self.norm1, self.projection, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.norm2, self.up, self.down = nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (t.view(*t.shape[:2], -1, self.head).transpose(1, 2) for t in self.projection(self.norm1(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        wide = self.up(self.norm2(x))
        return x + self.down(wide * torch.sigmoid(1.702 * wide) if self.fast_gelu else functional.gelu(wide))


class ViT(nn.Module):
    """Patches, a class token, learned positions, blocks and a classifier."""

    def __init__(self, size: Size, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size.hidden, patch, patch)
        self.token = nn.Parameter(torch.empty(1, 1, size.hidden))
        self.positions = nn.Parameter(torch.empty(1, (_SIDE // patch) ** 2 + 1, size.hidden))
        self.blocks = nn.ModuleList(Block(size.hidden, 80 if size.hidden == 1280 else _HEAD) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def network(name: str, _seq_len: int = 0) -> Network:
    """A classifier of 224 x 224 images."""
    _, size, patch = name.split("-")
    return classifier(lambda: ViT(_SIZES[size], int(patch)), side=_SIDE, optimizer="adamw")
