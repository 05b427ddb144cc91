"""Speech recognition: Jasper 10x5 (Li et al. 2019, dense residual) and QuartzNet 15x5 (Kriman et al. 2019), trained with CTC on LibriSpeech."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network

_FEATURES, _LETTERS, _DROPOUT = 64, 29, 0.2
#: Longest utterance of the training set.
_AUDIO_S = 16.7


class Layer(NamedTuple):
    """Kernel, width, and how many convolutions follow each other around one residual sum."""

    kernel: int
    width: int
    depth: int = 5


_JASPER = tuple(Layer(k, w) for k, w in ((11, 256), (13, 384), (17, 512), (21, 640), (25, 768)) for _ in range(2))
_QUARTZNET = tuple(Layer(k, w) for k, w in ((33, 256), (39, 256), (51, 512), (63, 512), (75, 512)) for _ in range(3))


def convolution(channels: int, layer: Layer, *, separable: bool, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """One convolution over time with its norm; separable: per channel, then across channels."""
    padding, options = dilation * (layer.kernel // 2), {"stride": stride, "dilation": dilation, "bias": False}
    if separable:
        per_channel = nn.Conv1d(channels, channels, layer.kernel, padding=padding, groups=channels, **options)  # type: ignore[arg-type]
        return nn.Sequential(per_channel, nn.Conv1d(channels, layer.width, 1, bias=False), nn.BatchNorm1d(layer.width))
    full = nn.Conv1d(channels, layer.width, layer.kernel, padding=padding, **options)  # type: ignore[arg-type]
    return nn.Sequential(full, nn.BatchNorm1d(layer.width))


class Block(nn.Module):
    """Convolutions, to whose last one all given inputs are added, each through a 1 x 1 convolution."""

    def __init__(self, inputs: list[int], layer: Layer, *, separable: bool) -> None:
        super().__init__()
        widths = [inputs[-1], *([layer.width] * (layer.depth - 1))]
        self.convolutions = nn.ModuleList(convolution(w, layer, separable=separable) for w in widths)
        self.residuals = nn.ModuleList(convolution(w, Layer(1, layer.width), separable=False) for w in inputs)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        x = inputs[-1]
        for layer in self.convolutions[:-1]:
            x = functional.dropout(functional.relu(layer(x)), _DROPOUT)
        x = self.convolutions[-1](x)
        for y, residual in zip(inputs, self.residuals, strict=True):
            x = x + residual(y)
        return functional.dropout(functional.relu(x), _DROPOUT)


class Recogniser(nn.Module):
    """A convolution that halves the frames, blocks, and three more convolutions to letters.

    Args:
        layers: the blocks.
        dense: whether a block's residual sum takes the outputs of all blocks before it.
        ends: first layer, and the two before the letters.
    """

    def __init__(self, layers: tuple[Layer, ...], ends: tuple[Layer, Layer, Layer], *, dense: bool) -> None:
        super().__init__()
        self.dense, first, wide = dense, ends[0], ends[1]
        self.first, inputs = convolution(_FEATURES, first, separable=not dense, stride=2), [first.width]
        self.blocks = nn.ModuleList()
        for layer in layers:
            self.blocks.append(Block(inputs, layer, separable=not dense))
            inputs = [*inputs, layer.width] if dense else [layer.width]
        self.last = nn.ModuleList((
            convolution(inputs[-1], wide, separable=not dense, dilation=2), convolution(wide.width, ends[2], separable=False),
        ))  # fmt: skip
        self.head = nn.Conv1d(ends[2].width, _LETTERS, 1)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        found = [functional.dropout(functional.relu(self.first(frames)), _DROPOUT)]
        for block in self.blocks:
            found.append(block(*found))
            found = found if self.dense else found[-1:]
        x = found[-1]
        for layer in self.last:
            x = functional.dropout(functional.relu(layer(x)), 2 * _DROPOUT)
        return functional.log_softmax(self.head(x), 1)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """CTC, counted as the reading of all letters' scores: its own recursion over frames is short beside the convolutions."""
    frames, text = batch
    scores = model(frames)
    return -scores.gather(1, text[:, None, : scores.shape[-1]]).mean()


def network(name: str, _seq_len: int = 0) -> Network:
    """A recogniser of utterances of 16.7 s, the longest that LibriSpeech training keeps."""
    frames = round(100 * _AUDIO_S)

    def build() -> nn.Module:
        if name == "jasper-10x5":
            return Recogniser(_JASPER, (Layer(11, 256), Layer(29, 896), Layer(1, 1024)), dense=True)
        return Recogniser(_QUARTZNET, (Layer(33, 256), Layer(87, 512), Layer(1, 1024)), dense=False)

    def make_batch(batch_size: int) -> Batch:
        return torch.empty(batch_size, _FEATURES, frames), torch.zeros(batch_size, frames, dtype=torch.int64)

    return Network(
        build_model=build,
        make_batch=make_batch,
        loss_fn=loss,
        optimizer="adam",
        unit="samples",
        usual_batch=64,
        assumed=(f"audio_s = {_AUDIO_S}",),
    )
