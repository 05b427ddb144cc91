"""T5 (Raffel et al. 2019) as its authors published it, and T5 1.1 with Flan's weights: no biases, no positions but those of the scores."""

from __future__ import annotations

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


#: T5, and 1.1 with its gated feed-forward part and a head of its own.
_SIZES = {"t5-small": Size(6, 512, 2048, 8), "t5-base": Size(12, 768, 3072, 12), "t5-large": Size(24, 1024, 4096, 16)}
_GATED = {
    "flan-t5-small": Size(8, 512, 1024, 6), "flan-t5-base": Size(12, 768, 2048, 12), "flan-t5-large": Size(24, 1024, 2816, 16),
    "flan-t5-xl": Size(24, 2048, 5120, 32), "flan-t5-xxl": Size(24, 4096, 10240, 64),
}  # fmt: skip
_HEAD, _VOCAB, _BUCKETS, _DROPOUT = 64, 32128, 32, 0.1
_SOURCE, _TARGET = 512, 128


class RMSNorm(nn.Module):
    """Scaled to a mean square of one, in the plain operators of the published code."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Attention(nn.Module):
    """Attention whose scores get a bias by distance, which the first layer of a stack makes for all."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        inner = size.heads * _HEAD
        self.query, self.key, self.value = (nn.Linear(size.hidden, inner, bias=False) for _ in range(3))
        self.out = nn.Linear(inner, size.hidden, bias=False)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        query, key, value = (
            layer(y).unflatten(-1, (-1, _HEAD)).transpose(1, 2) for layer, y in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        scores = torch.matmul(query, key.transpose(-1, -2))
        weights = functional.softmax((scores if bias is None else scores + bias).float(), -1).to(scores.dtype)
        return self.out(torch.matmul(functional.dropout(weights, _DROPOUT), value).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Self-attention, in the decoder attention to the encoder, and feed-forward; a norm before each."""

    def __init__(self, size: Size, *, gated: bool, decodes: bool) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(size.hidden), Attention(size)
        self.norm2 = RMSNorm(size.hidden) if decodes else None
        self.cross = Attention(size) if decodes else None
        self.norm3, self.up = RMSNorm(size.hidden), nn.Linear(size.hidden, size.ffn, bias=False)
        self.gate = nn.Linear(size.hidden, size.ffn, bias=False) if gated else None
        self.down = nn.Linear(size.ffn, size.hidden, bias=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norm1(x)
        x = x + functional.dropout(self.attention(y, y, bias), _DROPOUT)
        if self.norm2 is not None and self.cross is not None and memory is not None:
            x = x + functional.dropout(self.cross(self.norm2(x), memory, None), _DROPOUT)
        y = self.norm3(x)
        wide = functional.relu(self.up(y)) if self.gate is None else functional.gelu(self.gate(y), approximate="tanh") * self.up(y)
        return x + functional.dropout(self.down(functional.dropout(wide, _DROPOUT)), _DROPOUT)


class Stack(nn.Module):
    """Layers, biases by distance and a last norm."""

    def __init__(self, size: Size, *, gated: bool, decodes: bool) -> None:
        super().__init__()
        self.distances = nn.Embedding(_BUCKETS, size.heads)
        self.layers = nn.ModuleList(Layer(size, gated=gated, decodes=decodes) for _ in range(size.layers))
        self.norm = RMSNorm(size.hidden)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        length = x.shape[1]
        bias = self.distances(torch.zeros(length, length, dtype=torch.int64)).permute(2, 0, 1)[None]
        for layer in self.layers:
            x = layer(x, bias, memory)
        return functional.dropout(self.norm(x), _DROPOUT)


class T5(nn.Module):
    """Encoder and decoder; the head is the table of tokens, but for 1.1."""

    def __init__(self, size: Size, *, gated: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(_VOCAB, size.hidden)
        self.encoder, self.decoder = (Stack(size, gated=gated, decodes=decodes) for decodes in (False, True))
        self.head = nn.Linear(size.hidden, _VOCAB, bias=False)
        if not gated:
            self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(functional.dropout(self.table(tokens), _DROPOUT))
        return self.head(self.decoder(functional.dropout(self.table(targets), _DROPOUT), memory))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the next target token."""
    tokens, targets = batch
    return functional.cross_entropy(model(tokens, targets).float().flatten(0, 1), targets.flatten())


def network(name: str, seq_len: int = 0) -> Network:
    """A T5 that reads `seq_len` tokens (512) and writes 128; its throughput counts those read."""
    gated, length = name in _GATED, seq_len or _SOURCE

    def make_batch(batch_size: int) -> Batch:
        return torch.zeros(batch_size, length, dtype=torch.int64), torch.zeros(batch_size, _TARGET, dtype=torch.int64)

    return Network(
        build_model=lambda: T5({**_SIZES, **_GATED}[name], gated=gated), make_batch=make_batch, loss_fn=loss, optimizer="adamw",
        units_per_sample=float(length), unit="tokens", cuts_all_stacks=True, accumulates=True,
        assumed=(*(() if seq_len else (f"seq_len = {length}",)), f"decoder_seq_len = {_TARGET}"),
    )  # fmt: skip
