"""T5 and mT5 (Raffel et al. 2019; Xue et al. 2020) at the sizes of NVIDIA NeMo: learned positions, gated GELU, biases, one table."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network


class Size(NamedTuple):
    """Layers of the encoder and as many of the decoder; heads are 64 wide."""

    layers: int
    hidden: int
    ffn: int
    heads: int


_SIZES = {
    "220m": Size(12, 768, 2048, 12), "3b": Size(24, 2048, 5120, 32), "11b": Size(24, 4096, 10240, 64), "23b": Size(36, 5120, 10880, 80),
    "41b": Size(48, 6144, 10880, 96), "170m": Size(8, 512, 1024, 6), "390m": Size(12, 768, 2048, 12),
}  # fmt: skip
_HEAD = 64
#: Rows of the table, padded to a multiple of 128: BERT's cased word pieces and 100 sentinels; mT5's sentence pieces.
_T5_VOCAB, _MT5_VOCAB = 29184, 250112
_SEQ_LEN, _TARGET_LEN = 512, 128
_DROPOUT = 0.1


class Attention(nn.Module):
    """Attention to the same sequence, or to a memory."""

    def __init__(self, size: Size, *, cross: bool = False) -> None:
        super().__init__()
        inner = size.heads * _HEAD
        self.heads = size.heads
        self.query = nn.Linear(size.hidden, inner) if cross else None
        self.projection = nn.Linear(size.hidden, (2 if cross else 3) * inner)
        self.out = nn.Linear(inner, size.hidden)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        if self.query is not None and memory is not None:
            query, (key, value) = self.query(x), self.projection(memory).chunk(2, -1)
        else:
            query, key, value = self.projection(x).chunk(3, -1)
        query, key, value = (t.unflatten(-1, (self.heads, _HEAD)).transpose(1, 2) for t in (query, key, value))
        scores = torch.matmul(query / math.sqrt(_HEAD), key.transpose(-1, -2))
        weights = functional.dropout(torch.softmax(scores, -1), _DROPOUT)
        return self.out(torch.matmul(weights, value).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Gated GELU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(size.hidden, size.ffn), nn.Linear(size.hidden, size.ffn)
        self.down = nn.Linear(size.ffn, size.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.gate(x)) * self.up(x))


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each after a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(size.hidden), Attention(size)
        self.norm2, self.mlp = nn.LayerNorm(size.hidden), FeedForward(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + functional.dropout(self.attention(self.norm1(x)), _DROPOUT)
        return x + functional.dropout(self.mlp(self.norm2(x)), _DROPOUT)


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder's output and feed-forward, each after a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(size.hidden), Attention(size)
        self.norm2, self.cross = nn.LayerNorm(size.hidden), Attention(size, cross=True)
        self.norm3, self.mlp = nn.LayerNorm(size.hidden), FeedForward(size)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x = x + functional.dropout(self.attention(self.norm1(x)), _DROPOUT)
        x = x + functional.dropout(self.cross(self.norm2(x), memory), _DROPOUT)
        return x + functional.dropout(self.mlp(self.norm3(x)), _DROPOUT)


class T5(nn.Module):
    """Encoder and decoder around one table of tokens, which is also the head."""

    def __init__(self, size: Size, vocab: int, seq_len: int) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(vocab, size.hidden), nn.Embedding(seq_len, size.hidden)
        self.encoder = nn.ModuleList(EncoderLayer(size) for _ in range(size.layers))
        self.encoder_norm = nn.LayerNorm(size.hidden)
        self.decoder = nn.ModuleList(DecoderLayer(size) for _ in range(size.layers))
        self.decoder_norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, vocab)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        memory = functional.dropout(self.table(tokens) + self.positions.weight[: tokens.shape[1]], _DROPOUT)
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.encoder_norm(memory)
        x = functional.dropout(self.table(targets) + self.positions.weight[: targets.shape[1]], _DROPOUT)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(self.decoder_norm(x))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the next target token."""
    tokens, targets = batch
    return functional.cross_entropy(model(tokens, targets).float().flatten(0, 1), targets.flatten())


def network(name: str, seq_len: int = 0) -> Network:
    """A T5 or mT5 that reads `seq_len` tokens (512) and writes 128; its throughput counts those read."""
    variant, length = name.rpartition("-")[2], seq_len or _SEQ_LEN
    vocab = _MT5_VOCAB if name.startswith("mt5") else _T5_VOCAB

    def make_batch(batch_size: int) -> Batch:
        return torch.zeros(batch_size, length, dtype=torch.int64), torch.zeros(batch_size, _TARGET_LEN, dtype=torch.int64)

    return Network(
        build_model=lambda: T5(_SIZES[variant], vocab, max(length, _TARGET_LEN)), make_batch=make_batch, loss_fn=loss, optimizer="adam",
        assumed=("vocab", "decoder_seq_len"), units_per_sample=float(length), unit="tokens",
        cuts_all_stacks=True, accumulates=True,
    )  # fmt: skip
