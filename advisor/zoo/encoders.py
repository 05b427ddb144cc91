"""Encoders of text beside BERT: ALBERT (Lan et al. 2019), which runs one layer many times, and ELECTRA (Clark et al. 2020), two networks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network


class Size(NamedTuple):
    """Sizes of an encoder."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    embedding: int
    dropout: float = 0.1


_ALBERT = {
    "base": Size(12, 768, 12, 3072, 128, 0.0), "large": Size(24, 1024, 16, 4096, 128, 0.0), "xlarge": Size(24, 2048, 16, 8192, 128, 0.0),
    "xxlarge": Size(12, 4096, 64, 16384, 128, 0.0),
}  # fmt: skip
#: Discriminator and generator.
_ELECTRA = {
    "small": (Size(12, 256, 4, 1024, 128), Size(12, 64, 1, 256, 128)), "base": (Size(12, 768, 12, 3072, 768), Size(12, 256, 4, 1024, 768)),
    "large": (Size(24, 1024, 16, 4096, 1024), Size(24, 256, 4, 1024, 1024)),
}  # fmt: skip
_ALBERT_VOCAB, _ELECTRA_VOCAB, _POSITIONS, _MASKED_SHARE = 30000, 30522, 512, 0.15


class Layer(nn.Module):
    """Attention and feed-forward, a norm after each."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.dropout = size.heads, size.dropout
        self.query, self.key, self.value, self.out = (nn.Linear(size.hidden, size.hidden) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)
        self.up, self.down = nn.Linear(size.hidden, size.ffn), nn.Linear(size.ffn, size.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        weights = functional.softmax(torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1]), -1)
        y = self.out(torch.matmul(functional.dropout(weights, self.dropout), value).transpose(1, 2).flatten(2))
        x = self.norm1(x + functional.dropout(y, self.dropout))
        return self.norm2(x + functional.dropout(self.down(functional.gelu(self.up(x))), self.dropout))


class Embeddings(nn.Module):
    """Tables of words, positions and segments."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.words, self.positions, self.segments = nn.Embedding(vocab, width), nn.Embedding(_POSITIONS, width), nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.words(tokens) + self.positions.weight[: tokens.shape[1]] + self.segments.weight[0])


class Encoder(nn.Module):
    """Layers on embeddings, which are projected where they are of another width.

    Args:
        size: its sizes.
        repeats: how often each layer runs.
    """

    def __init__(self, size: Size, *, repeats: int = 1) -> None:
        super().__init__()
        self.project = nn.Linear(size.embedding, size.hidden) if size.embedding != size.hidden else nn.Identity()
        self.layers, self.repeats = nn.ModuleList(Layer(size) for _ in range(size.layers // repeats)), repeats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.project(x)
        for layer in self.layers:
            for _ in range(self.repeats):
                x = layer(x)
        return x


class WordHead(nn.Module):
    """Scores of all words at the masked positions, from the table of words."""

    def __init__(self, hidden: int, width: int, vocab: int) -> None:
        super().__init__()
        self.dense, self.norm, self.bias = nn.Linear(hidden, width), nn.LayerNorm(width), nn.Parameter(torch.empty(vocab))

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        masked = x[:, : max(round(_MASKED_SHARE * x.shape[1]), 1)].flatten(0, 1)
        return functional.linear(self.norm(functional.gelu(self.dense(masked))), words, self.bias)


class ALBERT(nn.Module):
    """One layer run as often as the size has layers, and the head over masked words; the pooler is the sentence head's."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embeddings = Embeddings(_ALBERT_VOCAB, size.embedding)
        self.encoder, self.pooler = Encoder(size, repeats=size.layers), nn.Linear(size.hidden, size.hidden)
        self.head = WordHead(size.hidden, size.embedding, _ALBERT_VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.embeddings(tokens))
        return self.head(x, self.embeddings.words.weight).float().logsumexp(1).mean() + torch.tanh(self.pooler(x[:, 0])).mean()


class ELECTRA(nn.Module):
    """A small generator fills masked words in, the discriminator tells which words are its; they share the embeddings."""

    def __init__(self, discriminator: Size, generator: Size) -> None:
        super().__init__()
        self.embeddings = Embeddings(_ELECTRA_VOCAB, discriminator.embedding)
        self.generator, self.discriminator = Encoder(generator), Encoder(discriminator)
        self.words = WordHead(generator.hidden, generator.embedding, _ELECTRA_VOCAB)
        self.dense, self.head = nn.Linear(discriminator.hidden, discriminator.hidden), nn.Linear(discriminator.hidden, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.words(self.generator(self.embeddings(tokens)), self.embeddings.words.weight).float()
        x = self.discriminator(self.embeddings(tokens))
        found = self.head(functional.gelu(self.dense(x))).squeeze(-1).float()
        return scores.logsumexp(1).mean() + 50 * functional.binary_cross_entropy_with_logits(found, torch.zeros_like(found))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What the model returns."""
    return model(*batch)


def network(name: str, seq_len: int = 0) -> Network:
    """An encoder in pre-training on sequences of `seq_len` tokens (128, as most of the steps have)."""
    kind, variant = name.split("-")
    length = min(seq_len or 128, _POSITIONS)

    def build() -> nn.Module:
        return ALBERT(_ALBERT[variant]) if kind == "albert" else ELECTRA(*_ELECTRA[variant])

    return Network(
        build_model=build, make_batch=lambda n: (torch.zeros(n, length, dtype=torch.int64),), loss_fn=loss, optimizer="lamb",
        units_per_sample=float(length), unit="tokens", accumulates=True, assumed=() if seq_len else (f"seq_len = {length}",),
    )  # fmt: skip
