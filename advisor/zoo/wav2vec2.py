"""wav2vec 2.0 (Baevski et al. 2020): convolutions over sound, a transformer, and a choice among quantised frames."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network


class Size(NamedTuple):
    """Sizes of a variant."""

    layers: int
    hidden: int
    heads: int
    code: int
    normalized: bool  # a layer norm after each convolution, and norms before the parts of a layer


_SIZES = {"base": Size(12, 768, 12, 256, False), "large": Size(24, 1024, 16, 768, True)}
_CHANNELS, _KERNELS, _STRIDES = 512, (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)
_GROUPS, _ENTRIES, _CODE, _DISTRACTORS, _DROPOUT = 2, 320, 128, 100, 0.1
_SECONDS, _RATE, _MASKED_SHARE = 15.6, 16000, 0.49  # the longest crop of LibriSpeech, 250,000 values


class Features(nn.Module):
    """Seven convolutions, 320 values of sound for each frame."""

    def __init__(self, *, normalized: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(_CHANNELS if i else 1, _CHANNELS, k, s, bias=normalized)
            for i, (k, s) in enumerate(zip(_KERNELS, _STRIDES, strict=True))
        )
        self.norms = nn.ModuleList(
            nn.LayerNorm(_CHANNELS) if normalized else nn.Identity() if i else nn.GroupNorm(_CHANNELS, _CHANNELS)
            for i in range(len(_KERNELS))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = conv(x)
            x = norm(x.transpose(1, 2)).transpose(1, 2) if isinstance(norm, nn.LayerNorm) else norm(x)
            x = functional.gelu(x)
        return x


class Layer(nn.Module):
    """Attention and feed-forward, with norms before or after each."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.first = size.heads, size.normalized
        self.query, self.key, self.value, self.out = (nn.Linear(size.hidden, size.hidden) for _ in range(4))
        self.up, self.down = nn.Linear(size.hidden, 4 * size.hidden), nn.Linear(4 * size.hidden, size.hidden)
        self.norm1, self.norm2 = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x) if self.first else x
        query, key, value = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        weights = functional.softmax(torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-1, -2)), -1)
        y = self.out(torch.matmul(functional.dropout(weights, _DROPOUT), value).transpose(1, 2).flatten(2))
        x = x + functional.dropout(y, _DROPOUT)
        y = self.norm2(x) if self.first else self.norm1(x)
        x = x if self.first else y
        y = functional.dropout(self.down(functional.dropout(functional.gelu(self.up(y)), _DROPOUT)), _DROPOUT)
        return x + y if self.first else self.norm2(x + y)


class Wav2Vec2(nn.Module):
    """The network in pre-training; the loss is its output."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.features, self.norm = Features(normalized=size.normalized), nn.LayerNorm(_CHANNELS)
        self.project, self.mask = nn.Linear(_CHANNELS, size.hidden), nn.Parameter(torch.empty(size.hidden))
        self.positions, self.encoder_norm = nn.Conv1d(size.hidden, size.hidden, 128, padding=64, groups=16), nn.LayerNorm(size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.chooser, self.codes = (
            nn.Linear(_CHANNELS, _GROUPS * _ENTRIES),
            nn.Parameter(torch.empty(_GROUPS * _ENTRIES, size.code // _GROUPS)),
        )
        self.quantised, self.final = nn.Linear(size.code, size.code), nn.Linear(size.hidden, size.code)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.features(sound[:, None]).transpose(1, 2))
        num_masked = round(_MASKED_SHARE * found.shape[1])
        x = functional.dropout(self.project(found), _DROPOUT)
        x = torch.cat((self.mask.expand(len(x), num_masked, -1).to(x.dtype), x[:, num_masked:]), 1)
        x = x + functional.gelu(self.positions(x.transpose(1, 2))[..., :-1]).transpose(1, 2)
        x = functional.dropout(self.encoder_norm(x), _DROPOUT)
        for layer in self.layers:
            x = layer(x)
        chosen = self.chooser(found[:, :num_masked]).float()
        shares = functional.gumbel_softmax(chosen.view(*chosen.shape[:2], _GROUPS, _ENTRIES), hard=True)
        codes = torch.einsum("bmge,gec->bmgc", shares, self.codes.view(_GROUPS, _ENTRIES, -1).float()).flatten(2)
        truth, guess = self.quantised(codes), self.final(x[:, :num_masked])
        others = truth.detach()[:, torch.zeros(_DISTRACTORS, dtype=torch.int64)]
        choices = torch.cat((truth[:, :, None], others[:, None].expand(-1, num_masked, -1, -1)), 2)
        scores = functional.cosine_similarity(guess[:, :, None].float(), choices.float(), dim=-1) / 0.1
        return functional.cross_entropy(scores.flatten(0, 1), torch.zeros(scores.shape[:2], dtype=torch.int64).flatten())


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What the model returns."""
    return model(*batch)


def network(name: str, _seq_len: int = 0) -> Network:
    """wav2vec 2.0 on crops of 15.6 s."""
    return Network(
        build_model=lambda: Wav2Vec2(_SIZES[name.rpartition("-")[2]]), make_batch=lambda n: (torch.empty(n, round(_SECONDS * _RATE)),),
        loss_fn=loss, optimizer="adam", unit="samples", usual_batch=8, assumed=(f"audio_s = {_SECONDS}",),
    )  # fmt: skip
