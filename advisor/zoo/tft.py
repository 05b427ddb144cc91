"""Temporal Fusion Transformer (Lim et al. 2019) on the electricity data, at the sizes of NVIDIA's reference."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network

_HIDDEN, _HEADS, _DROPOUT, _QUANTILES = 128, 4, 0.1, 3
#: Hours that are known and that are foretold; variables known of the past and of the future; customers.
_PAST, _FUTURE, _PAST_VARIABLES, _FUTURE_VARIABLES, _CUSTOMERS = 168, 24, 4, 3, 369


class Gate(nn.Module):
    """A gated linear unit, added to what went round it, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(_HIDDEN, 2 * _HIDDEN), nn.LayerNorm(_HIDDEN)

    def forward(self, x: torch.Tensor, around: torch.Tensor) -> torch.Tensor:
        return self.norm(functional.glu(self.linear(x)) + around)


class GatedResidual(nn.Module):
    """Two linear layers, gated; a context may be added after the first."""

    def __init__(self, inner: int = _HIDDEN, out: int = _HIDDEN, *, context: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inner, _HIDDEN), nn.Linear(_HIDDEN, _HIDDEN)
        self.context = nn.Linear(_HIDDEN, _HIDDEN, bias=False) if context else None
        self.gate, self.norm = nn.Linear(_HIDDEN, 2 * out), nn.LayerNorm(out)
        self.around = nn.Linear(inner, out) if inner != out else nn.Identity()

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        y = self.first(x)
        if self.context is not None and context is not None:
            y = y + self.context(context)
        y = functional.dropout(self.second(functional.elu(y)), _DROPOUT)
        return self.norm(functional.glu(self.gate(y)) + self.around(x))


class Selection(nn.Module):
    """Weights of the variables, which are each transformed on their own."""

    def __init__(self, num_variables: int) -> None:
        super().__init__()
        self.weights = GatedResidual(num_variables * _HIDDEN, num_variables, context=True)
        self.variables = nn.ModuleList(GatedResidual() for _ in range(num_variables))

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        weights = functional.softmax(self.weights(x.flatten(-2), context), -1)
        made = torch.stack([layer(x[..., i, :]) for i, layer in enumerate(self.variables)], -1)
        return torch.matmul(made, weights.to(made.dtype)[..., None]).squeeze(-1)


class Attention(nn.Module):
    """Heads with keys and queries of their own and one value."""

    def __init__(self) -> None:
        super().__init__()
        width = _HIDDEN // _HEADS
        self.projection, self.out = nn.Linear(_HIDDEN, (2 * _HEADS + 1) * width, bias=False), nn.Linear(width, _HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = _HIDDEN // _HEADS
        query, key, value = self.projection(x).split((_HIDDEN, _HIDDEN, width), -1)
        query, key = (t.unflatten(-1, (_HEADS, width)).transpose(1, 2) for t in (query, key))
        weights = functional.softmax(torch.matmul(query, key.transpose(-1, -2)) / width**0.5, -1)
        return self.out(torch.matmul(functional.dropout(weights, _DROPOUT), value[:, None]).mean(1))


class TFT(nn.Module):
    """Variables selected by what is known of the customer, recurrent layers over past and future, attention over both."""

    def __init__(self) -> None:
        super().__init__()
        self.customer, self.contexts = nn.Embedding(_CUSTOMERS, _HIDDEN), nn.ModuleList(GatedResidual() for _ in range(4))
        self.past_weight = nn.Parameter(torch.empty(_PAST_VARIABLES, _HIDDEN))
        self.future_weight = nn.Parameter(torch.empty(_FUTURE_VARIABLES, _HIDDEN))
        self.past, self.future = Selection(_PAST_VARIABLES), Selection(_FUTURE_VARIABLES)
        self.encoder, self.decoder = (nn.LSTM(_HIDDEN, _HIDDEN, batch_first=True) for _ in range(2))
        self.gates, self.enriched = nn.ModuleList(Gate() for _ in range(3)), GatedResidual(context=True)
        self.attention, self.last, self.head = Attention(), GatedResidual(), nn.Linear(_HIDDEN, _QUANTILES)

    def forward(self, past: torch.Tensor, future: torch.Tensor, customer: torch.Tensor) -> torch.Tensor:
        selects, enriches, *state = (layer(self.customer(customer)) for layer in self.contexts)
        seen = self.past(past[..., None] * self.past_weight, selects[:, None])
        known = self.future(future[..., None] * self.future_weight, selects[:, None])
        first, last = self.encoder(seen, tuple(s[None] for s in state))
        second, _ = self.decoder(known, last)
        x = self.gates[0](torch.cat((first, second), 1), torch.cat((seen, known), 1))
        y = self.enriched(x, enriches[:, None])
        y = self.gates[1](self.attention(y), y)[:, _PAST:]
        return self.head(self.gates[2](self.last(y), x[:, _PAST:]))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Quantile loss."""
    past, future, customer, wanted = batch
    error = wanted[..., None].float() - model(past, future, customer).float()
    return torch.maximum(0.9 * error, -0.1 * error).mean()


def network(_name: str, _seq_len: int = 0) -> Network:
    """A forecaster of one day from the week before."""

    def make_batch(batch_size: int) -> Batch:
        known = torch.empty(batch_size, _FUTURE, _FUTURE_VARIABLES)
        return (
            torch.empty(batch_size, _PAST, _PAST_VARIABLES),
            known,
            torch.zeros(batch_size, dtype=torch.int64),
            torch.empty(batch_size, _FUTURE),
        )

    return Network(
        build_model=TFT, make_batch=make_batch, loss_fn=loss, optimizer="adam", unit="samples", usual_batch=1024,
        assumed=(f"{_PAST} hours before, {_FUTURE} after",),
    )  # fmt: skip
