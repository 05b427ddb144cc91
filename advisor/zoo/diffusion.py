"""U-Nets of Stable Diffusion 1.5 (Rombach et al. 2022) and XL (Podell et al. 2023), trained to predict noise on latents of given texts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network


class Size(NamedTuple):
    """Widths of the levels, transformer blocks per level (0: no attention), width of the text and of the heads (0: eight heads)."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    text: int
    head: int
    pooled: int  # width of what is known of the whole image beside the text; 0: nothing
    side: int  # of the latents: an eighth of the image's


_SIZES = {
    "1.5": Size((320, 640, 1280, 1280), (1, 1, 1, 0), 768, 0, 0, 64),
    "xl": Size((320, 640, 1280), (0, 2, 10), 2048, 64, 2816, 128),
}  # fmt: skip
_TOKENS, _LATENTS = 77, 4


class Residual(nn.Module):
    """Two convolutions, the time in between."""

    def __init__(self, channels_in: int, channels: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, channels_in), nn.Conv2d(channels_in, channels, 3, padding=1)
        self.time = nn.Linear(time, channels)
        self.norm2, self.conv2 = nn.GroupNorm(32, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.shortcut = nn.Conv2d(channels_in, channels, 1) if channels_in != channels else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(functional.silu(self.norm1(x))) + self.time(functional.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(functional.silu(self.norm2(y)))


class Attention(nn.Module):
    """Attention of pixels to pixels or to a text."""

    def __init__(self, width: int, memory: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(w, width, bias=False) for w in (width, memory, memory))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        parts = (self.query(x), self.key(memory), self.value(memory))
        query, key, value = (t.view(*t.shape[:2], self.heads, -1).transpose(1, 2) for t in parts)
        return self.out(functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention to pixels, attention to the text, gated feed-forward; each after a norm."""

    def __init__(self, width: int, text: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.own = nn.LayerNorm(width), Attention(width, width, heads)
        self.norm2, self.cross = nn.LayerNorm(width), Attention(width, text, heads)
        self.norm3, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.own(y, y)
        x = x + self.cross(self.norm2(x), text)
        wide, gate = self.up(self.norm3(x)).chunk(2, -1)
        return x + self.down(wide * functional.gelu(gate))


class Transformer(nn.Module):
    """Blocks over the pixels of a map, between two projections."""

    def __init__(self, width: int, size: Size, depth: int) -> None:
        super().__init__()
        heads = width // size.head if size.head else 8
        self.norm, self.enter, self.leave = nn.GroupNorm(32, width), nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, size.text, heads) for _ in range(depth))

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        y = self.enter(self.norm(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            y = block(y, text)
        return x + self.leave(y).transpose(1, 2).view(x.shape)


class Layer(nn.Module):
    """A residual block and, at levels that have it, a transformer."""

    def __init__(self, channels_in: int, channels: int, size: Size, depth: int) -> None:
        super().__init__()
        self.residual = Residual(channels_in, channels, 4 * size.widths[0])
        self.transformer = Transformer(channels, size, depth) if depth else None

    def forward(self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = self.residual(x, time)
        return x if self.transformer is None else self.transformer(x, text)


class UNet(nn.Module):
    """Two layers per level on the way down, three on the way up, which take what the way down left."""

    frequencies: torch.Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        widths, first = size.widths, size.widths[0]
        self.register_buffer("frequencies", torch.empty(first // 2))
        self.time = nn.Sequential(nn.Linear(first, 4 * first), nn.SiLU(), nn.Linear(4 * first, 4 * first))
        self.pooled = nn.Sequential(nn.Linear(size.pooled, 4 * first), nn.SiLU(), nn.Linear(4 * first, 4 * first)) if size.pooled else None
        self.first, kept = nn.Conv2d(_LATENTS, first, 3, padding=1), [first]
        self.down, channels = nn.ModuleList(), first
        for i, (width, depth) in enumerate(zip(widths, size.depths, strict=True)):
            layers = [Layer(channels, width, size, depth), Layer(width, width, size, depth)]
            last = i == len(widths) - 1
            self.down.append(nn.ModuleList([*layers, *([] if last else [nn.Conv2d(width, width, 3, 2, 1)])]))
            kept, channels = [*kept, *([width] * (2 if last else 3))], width
        self.middle = nn.ModuleList((Layer(channels, channels, size, max(size.depths[-1], 1)), Layer(channels, channels, size, 0)))
        self.up = nn.ModuleList()
        for i, (width, depth) in enumerate(zip(reversed(widths), reversed(size.depths), strict=True)):
            level = nn.ModuleList()
            for _ in range(3):
                level.append(Layer(channels + kept.pop(), width, size, depth))
                channels = width
            self.up.append(level if i == len(widths) - 1 else level.append(nn.Conv2d(width, width, 3, padding=1)))
        self.norm, self.last = nn.GroupNorm(32, first), nn.Conv2d(first, _LATENTS, 3, padding=1)

    def forward(self, latents: torch.Tensor, times: torch.Tensor, text: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        angles = times[:, None] * self.frequencies
        time = self.time(torch.cat((angles.cos(), angles.sin()), 1))
        time = time if self.pooled is None else time + self.pooled(pooled)
        x = self.first(latents)
        kept = [x]
        for level in self.down:
            for layer in level:  # type: ignore[attr-defined]
                x = layer(x, time, text) if isinstance(layer, Layer) else layer(x)
                kept.append(x)
        for layer in self.middle:
            x = layer(x, time, text)
        for level in self.up:
            for layer in level:  # type: ignore[attr-defined]
                x = (
                    layer(torch.cat((x, kept.pop()), 1), time, text)
                    if isinstance(layer, Layer)
                    else layer(functional.interpolate(x, scale_factor=2))
                )
        return self.last(functional.silu(self.norm(x)))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Squared error of the predicted noise."""
    latents, times, text, pooled, noise = batch
    return functional.mse_loss(model(latents + noise, times, text, pooled).float(), noise.float())


def network(name: str, _seq_len: int = 0) -> Network:
    """The denoiser alone, on latents and text embeddings that were computed before."""
    size = _SIZES[name.rpartition("-")[2]]

    def make_batch(batch_size: int) -> Batch:
        shapes = ((_LATENTS, size.side, size.side), (), (_TOKENS, size.text), (max(size.pooled, 1),), (_LATENTS, size.side, size.side))
        latents, times, text, pooled, noise = (torch.empty(batch_size, *shape) for shape in shapes)
        return latents, times, text, pooled, noise

    return Network(build_model=lambda: UNet(size), make_batch=make_batch, loss_fn=loss, optimizer="adamw", assumed=("latents precomputed",))
