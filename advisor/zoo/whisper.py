"""Whisper (Radford et al. 2022): log-mel frames of 30 s through an encoder, text out of a decoder."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network


class Size(NamedTuple):
    """Layers of each side and width; heads are 64 wide."""

    layers: int
    hidden: int


_SIZES = {"tiny": Size(4, 384), "base": Size(6, 512), "small": Size(12, 768), "medium": Size(24, 1024), "large": Size(32, 1280)}
_HEAD, _VOCAB, _FRAMES, _MELS, _CONTEXT = 64, 51865, 3000, 80, 448


class Attention(nn.Module):
    """Attention without a bias on the keys."""

    def __init__(self, hidden: int, *, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.query, self.key, self.value = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        parts = (self.query(x), self.key(memory), self.value(memory))
        query, key, value = (t.view(*t.shape[:2], -1, _HEAD).transpose(1, 2) for t in parts)
        return self.out(functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Self-attention, in the decoder attention to the encoder, and feed-forward; each after a norm."""

    def __init__(self, hidden: int, *, decodes: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(hidden), Attention(hidden, causal=decodes)
        self.norm2 = nn.LayerNorm(hidden) if decodes else None
        self.cross = Attention(hidden) if decodes else None
        self.norm3, self.up, self.down = nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y)
        if self.cross is not None and self.norm2 is not None:
            x = x + self.cross(self.norm2(x), memory)
        return x + self.down(functional.gelu(self.up(self.norm3(x))))


class Whisper(nn.Module):
    """Two convolutions that halve the frames, encoder, decoder; the table of tokens is also the head."""

    frame_positions: torch.Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(_MELS, size.hidden, 3, padding=1), nn.Conv1d(size.hidden, size.hidden, 3, 2, 1)
        self.register_buffer("frame_positions", torch.empty(_FRAMES // 2, size.hidden))
        self.encoder = nn.ModuleList(Layer(size.hidden, decodes=False) for _ in range(size.layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)
        self.table, self.positions = nn.Embedding(_VOCAB, size.hidden), nn.Parameter(torch.empty(_CONTEXT, size.hidden))
        self.decoder = nn.ModuleList(Layer(size.hidden, decodes=True) for _ in range(size.layers))

    def forward(self, frames: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        memory = functional.gelu(self.second(functional.gelu(self.first(frames)))).transpose(1, 2) + self.frame_positions
        for layer in self.encoder:
            memory = layer(memory)
        memory, x = self.encoder_norm(memory), self.table(tokens) + self.positions
        for layer in self.decoder:
            x = layer(x, memory)
        return functional.linear(self.decoder_norm(x), self.table.weight)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the next token."""
    frames, tokens = batch
    return functional.cross_entropy(model(frames, tokens).float().flatten(0, 1), tokens.flatten())


def network(name: str, _seq_len: int = 0) -> Network:
    """A recogniser of stretches of 30 s with texts of the full 448 tokens."""
    size = _SIZES[name.rpartition("-")[2]]

    def make_batch(batch_size: int) -> Batch:
        return torch.empty(batch_size, _MELS, _FRAMES), torch.zeros(batch_size, _CONTEXT, dtype=torch.int64)

    return Network(
        build_model=lambda: Whisper(size), make_batch=make_batch, loss_fn=loss, optimizer="adamw", unit="samples", assumed=("text of 448 tokens",),
        cuts_all_stacks=True,
    )  # fmt: skip
