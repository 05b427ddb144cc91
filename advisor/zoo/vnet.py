"""V-Net (Milletari et al. 2016) for 3-D scans, and the U-Net that NVIDIA's reference finds industrial defects with."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network

#: Channels of each level and its 5 x 5 x 5 convolutions on the way down; side of the cubes of hippocampus scans.
_LEVELS, _SIDE, _CLASSES = ((16, 1), (32, 2), (64, 3), (128, 3), (256, 3)), 32, 3
_WIDTHS, _IMAGE = (32, 64, 128, 256), 512


class Residual(nn.Module):
    """Convolutions around which the input goes."""

    def __init__(self, inner: int, channels: int, num: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv3d(channels if i else inner, channels, 5, padding=2) for i in range(num))
        self.norms, self.acts = (
            nn.ModuleList(nn.BatchNorm3d(channels) for _ in range(num)),
            nn.ModuleList(nn.PReLU(channels) for _ in range(num)),
        )

    def forward(self, x: torch.Tensor, around: torch.Tensor) -> torch.Tensor:
        for i, (conv, norm, act) in enumerate(zip(self.convs, self.norms, self.acts, strict=True)):
            x = norm(conv(x))
            x = act(x + around if i == len(self.convs) - 1 else x)
        return x


def _step(inner: int, out: int, *, up: bool = False) -> nn.Sequential:
    conv = nn.ConvTranspose3d(inner, out, 2, 2) if up else nn.Conv3d(inner, out, 2, 2)
    return nn.Sequential(conv, nn.BatchNorm3d(out), nn.PReLU(out))


class VNet(nn.Module):
    """Five levels of residual convolutions, halved and doubled by convolutions with stride."""

    def __init__(self) -> None:
        super().__init__()
        widths = [width for width, _ in _LEVELS]
        self.down = nn.ModuleList(Residual(width if i else 1, width, num) for i, (width, num) in enumerate(_LEVELS))
        self.shrink = nn.ModuleList(_step(i, o) for i, o in itertools.pairwise(widths))
        wider = [256, *(2 * w for w in reversed(widths[1:-1]))]
        self.grow = nn.ModuleList(_step(i, w, up=True) for i, w in zip(wider, reversed(widths[:-1]), strict=True))
        self.up = nn.ModuleList(Residual(2 * w, 2 * w, num) for w, num in reversed(_LEVELS[:-1]))
        self.head = nn.Conv3d(2 * widths[0], _CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for i, level in enumerate(self.down):
            x = self.shrink[i - 1](x) if i else x
            x = level(x, x)
            kept.append(x)
        for grow, level, skipped in zip(self.grow, self.up, reversed(kept[:-1]), strict=True):
            x = torch.cat((grow(x), skipped), 1)
            x = level(x, x)
        return self.head(x)


def _pair(inner: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, out, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(out, out, 3, padding=1), nn.ReLU(inplace=True)
    )


class TinyUNet(nn.Module):
    """Four levels of two padded convolutions, 32 channels on the first, and one mask."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(_pair(i, o) for i, o in zip((1, *_WIDTHS), _WIDTHS, strict=False))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(_WIDTHS[:-1]))
        self.up, self.head = nn.ModuleList(_pair(2 * w, w) for w in reversed(_WIDTHS[:-1])), nn.Conv2d(_WIDTHS[0], 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for i, level in enumerate(self.down):
            x = level(functional.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for grow, level, skipped in zip(self.grow, self.up, reversed(kept[:-1]), strict=True):
            x = level(torch.cat((grow(x), skipped), 1))
        return self.head(x)


def scan_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of voxels."""
    scans, labels = batch
    return functional.cross_entropy(model(scans).float(), labels)


def defect_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Binary cross-entropy of pixels and the Dice coefficient of the mask."""
    images, masks = batch
    scores, masks = model(images).float(), masks.float()
    shares = torch.sigmoid(scores)
    dice = 2 * (shares * masks).sum() / (shares.sum() + masks.sum())
    return functional.binary_cross_entropy_with_logits(scores, masks) + 1 - dice


def network(name: str, _seq_len: int = 0) -> Network:
    """V-Net on cubes of 32 voxels, or the small U-Net on grey images of 512 x 512."""
    if name == "unet-industrial":
        shape = (1, _IMAGE, _IMAGE)
        return Network(
            build_model=TinyUNet, make_batch=lambda n: (torch.empty(n, *shape), torch.empty(n, *shape)), loss_fn=defect_loss,
            optimizer="rmsprop", usual_batch=16, shares_batch=True,
        )  # fmt: skip
    cube = (_SIDE,) * 3
    return Network(
        build_model=VNet, make_batch=lambda n: (torch.empty(n, 1, *cube), torch.zeros(n, *cube, dtype=torch.int64)), loss_fn=scan_loss,
        optimizer="sgd-momentum", usual_batch=64, assumed=(f"cubes of {_SIDE} voxels",),
    )  # fmt: skip
