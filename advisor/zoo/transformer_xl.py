"""Transformer-XL (Dai et al. 2019) on WikiText-103 at the sizes of NVIDIA's reference: a memory of the last segment, relative positions."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network


class Size(NamedTuple):
    """Sizes of a variant; memory and segment are equally long."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    dropout: float
    attention_dropout: float
    segment: int
    division: int  # of the embedding's width from one cluster of words to the next rarer one


_SIZES = {"base": Size(16, 512, 8, 2048, 0.1, 0.0, 192, 1), "large": Size(18, 1024, 16, 4096, 0.2, 0.2, 384, 4)}
_HEAD, _VOCAB = 64, 267735
_CUTOFFS = (0, 19997, 39997, 199997, _VOCAB)
#: Share of the running words of WikiText-103 in each cluster of the vocabulary, roughly by Zipf's law.
_WORD_SHARES = (0.92, 0.035, 0.04, 0.005)


class AdaptiveEmbedding(nn.Module):
    """One table per cluster, narrower for rarer words and projected to the model's width; one table where none is narrower."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        sizes = itertools.pairwise(_CUTOFFS) if size.division > 1 else [(0, _VOCAB)]
        tables = [nn.Embedding(end - start, size.hidden // size.division**i) for i, (start, end) in enumerate(sizes)]
        narrow = tables if size.division > 1 else []
        self.tables = nn.ModuleList(tables)
        self.projections = nn.ParameterList(nn.Parameter(torch.empty(size.hidden, t.embedding_dim)) for t in narrow)
        self.scale = math.sqrt(size.hidden)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        if not len(self.projections):
            return self.tables[0](words) * self.scale
        parts = _by_cluster(words.flatten())
        found = [functional.linear(t(w), p) for w, t, p in zip(parts, self.tables, self.projections, strict=True)]
        return torch.cat(found).view(*words.shape, -1) * self.scale


def _by_cluster(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows as if sorted by the cluster of their word, with the usual number in each."""
    counts = [max(round(len(rows) * share), 1) for share in _WORD_SHARES[1:]]
    return torch.split(rows, [len(rows) - sum(counts), *counts])


class RelativeAttention(nn.Module):
    """Attention over memory and segment; scores of content and of distance are added."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        inner = size.heads * _HEAD
        self.heads, self.dropout, self.attention_dropout = size.heads, size.dropout, size.attention_dropout
        self.projection, self.distance = nn.Linear(size.hidden, 3 * inner, bias=False), nn.Linear(size.hidden, inner, bias=False)
        self.out, self.norm = nn.Linear(inner, size.hidden, bias=False), nn.LayerNorm(size.hidden)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor, positions: torch.Tensor, biases: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        query, key, value = (t.unflatten(-1, (self.heads, _HEAD)) for t in self.projection(torch.cat((memory, x))).chunk(3, -1))
        query, distance = query[-len(x) :], self.distance(positions).unflatten(-1, (self.heads, _HEAD))
        content = torch.einsum("ibnd,jbnd->bnij", query + biases[0], key)
        scores = content + _shifted(torch.einsum("ibnd,jnd->bnij", query + biases[1], distance))
        weights = functional.softmax((scores / math.sqrt(_HEAD)).masked_fill(mask, -math.inf), -1)
        if self.attention_dropout:
            weights = functional.dropout(weights, self.attention_dropout)
        y = self.out(torch.einsum("bnij,jbnd->ibnd", weights, value).flatten(2))
        return self.norm(x + functional.dropout(y, self.dropout))


def _shifted(scores: torch.Tensor) -> torch.Tensor:
    """Scores by distance as scores by position: row i moves i places."""
    b, n, rows, columns = scores.shape
    padded = torch.cat((scores.new_zeros(b, n, rows, 1), scores), 3).view(b, n, columns + 1, rows)
    return padded[:, :, 1:].reshape(b, n, rows, columns)


class Layer(nn.Module):
    """Attention and feed-forward, each with a norm after it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention, self.dropout = RelativeAttention(size), size.dropout
        self.up, self.down, self.norm = nn.Linear(size.hidden, size.ffn), nn.Linear(size.ffn, size.hidden), nn.LayerNorm(size.hidden)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor, positions: torch.Tensor, biases: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        x = self.attention(x, memory, positions, biases, mask)
        y = self.down(functional.dropout(functional.relu(self.up(x), inplace=True), self.dropout))
        return self.norm(x + functional.dropout(y, self.dropout))


class TransformerXL(nn.Module):
    """Embedding, layers and an adaptive softmax that shares the embedding's tables; the loss is its output."""

    frequencies: torch.Tensor
    distances: torch.Tensor
    mask: torch.Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, self.embedding = size, AdaptiveEmbedding(size)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.biases = nn.Parameter(torch.empty(2, size.heads, _HEAD))
        self.cluster_weight, self.cluster_bias = nn.Parameter(torch.empty(3, size.hidden)), nn.Parameter(torch.empty(3))
        self.word_biases = nn.ParameterList(nn.Parameter(torch.empty(end - start)) for start, end in itertools.pairwise(_CUTOFFS))
        self.head_projection = nn.Parameter(torch.empty(size.hidden, size.hidden)) if size.division > 1 else None
        self.register_buffer("frequencies", torch.empty(size.hidden // 2))
        self.register_buffer("distances", torch.empty(2 * size.segment))
        self.register_buffer("mask", torch.ones(size.segment, 2 * size.segment, dtype=torch.bool))

    def forward(self, words: torch.Tensor, targets: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(self.distances, self.frequencies)
        positions = functional.dropout(torch.cat((angles.sin(), angles.cos()), 1), self.size.dropout)
        x = functional.dropout(self.embedding(words), self.size.dropout)
        for layer, old in zip(self.layers, memory, strict=True):
            x = layer(x, old, positions, self.biases, self.mask)
        return self._loss(functional.dropout(x, self.size.dropout).flatten(0, 1), targets.flatten())

    def _loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Every word is scored against the frequent ones and the clusters, a rare one against its cluster as well."""
        weights, projections = self._heads()
        head = functional.linear(
            self._projected(x, projections[0]),
            torch.cat((weights[0], self.cluster_weight)),
            torch.cat((self.word_biases[0], self.cluster_bias)),
        )
        log_shares = functional.log_softmax(head, 1)
        losses = []
        for i, (rows, own, wanted) in enumerate(zip(_by_cluster(x), _by_cluster(log_shares), _by_cluster(targets), strict=True)):
            found = (
                own
                if i == 0
                else functional.log_softmax(functional.linear(self._projected(rows, projections[i]), weights[i], self.word_biases[i]), 1)
            )
            picked = found.gather(1, wanted[:, None]).squeeze(1)
            losses.append(picked + own[:, -i] if i else picked)
        return -torch.cat(losses).float().mean()

    def _heads(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        tables = [table.weight for table in self.embedding.tables if isinstance(table, nn.Embedding)]
        if len(tables) == 1:
            return [tables[0][start:end] for start, end in itertools.pairwise(_CUTOFFS)], [None] * (len(_CUTOFFS) - 1)
        return tables, [self.head_projection, *list(self.embedding.projections)[1:]]

    @staticmethod
    def _projected(x: torch.Tensor, projection: torch.Tensor | None) -> torch.Tensor:
        return x if projection is None else torch.matmul(x, projection)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What the model returns."""
    return model(*batch)


def network(name: str, seq_len: int = 0) -> Network:
    """The base or large Transformer-XL on segments of `seq_len` words (192 and 384) and a memory as long."""
    size = _SIZES[name.rpartition("-")[2]]
    size = size._replace(segment=seq_len or size.segment)

    def make_batch(batch_size: int) -> Batch:
        words = torch.zeros(2, size.segment, batch_size, dtype=torch.int64)
        return words[0].clone(), words[1].clone(), torch.empty(size.layers, size.segment, batch_size, size.hidden)

    return Network(
        build_model=lambda: TransformerXL(size), make_batch=make_batch, loss_fn=loss, optimizer="lamb", unit="tokens", usual_batch=32,
        units_per_sample=float(size.segment), assumed=("word frequencies", *(() if seq_len else (f"seq_len = {size.segment}",))),
    )  # fmt: skip
