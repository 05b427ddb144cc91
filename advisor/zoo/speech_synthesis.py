"""Speech from text: FastPitch (Lancucki 2021) and HiFi-GAN (Kong et al. 2020), at the sizes of NVIDIA's references for LJSpeech."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network

#: Letters and mel frames (256 samples of 22,050 Hz each) of a mean sentence, and of the longest of a batch, to which all are padded.
SYMBOLS, MELS, MEAN_FRAMES, PADDED_FRAMES, PADDED_LETTERS = 148, 80, 566.0, 800, 150
_HIDDEN, _HEAD, _FFN, _LAYERS, _DROPOUT, _PREDICTOR = 384, 64, 1536, 6, 0.1, 256
#: Values of sound and mel frames of HiFi-GAN's segments.
_SEGMENT, _HOP = 8192, 256
_RATES, _KERNELS, _DILATIONS, _WIDTH = (8, 8, 2, 2), (3, 7, 11), (1, 3, 5), 512
_PERIODS, _SLOPE = (2, 3, 5, 7, 11), 0.1


class FeedForwardTransformer(nn.Module):
    """A layer of one-headed attention and two convolutions over time."""

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.out = nn.Linear(_HIDDEN, 3 * _HEAD), nn.Linear(_HEAD, _HIDDEN, bias=False)
        self.up, self.down = nn.Conv1d(_HIDDEN, _FFN, 3, padding=1), nn.Conv1d(_FFN, _HIDDEN, 3, padding=1)
        self.norm1, self.norm2 = nn.LayerNorm(_HIDDEN), nn.LayerNorm(_HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.projection(x).chunk(3, -1)
        weights = functional.softmax(torch.bmm(query, key.transpose(1, 2)) / _HEAD**0.5, -1)
        y = self.out(torch.bmm(functional.dropout(weights, _DROPOUT), value))
        x = self.norm1(x + functional.dropout(y, _DROPOUT))
        y = self.down(functional.relu(self.up(x.transpose(1, 2)))).transpose(1, 2)
        return self.norm2(x + functional.dropout(y, _DROPOUT))


class Predictor(nn.Module):
    """One number for each letter: its length, or its pitch."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(i, _PREDICTOR, 3, padding=1) for i in (_HIDDEN, _PREDICTOR))
        self.norms, self.head = nn.ModuleList(nn.LayerNorm(_PREDICTOR) for _ in range(2)), nn.Linear(_PREDICTOR, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.dropout(norm(functional.relu(conv(x.transpose(1, 2))).transpose(1, 2)), _DROPOUT)
        return self.head(x)


class Aligner(nn.Module):
    """Which frame belongs to which letter, by distances of what convolutions make of both."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Sequential(nn.Conv1d(_HIDDEN, 2 * _HIDDEN, 3, padding=1), nn.ReLU(), nn.Conv1d(2 * _HIDDEN, MELS, 1))
        self.query = nn.Sequential(
            nn.Conv1d(MELS, 2 * MELS, 3, padding=1), nn.ReLU(), nn.Conv1d(2 * MELS, MELS, 1), nn.ReLU(), nn.Conv1d(MELS, MELS, 1)
        )

    def forward(self, letters: torch.Tensor, mels: torch.Tensor) -> torch.Tensor:
        key, query = self.key(letters.transpose(1, 2)), self.query(mels)
        distance = (query[:, :, :, None] - key[:, :, None]) ** 2
        return functional.log_softmax(-0.0005 * distance.sum(1), 2)


class FastPitch(nn.Module):
    """Letters through six layers, stretched to frames, through six more."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.aligner = nn.Embedding(SYMBOLS, _HIDDEN), Aligner()
        self.encoder = nn.ModuleList(FeedForwardTransformer() for _ in range(_LAYERS))
        self.decoder = nn.ModuleList(FeedForwardTransformer() for _ in range(_LAYERS))
        self.length, self.pitch, self.energy = Predictor(), Predictor(), Predictor()
        self.pitches, self.energies = nn.Conv1d(1, _HIDDEN, 3, padding=1), nn.Conv1d(1, _HIDDEN, 3, padding=1)
        self.head = nn.Linear(_HIDDEN, MELS)

    def forward(self, letters: torch.Tensor, mels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        table = self.table(letters)
        x = table
        for layer in self.encoder:
            x = layer(x)
        aligned = self.aligner(table, mels)
        predicted = self.length(x), self.pitch(x), self.energy(x)
        for numbers, embed in zip(predicted[1:], (self.pitches, self.energies), strict=True):
            x = x + embed(numbers.transpose(1, 2)).transpose(1, 2)
        x = torch.bmm(functional.one_hot(aligned.argmax(2), letters.shape[1]).to(x.dtype), x)
        for layer in self.decoder:
            x = layer(x)
        return self.head(x), aligned, *predicted


class ResidualStack(nn.Module):
    """Three residual pairs of convolutions, the first of each pair dilated."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        pad = kernel // 2
        self.first = nn.ModuleList(nn.Conv1d(width, width, kernel, padding=pad * d, dilation=d) for d in _DILATIONS)
        self.second = nn.ModuleList(nn.Conv1d(width, width, kernel, padding=pad) for _ in _DILATIONS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(functional.leaky_relu(first(functional.leaky_relu(x, _SLOPE)), _SLOPE))
        return x


class MeanOfStacks(nn.Module):
    """The mean of stacks of different kernels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(ResidualStack(width, kernel) for kernel in _KERNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = (stack(x) for stack in self.stacks)
        for made in others:
            first = first + made
        return first / len(_KERNELS)


class Generator(nn.Module):
    """HiFi-GAN V1's: transposed convolutions to the rate of sound, and the mean of three stacks after each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(MELS, _WIDTH, 7, padding=3)
        widths = [_WIDTH // 2**i for i in range(len(_RATES) + 1)]
        self.grow = nn.ModuleList(
            nn.ConvTranspose1d(i, o, 2 * rate, rate, rate // 2) for (i, o), rate in zip(itertools.pairwise(widths), _RATES, strict=True)
        )
        self.stacks = nn.ModuleList(MeanOfStacks(o) for o in widths[1:])
        self.last = nn.Conv1d(widths[-1], 1, 7, padding=3)

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        x = self.first(mels)
        for grow, stacks in zip(self.grow, self.stacks, strict=True):
            x = stacks(grow(functional.leaky_relu(x, _SLOPE)))
        return torch.tanh(self.last(functional.leaky_relu(x)))


class PeriodDiscriminator(nn.Module):
    """Sound folded to rows of one period."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.period = period
        widths = ((1, 32), (32, 128), (128, 512), (512, 1024), (1024, 1024))
        self.convs = nn.ModuleList(nn.Conv2d(i, o, (5, 1), (3 if n < 4 else 1, 1), (2, 0)) for n, (i, o) in enumerate(widths))
        self.head = nn.Conv2d(1024, 1, (3, 1), padding=(1, 0))

    def forward(self, sound: torch.Tensor) -> list[torch.Tensor]:
        padded = functional.pad(sound, (0, -sound.shape[-1] % self.period))
        x = padded.view(*padded.shape[:-1], -1, self.period)
        maps = []
        for conv in self.convs:
            x = functional.leaky_relu(conv(x), _SLOPE)
            maps.append(x)
        return [*maps, self.head(x)]


class ScaleDiscriminator(nn.Module):
    """Sound at one rate, by grouped convolutions."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((1, 128, 15, 1, 1), (128, 128, 41, 2, 4), (128, 256, 41, 2, 16), (256, 512, 41, 4, 16), (512, 1024, 41, 4, 16),
                  (1024, 1024, 41, 1, 16), (1024, 1024, 5, 1, 1))  # fmt: skip
        self.convs = nn.ModuleList(nn.Conv1d(i, o, k, s, k // 2, groups=g) for i, o, k, s, g in shapes)
        self.head = nn.Conv1d(1024, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        maps = []
        for conv in self.convs:
            x = functional.leaky_relu(conv(x), _SLOPE)
            maps.append(x)
        return [*maps, self.head(x)]


class HiFiGAN(nn.Module):
    """Generator, five discriminators by period and three by scale."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Generator()
        self.periods, self.scales = (
            nn.ModuleList(PeriodDiscriminator(p) for p in _PERIODS),
            nn.ModuleList(ScaleDiscriminator() for _ in range(3)),
        )

    def forward(self, mels: torch.Tensor, sound: torch.Tensor) -> torch.Tensor:
        """Both losses of a step: the discriminators' on a copy of the made sound, then the generator's through them."""
        made = self.generator(mels)
        true = self.judged(sound)
        of_copy = self.judged(made.detach())
        total = torch.stack(
            [((1 - t[-1].float()) ** 2).mean() + (c[-1].float() ** 2).mean() for t, c in zip(true, of_copy, strict=True)]
        ).sum()
        for maps, wanted in zip(self.judged(made), self.judged(sound), strict=True):
            total = total + ((1 - maps[-1].float()) ** 2).mean()
            total = total + 2 * torch.stack([functional.l1_loss(a, b.detach()) for a, b in zip(maps[:-1], wanted, strict=False)]).sum()
        return total

    def judged(self, sound: torch.Tensor) -> list[list[torch.Tensor]]:
        halves = [sound]
        for _ in self.scales[1:]:
            halves.append(functional.avg_pool1d(halves[-1], 4, 2, 2))
        return [*(d(sound) for d in self.periods), *(d(x) for d, x in zip(self.scales, halves, strict=True))]


def fastpitch_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Squared errors of mels, lengths, pitches and energies, and the alignment as the reading of its scores."""
    letters, mels = batch
    made, aligned, *numbers = model(letters, mels)
    return functional.mse_loss(made.float(), mels.transpose(1, 2).float()) - aligned.mean() + sum((n.float() ** 2).mean() for n in numbers)


def gan_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What the model returns."""
    return model(*batch)


def network(name: str, _seq_len: int = 0) -> Network:
    """FastPitch on sentences, or HiFi-GAN on segments of 8,192 values."""
    if name == "hifi-gan":
        frames = _SEGMENT // _HOP
        return Network(
            build_model=HiFiGAN, make_batch=lambda n: (torch.empty(n, MELS, frames), torch.empty(n, 1, _SEGMENT)), loss_fn=gan_loss,
            optimizer="adamw", unit="samples", usual_batch=16, assumed=(f"segment of {_SEGMENT}",),
            counted=(("frame", float(frames)), ("mel", float(frames))),
        )  # fmt: skip

    def make_batch(batch_size: int) -> Batch:
        return torch.zeros(batch_size, PADDED_LETTERS, dtype=torch.int64), torch.empty(batch_size, MELS, PADDED_FRAMES)

    return Network(
        build_model=FastPitch, make_batch=make_batch, loss_fn=fastpitch_loss, optimizer="lamb", unit="samples", usual_batch=32,
        assumed=(f"sentences of {MEAN_FRAMES:g} frames padded to {PADDED_FRAMES}",), counted=(("mel", MEAN_FRAMES), ("frame", MEAN_FRAMES)),
    )  # fmt: skip
