"""Transformer big (Vaswani et al. 2017) on WMT English-German, one table for both languages and the head."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network

_LAYERS, _HIDDEN, _FFN, _HEAD, _VOCAB, _DROPOUT = 6, 1024, 4096, 64, 33712, 0.1
_SENTENCE = 28  # mean word pieces, as in gnmt.py


class Attention(nn.Module):
    """Attention to the same sentence, or to the encoder's output."""

    def __init__(self, *, cross: bool = False) -> None:
        super().__init__()
        self.query = nn.Linear(_HIDDEN, _HIDDEN) if cross else None
        self.projection, self.out = nn.Linear(_HIDDEN, (2 if cross else 3) * _HIDDEN), nn.Linear(_HIDDEN, _HIDDEN)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        if self.query is not None and memory is not None:
            query, (key, value) = self.query(x), self.projection(memory).chunk(2, -1)
        else:
            query, key, value = self.projection(x).chunk(3, -1)
        query, key, value = (t.view(*t.shape[:2], -1, _HEAD).transpose(1, 2) for t in (query, key, value))
        weights = functional.softmax(torch.matmul(query / math.sqrt(_HEAD), key.transpose(-1, -2)), -1)
        return self.out(torch.matmul(functional.dropout(weights, _DROPOUT), value).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Self-attention, in the decoder attention to the encoder, and feed-forward; a norm after each."""

    def __init__(self, *, decodes: bool) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(), nn.LayerNorm(_HIDDEN)
        self.cross = Attention(cross=True) if decodes else None
        self.norm2 = nn.LayerNorm(_HIDDEN) if decodes else None
        self.up, self.down, self.norm3 = nn.Linear(_HIDDEN, _FFN), nn.Linear(_FFN, _HIDDEN), nn.LayerNorm(_HIDDEN)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = self.norm1(x + functional.dropout(self.attention(x), _DROPOUT))
        if self.cross is not None and self.norm2 is not None:
            x = self.norm2(x + functional.dropout(self.cross(x, memory), _DROPOUT))
        return self.norm3(x + functional.dropout(self.down(functional.relu(self.up(x))), _DROPOUT))


class Transformer(nn.Module):
    """Encoder and decoder of six layers."""

    positions: torch.Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        self.table = nn.Embedding(_VOCAB, _HIDDEN)
        self.register_buffer("positions", torch.empty(length, _HIDDEN))
        self.encoder = nn.ModuleList(Layer(decodes=False) for _ in range(_LAYERS))
        self.decoder = nn.ModuleList(Layer(decodes=True) for _ in range(_LAYERS))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, x = self._embedded(source), self._embedded(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return functional.linear(x, self.table.weight)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.table(tokens) * math.sqrt(_HIDDEN) + self.positions, _DROPOUT)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the next word piece, smoothed."""
    source, target = batch
    return functional.cross_entropy(model(source, target).float().flatten(0, 1), target.flatten(), label_smoothing=0.1, reduction="sum")


def network(_name: str, seq_len: int = 0) -> Network:
    """A translator of sentence pairs of `seq_len` tokens each side (28 where it isn't stated), of which those written count."""
    length = seq_len or _SENTENCE

    def make_batch(batch_size: int) -> Batch:
        sentences = torch.zeros(2, batch_size, length, dtype=torch.int64)
        return sentences[0].clone(), sentences[1].clone()

    return Network(
        build_model=lambda: Transformer(length), make_batch=make_batch, loss_fn=loss, optimizer="adam", usual_batch=256, units_per_sample=float(length),
        unit="tokens", assumed=() if seq_len else (f"seq_len = {length}",), cuts_all_stacks=True,
    )  # fmt: skip
