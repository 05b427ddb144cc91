"""BART (Lewis et al. 2019): encoder and decoder with learned positions and a norm after each part, one table for both sides and the head."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network


class Size(NamedTuple):
    """Layers of the encoder and as many of the decoder; heads are 64 wide, the feed-forward part four times the width."""

    layers: int
    hidden: int


_SIZES = {"base": Size(6, 768), "large": Size(12, 1024)}
_HEAD, _VOCAB, _POSITIONS, _DROPOUT = 64, 50265, 1026, 0.1
#: Tokens of an article of CNN / Daily Mail and of its summary, as BART is tuned.
_SOURCE, _TARGET = 1024, 142


class Attention(nn.Module):
    """Attention to the same sequence, or to a memory."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(y).unflatten(-1, (-1, _HEAD)).transpose(1, 2) for layer, y in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        weights = functional.softmax(torch.matmul(query / math.sqrt(_HEAD), key.transpose(-1, -2)), -1)
        return self.out(torch.matmul(functional.dropout(weights, _DROPOUT), value).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Self-attention, in the decoder attention to the encoder, and feed-forward; a norm after each."""

    def __init__(self, hidden: int, *, decodes: bool) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(hidden), nn.LayerNorm(hidden)
        self.cross = Attention(hidden) if decodes else None
        self.norm2 = nn.LayerNorm(hidden) if decodes else None
        self.up, self.down, self.norm3 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden), nn.LayerNorm(hidden)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = self.norm1(x + functional.dropout(self.attention(x, x), _DROPOUT))
        if self.cross is not None and self.norm2 is not None and memory is not None:
            x = self.norm2(x + functional.dropout(self.cross(x, memory), _DROPOUT))
        return self.norm3(x + functional.dropout(self.down(functional.gelu(self.up(x))), _DROPOUT))


class BART(nn.Module):
    """Both stacks, whose positions have tables of their own."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.table = nn.Embedding(_VOCAB, size.hidden)
        self.encoder_positions, self.decoder_positions = (nn.Embedding(_POSITIONS, size.hidden) for _ in range(2))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)
        self.encoder = nn.ModuleList(Layer(size.hidden, decodes=False) for _ in range(size.layers))
        self.decoder = nn.ModuleList(Layer(size.hidden, decodes=True) for _ in range(size.layers))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = self._embedded(source, self.encoder_positions, self.encoder_norm)
        for layer in self.encoder:
            memory = layer(memory)
        x = self._embedded(target, self.decoder_positions, self.decoder_norm)
        for layer in self.decoder:
            x = layer(x, memory)
        return functional.linear(x, self.table.weight)

    def _embedded(self, tokens: torch.Tensor, positions: nn.Embedding, norm: nn.LayerNorm) -> torch.Tensor:
        return functional.dropout(norm(self.table(tokens) + positions.weight[: tokens.shape[1]]), _DROPOUT)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the next token of the summary, smoothed."""
    source, target = batch
    return functional.cross_entropy(model(source, target).float().flatten(0, 1), target.flatten(), label_smoothing=0.1)


def network(name: str, seq_len: int = 0) -> Network:
    """A writer of summaries of 142 tokens of articles of `seq_len` tokens (1,024); its throughput counts those read."""
    length = min(seq_len or _SOURCE, _POSITIONS)

    def make_batch(batch_size: int) -> Batch:
        return torch.zeros(batch_size, length, dtype=torch.int64), torch.zeros(batch_size, _TARGET, dtype=torch.int64)

    return Network(
        build_model=lambda: BART(_SIZES[name.rpartition("-")[2]]), make_batch=make_batch, loss_fn=loss, optimizer="adamw",
        units_per_sample=float(length), unit="tokens", cuts_all_stacks=True, usual_batch=32,
        assumed=(*(() if seq_len else (f"seq_len = {length}",)), f"decoder_seq_len = {_TARGET}"),
    )  # fmt: skip
