"""Recommenders: DLRM (Naumov et al. 2019), Wide & Deep (Cheng et al. 2016) and VAE-CF (Liang et al. 2018), at the sizes of NVIDIA's references."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network

#: Rows of DLRM's 26 tables for the Criteo Terabyte logs, of values seen at least 15 times.
_CRITEO_ROWS = (
    7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11, 2209, 10667, 104, 4, 968, 15, 8165896, 2675940,
    7156453, 302516, 12022, 97, 35,
)  # fmt: skip
_DENSE, _WIDTH = 13, 128
_BOTTOM, _TOP = (512, 256, _WIDTH), (1024, 1024, 512, 256, 1)
#: Rows and width of the tables of Outbrain's click logs: documents, advertisements and events, then twelve small ones.
_OUTBRAIN = (
    (300000, 128),
    (250000, 128),
    (100000, 128),
    *(((5000, 64),) * 3),
    *(((2500, 64),) * 5),
    *(((1000, 64),) * 2),
    *(((100, 16),) * 2),
)
_OUTBRAIN_NUMBERS, _DEEP = 13, (1024,) * 5
#: Films of MovieLens 20M with enough ratings, how many of them a user liked, and the widths of encoder and code.
_FILMS, _LIKED, _HIDDEN, _CODE = 20108, 73, 600, 200


class FusedLookup(torch.autograd.Function):
    """Rows of a table; the backward pass updates those rows at once, as a fused SGD does: there is no gradient of the table."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        ctx.table, ctx.rows = table, rows
        return functional.embedding(rows, table).to(like.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        functional.embedding(ctx.rows, ctx.table).add_(grads[0])  # the rows that the update reads and writes
        return None, None, None


class JointTable(nn.Module):
    """All tables of embeddings one below the other, looked up at once and updated in the backward pass."""

    weight: torch.Tensor
    first: torch.Tensor

    def __init__(self, rows: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(sum(rows), width))
        self.register_buffer("first", torch.zeros(len(rows), dtype=torch.int64))

    def forward(self, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = FusedLookup.apply(self.weight, rows + self.first, like)  # type: ignore[no-untyped-call]
        return found


def perceptron(widths: tuple[int, ...], *, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers, each but a last one of width 1 followed by ReLU."""
    layers: list[nn.Module] = []
    for inner, out in itertools.pairwise(widths):
        layers.append(nn.Linear(inner, out))
        if out > 1:
            layers += [nn.ReLU(inplace=True), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """Numbers through a perceptron, categories through tables, every pair's inner product and the numbers into a second perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = JointTable(_CRITEO_ROWS, _WIDTH)
        self.num_pairs = math.comb(len(_CRITEO_ROWS) + 1, 2)
        self.bottom = perceptron((_DENSE, *_BOTTOM))
        self.top = perceptron((_WIDTH + self.num_pairs + 1, *_TOP))  # one more, so that products have aligned rows

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        x = self.bottom(numbers)
        vectors = torch.cat((x[:, None], self.tables(categories, x)), 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat((x, products[:, : self.num_pairs + 1]), 1)).squeeze(1)  # as many of them as one triangle has


class WideAndDeep(nn.Module):
    """A weight for each category beside a perceptron on embeddings and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Embedding(rows, 1) for rows, _ in _OUTBRAIN)
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for rows, width in _OUTBRAIN)
        self.deep = perceptron((sum(width for _, width in _OUTBRAIN) + _OUTBRAIN_NUMBERS, *_DEEP, 1), dropout=0.1)

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        by_table = categories.unbind(1)
        deep = torch.cat([t(c) for t, c in zip(self.tables, by_table, strict=True)] + [numbers], 1)
        wide = torch.cat([t(c) for t, c in zip(self.wide, by_table, strict=True)], 1).sum(1)
        return wide + self.deep(deep).squeeze(1)


class VAECF(nn.Module):
    """What a user liked as the sum of rows, a normal code of it, and a score of every film."""

    def __init__(self) -> None:
        super().__init__()
        self.films = nn.Embedding(_FILMS, _HIDDEN)
        self.bias = nn.Parameter(torch.empty(_HIDDEN))
        self.encode, self.decode, self.head = nn.Linear(_HIDDEN, 2 * _CODE), nn.Linear(_CODE, _HIDDEN), nn.Linear(_HIDDEN, _FILMS)

    def forward(self, liked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encode(torch.tanh(self.films(liked).sum(1) + self.bias)).float().chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (log_variance.exp() + mean * mean - 1 - log_variance).sum(1).mean() / 2
        return self.head(torch.tanh(self.decode(code))), divergence


def click_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Binary cross-entropy of clicks."""
    numbers, categories, clicked = batch
    return functional.binary_cross_entropy_with_logits(model(numbers, categories).float(), clicked.float())


def vae_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Likelihood of what the user liked among all films, and the code's divergence from the normal one."""
    (liked,) = batch
    scores, divergence = model(liked)
    return divergence - functional.log_softmax(scores, 1).gather(1, liked).sum(1).mean()


def _clicks(num_numbers: int, num_categories: int, batch_size: int) -> Batch:
    categories = torch.zeros(batch_size, num_categories, dtype=torch.int64)
    return torch.empty(batch_size, num_numbers), categories, torch.empty(batch_size)


def network(name: str, _seq_len: int = 0) -> Network:
    """A recommender; a sample is one impression, or one user of VAE-CF."""
    if name == "vae-cf":
        return Network(
            build_model=VAECF, make_batch=lambda n: (torch.zeros(n, _LIKED, dtype=torch.int64),), loss_fn=vae_loss, optimizer="adam",
            unit="samples", usual_batch=24576, shares_batch=True, assumed=(f"{_LIKED} films a user",),
        )  # fmt: skip
    if name == "wide-and-deep":
        return Network(
            build_model=WideAndDeep, make_batch=lambda n: _clicks(_OUTBRAIN_NUMBERS, len(_OUTBRAIN), n), loss_fn=click_loss, optimizer="adam",
            unit="samples", usual_batch=131072, shares_batch=True, assumed=("sizes of the tables",),
        )  # fmt: skip
    return Network(
        build_model=DLRM, make_batch=lambda n: _clicks(_DENSE, len(_CRITEO_ROWS), n), loss_fn=click_loss, optimizer="sgd",
        unit="samples", usual_batch=65536, shares_batch=True, assumed=("tables of values seen 15 times, whole on every GPU",),
    )  # fmt: skip
