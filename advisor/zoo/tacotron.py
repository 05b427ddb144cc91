"""Tacotron 2 (Shen et al. 2018) at the sizes of NVIDIA's reference: a recurrent decoder that makes one mel frame at each step."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network
from advisor.zoo.speech_synthesis import MEAN_FRAMES, MELS, PADDED_FRAMES, PADDED_LETTERS, SYMBOLS

_WIDTH, _PRENET, _CELL, _ATTENTION, _FILTERS = 512, 256, 1024, 128, 32
_TRACED_STEPS = 8  # all steps after the first are alike


def _convolution(inner: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(inner, out, 5, padding=2), nn.BatchNorm1d(out))


class Step(nn.Module):
    """One step of the decoder: a cell that attends to the letters, by what it attended to before, and a second cell."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(_PRENET + _WIDTH, _CELL), nn.LSTM(_CELL + _WIDTH, _CELL)
        self.query, self.score = nn.Linear(_CELL, _ATTENTION, bias=False), nn.Linear(_ATTENTION, 1, bias=False)
        self.places, self.place = nn.Conv1d(2, _FILTERS, 31, padding=15, bias=False), nn.Linear(_FILTERS, _ATTENTION, bias=False)
        self.mel, self.stop = nn.Linear(_CELL + _WIDTH, MELS), nn.Linear(_CELL + _WIDTH, 1)

    def forward(
        self, frame: torch.Tensor, state: tuple[torch.Tensor, ...], memory: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Mel frame with the stop token, and what the next step takes over: context, weights and the sum of all weights."""
        context, weights, summed = state
        asked = functional.dropout(self.first(torch.cat((frame, context), 1)[None])[0][0], 0.1)
        places = self.place(self.places(torch.stack((weights, summed), 1)).transpose(1, 2))
        scores = self.score(torch.tanh(self.query(asked)[:, None] + places + keys)).squeeze(-1)
        weights = functional.softmax(scores, 1)
        context = torch.bmm(weights[:, None].to(memory.dtype), memory).squeeze(1)
        told = functional.dropout(self.second(torch.cat((asked, context), 1)[None])[0][0], 0.1)
        both = torch.cat((told, context), 1)
        return torch.cat((self.mel(both), self.stop(both)), 1), (context, weights, summed + weights)


class Steps(nn.Module):
    """The steps; all are one module, called again."""

    def __init__(self) -> None:
        super().__init__()
        step = Step()
        self.step = nn.ModuleList([step] * _TRACED_STEPS)

    def forward(self, frames: torch.Tensor, memory: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        state, made = (memory[:, 0], memory[:, :, 0], memory[:, :, 0]), []
        for i, step in enumerate(self.step):
            mel, state = step(frames[:, i], state, memory, keys)
            made.append(mel)
        return torch.stack(made, 2)


class Tacotron2(nn.Module):
    """Letters through convolutions and a recurrent layer, the decoder's steps, and convolutions over the frames made."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.convs = nn.Embedding(SYMBOLS, _WIDTH), nn.ModuleList(_convolution(_WIDTH, _WIDTH) for _ in range(3))
        self.recurrent = nn.LSTM(_WIDTH, _WIDTH // 2, batch_first=True, bidirectional=True)
        self.prenet = nn.ModuleList(nn.Linear(i, _PRENET, bias=False) for i in (MELS, _PRENET))
        self.keys, self.decoder = nn.Linear(_WIDTH, _ATTENTION, bias=False), Steps()
        widths = (MELS, _WIDTH, _WIDTH, _WIDTH, _WIDTH, MELS)
        self.postnet = nn.ModuleList(_convolution(i, o) for i, o in itertools.pairwise(widths))

    def forward(self, letters: torch.Tensor, mels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.table(letters).transpose(1, 2)
        for conv in self.convs:
            x = functional.dropout(functional.relu(conv(x)), 0.5)
        memory, _ = self.recurrent(x.transpose(1, 2))
        frames = mels.transpose(1, 2)
        for layer in self.prenet:
            frames = functional.dropout(functional.relu(layer(frames)), 0.5)
        steps = self.decoder(frames, memory, self.keys(memory))
        made = mels + functional.pad(steps[:, :-1], (0, mels.shape[2] - _TRACED_STEPS))
        x = made
        for i, conv in enumerate(self.postnet):
            x = conv(x) if i == len(self.postnet) - 1 else torch.tanh(conv(x))
            x = functional.dropout(x, 0.5)
        return made, made + x, steps[:, -1]


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Squared errors of the mels before and after the last convolutions, and whether the sentence is over."""
    letters, mels = batch
    made, better, stop = model(letters, mels)
    ended = functional.binary_cross_entropy_with_logits(stop.float(), torch.zeros_like(stop).float())
    return functional.mse_loss(made.float(), mels.float()) + functional.mse_loss(better.float(), mels.float()) + ended


def network(_name: str, _seq_len: int = 0) -> Network:
    """Tacotron 2 on sentences padded to the longest of the batch; its tables count mel frames."""

    def make_batch(batch_size: int) -> Batch:
        return torch.zeros(batch_size, PADDED_LETTERS, dtype=torch.int64), torch.empty(batch_size, MELS, PADDED_FRAMES)

    return Network(
        build_model=Tacotron2, make_batch=make_batch, loss_fn=loss, optimizer="adam", unit="samples", usual_batch=128,
        assumed=(f"sentences of {MEAN_FRAMES:g} frames padded to {PADDED_FRAMES}",), counted=(("mel", MEAN_FRAMES), ("frame", MEAN_FRAMES)),
        repeats=(("decoder", PADDED_FRAMES // _TRACED_STEPS),),
    )  # fmt: skip
