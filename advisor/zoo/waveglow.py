"""WaveGlow (Prenger et al. 2018) at the width of NVIDIA's reference: twelve invertible steps from sound to noise, given its spectrogram."""

from __future__ import annotations

import torch
from torch import nn

from advisor.zoo.network import Batch, Network

_MELS, _HOP, _WINDOW = 80, 256, 1024
_FLOWS, _GROUP, _EARLY_EVERY, _EARLY = 12, 8, 4, 2
_LAYERS, _CHANNELS, _KERNEL = 8, 512, 3
_SEGMENT = 8000  # values of sound that a training sample has


class Coupling(nn.Module):
    """A dilated convolutional network that scales and shifts one half of the channels by the other half and the spectrogram."""

    def __init__(self, half: int) -> None:
        super().__init__()
        self.start, self.end = nn.Conv1d(half, _CHANNELS, 1), nn.Conv1d(_CHANNELS, 2 * half, 1)
        self.condition = nn.Conv1d(_MELS * _GROUP, 2 * _CHANNELS * _LAYERS, 1)
        self.dilated = nn.ModuleList(nn.Conv1d(_CHANNELS, 2 * _CHANNELS, _KERNEL, padding=2**i, dilation=2**i) for i in range(_LAYERS))
        self.split = nn.ModuleList(nn.Conv1d(_CHANNELS, (2 if i < _LAYERS - 1 else 1) * _CHANNELS, 1) for i in range(_LAYERS))

    def forward(self, half: torch.Tensor, spectrogram: torch.Tensor) -> torch.Tensor:
        x, condition = self.start(half), self.condition(spectrogram).chunk(_LAYERS, 1)
        total = torch.zeros_like(x)
        for i, (dilated, split) in enumerate(zip(self.dilated, self.split, strict=True)):
            through, gate = (dilated(x) + condition[i]).chunk(2, 1)
            y = split(torch.tanh(through) * torch.sigmoid(gate))
            if i < _LAYERS - 1:
                kept, y = y.chunk(2, 1)
                x = x + kept
            total = total + y
        return self.end(total)


class WaveGlow(nn.Module):
    """Steps of a 1 x 1 convolution and a coupling; two channels leave early after every fourth step."""

    def __init__(self) -> None:
        super().__init__()
        self.upsample = nn.ConvTranspose1d(_MELS, _MELS, _WINDOW, _HOP)
        widths = [_GROUP - _EARLY * (i // _EARLY_EVERY) for i in range(_FLOWS)]
        self.mixing = nn.ModuleList(nn.Conv1d(width, width, 1, bias=False) for width in widths)
        self.couplings = nn.ModuleList(Coupling(width // 2) for width in widths)

    def forward(self, spectrogram: torch.Tensor, sound: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        condition = self.upsample(spectrogram)[..., : sound.shape[1]].reshape(len(sound), _MELS, -1, _GROUP).transpose(2, 3).flatten(1, 2)
        x, left, scales = sound.view(len(sound), -1, _GROUP).transpose(1, 2), [], []
        for i, (mixing, coupling) in enumerate(zip(self.mixing, self.couplings, strict=True)):
            if i and i % _EARLY_EVERY == 0:
                left.append(x[:, :_EARLY])
                x = x[:, _EARLY:]
            first, second = mixing(x).chunk(2, 1)
            shift, scale = coupling(first, condition).chunk(2, 1)
            x = torch.cat((first, second * scale.exp() + shift), 1)
            scales.append(scale.sum())
        return torch.cat((*left, x), 1), torch.stack(scales).sum()


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Negative log-likelihood; the determinants of the small mixing matrices cost nothing."""
    spectrogram, sound = batch
    noise, scale = model(spectrogram, sound)
    return ((noise * noise).sum() / 2 - scale) / noise.numel()


def network(_name: str, _seq_len: int = 0) -> Network:
    """WaveGlow on segments of 8,000 values of sound."""
    frames = -(-_SEGMENT // _HOP)
    return Network(
        build_model=WaveGlow, make_batch=lambda n: (torch.empty(n, _MELS, frames), torch.empty(n, _SEGMENT)), loss_fn=loss, optimizer="adam",
        unit="samples", usual_batch=10, counted=(("sample", float(_SEGMENT)),), assumed=(f"segment of {_SEGMENT}",),
    )  # fmt: skip
