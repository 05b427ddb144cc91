"""GNMT v2 (Wu et al. 2016, at the sizes of NVIDIA's reference): four LSTM layers of 1,024 on each side and additive attention."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network

_HIDDEN, _VOCAB, _DROPOUT = 1024, 32320, 0.2
#: Mean word pieces of an English or German sentence of WMT16 in a batch of equal lengths; throughputs count both sides.
_SENTENCE = 28


class Encoder(nn.Module):
    """A bidirectional layer and three more, the last two around residual sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(_HIDDEN, _HIDDEN, bidirectional=True)
        self.layers = nn.ModuleList((nn.LSTM(2 * _HIDDEN, _HIDDEN), nn.LSTM(_HIDDEN, _HIDDEN), nn.LSTM(_HIDDEN, _HIDDEN)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.first(functional.dropout(x, _DROPOUT))
        for i, layer in enumerate(self.layers):
            y, _ = layer(functional.dropout(x, _DROPOUT))
            x = y + x if i else y
        return x


class AdditiveAttention(nn.Module):
    """Bahdanau's attention, normalised: every query is added to every key before the tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(_HIDDEN, _HIDDEN, bias=False), nn.Linear(_HIDDEN, _HIDDEN, bias=False)
        self.vector, self.scale = nn.Parameter(torch.empty(_HIDDEN)), nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(_HIDDEN))

    def forward(self, query: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        query, memory = query.transpose(0, 1), memory.transpose(0, 1)
        summed = self.query(query)[:, :, None] + self.key(memory)[:, None] + self.bias
        scores = torch.matmul(torch.tanh(summed), self.vector * self.scale)
        return torch.bmm(functional.softmax(scores, -1), memory).transpose(0, 1)


class Decoder(nn.Module):
    """A layer that asks, and three that get its answer beside their input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.LSTM(_HIDDEN, _HIDDEN), AdditiveAttention()
        self.layers = nn.ModuleList(nn.LSTM(2 * _HIDDEN, _HIDDEN) for _ in range(3))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x, _ = self.first(functional.dropout(x, _DROPOUT))
        context = self.attention(x, memory)
        for i, layer in enumerate(self.layers):
            y, _ = layer(torch.cat((functional.dropout(x, _DROPOUT), context), 2))
            x = y + x if i else y
        return x


class GNMT(nn.Module):
    """Encoder and decoder with one table of word pieces, and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.encoder, self.decoder = nn.Embedding(_VOCAB, _HIDDEN), Encoder(), Decoder()
        self.head = nn.Linear(_HIDDEN, _VOCAB)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(self.table(target), self.encoder(self.table(source))))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the next word piece, smoothed."""
    source, target = batch
    logits = model(source, target).float()
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1, reduction="sum")


def network(_name: str, seq_len: int = 0) -> Network:
    """GNMT on sentence pairs of `seq_len` tokens, half of them on each side (28 where it isn't stated); its throughput counts both."""
    length = max(seq_len // 2, 1) if seq_len else _SENTENCE

    def make_batch(batch_size: int) -> Batch:
        sentences = torch.zeros(2, length, batch_size, dtype=torch.int64)
        return sentences[0].clone(), sentences[1].clone()

    return Network(
        build_model=GNMT, make_batch=make_batch, loss_fn=loss, optimizer="adam", usual_batch=128, units_per_sample=2.0 * length, unit="tokens",
        assumed=() if seq_len else (f"seq_len = {2 * length}",),
    )  # fmt: skip
