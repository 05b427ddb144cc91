"""Neural collaborative filtering (He et al. 2017): NeuMF on MovieLens 20M at the sizes of NVIDIA's reference."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network

_USERS, _ITEMS = 138493, 26744
_FACTORS, _WIDTHS = 64, (256, 256, 128, 64)
_DROPOUT = 0.5


class NeuMF(nn.Module):
    """Factorisation and a perceptron side by side, each with tables of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factors_user, self.factors_item = nn.Embedding(_USERS, _FACTORS), nn.Embedding(_ITEMS, _FACTORS)
        self.mlp_user, self.mlp_item = nn.Embedding(_USERS, _WIDTHS[0] // 2), nn.Embedding(_ITEMS, _WIDTHS[0] // 2)
        self.mlp = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(_WIDTHS))
        self.head = nn.Linear(_WIDTHS[-1] + _FACTORS, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        x = torch.cat((self.mlp_user(user), self.mlp_item(item)), 1)
        for layer in self.mlp:
            x = functional.dropout(functional.relu(layer(x)), _DROPOUT)
        return self.head(torch.cat((self.factors_user(user) * self.factors_item(item), x), 1))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Binary cross-entropy of seen and made-up pairs."""
    user, item, seen = batch
    return functional.binary_cross_entropy_with_logits(model(user, item).squeeze(1).float(), seen.float())


def network(_name: str, _seq_len: int = 0) -> Network:
    """NeuMF, of which a sample is one pair of user and item."""

    def make_batch(batch_size: int) -> Batch:
        pairs = torch.zeros(2, batch_size, dtype=torch.int64)
        return pairs[0].clone(), pairs[1].clone(), torch.empty(batch_size)

    return Network(
        build_model=NeuMF, make_batch=make_batch, loss_fn=loss, optimizer="adam", unit="samples", usual_batch=2**20, shares_batch=True
    )
