"""U-Net (Ronneberger et al. 2015) for 2-D images and nnU-Net (Isensee et al. 2021) for 3-D scans, at the sizes of NVIDIA's references."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network

_UNET_WIDTHS, _UNET_SIDE, _UNET_CLASSES = (64, 128, 256, 512, 1024), 572, 2
_NNUNET_CLASSES, _NNUNET_CHANNELS = 4, 4
#: Widths and patch of brain scans by the number of dimensions.
_NNUNET = {2: ((32, 64, 128, 256, 512, 512), (192, 160)), 3: ((32, 64, 128, 256, 320, 320), (128, 128, 128))}


class UNet(nn.Module):
    """Two unpadded 3 x 3 convolutions per level, a maximum on the way down, a transposed convolution and a crop on the way up."""

    def __init__(self) -> None:
        super().__init__()
        pairs = zip((1, *_UNET_WIDTHS), _UNET_WIDTHS, strict=False)
        self.down = nn.ModuleList(_two_convolutions(i, o) for i, o in pairs)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(_UNET_WIDTHS[:-1]))
        self.up = nn.ModuleList(_two_convolutions(2 * w, w) for w in reversed(_UNET_WIDTHS[:-1]))
        self.head = nn.Conv2d(_UNET_WIDTHS[0], _UNET_CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for i, level in enumerate(self.down):
            x = level(functional.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for grow, level, skipped in zip(self.grow, self.up, reversed(kept[:-1]), strict=True):
            x = grow(x)
            edge = (skipped.shape[-1] - x.shape[-1]) // 2
            x = level(torch.cat((skipped[..., edge : edge + x.shape[-2], edge : edge + x.shape[-1]], x), 1))
        return self.head(x)


def _two_convolutions(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3), nn.ReLU(inplace=True), nn.Conv2d(channels, channels, 3), nn.ReLU(inplace=True)
    )


def _normalized(dims: int, channels_in: int, channels: int, stride: int = 1) -> nn.Sequential:
    convolution, norm = (nn.Conv2d, nn.InstanceNorm2d) if dims == 2 else (nn.Conv3d, nn.InstanceNorm3d)
    return nn.Sequential(convolution(channels_in, channels, 3, stride, 1), norm(channels, affine=True), nn.LeakyReLU(0.01, inplace=True))


class NnUNet(nn.Module):
    """Two padded convolutions with instance norm per level, halved by stride; class scores at every level but the two smallest."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        widths, _ = _NNUNET[dims]
        grow, head = (nn.ConvTranspose2d, nn.Conv2d) if dims == 2 else (nn.ConvTranspose3d, nn.Conv3d)
        self.down = nn.ModuleList(
            nn.Sequential(_normalized(dims, i, o, 2 if level else 1), _normalized(dims, o, o))
            for level, (i, o) in enumerate(zip((_NNUNET_CHANNELS, *widths), widths, strict=False))
        )
        levels = list(zip(reversed(widths[1:]), reversed(widths[:-1]), strict=True))
        self.grow = nn.ModuleList(grow(i, o, 2, 2, bias=False) for i, o in levels)
        self.up = nn.ModuleList(nn.Sequential(_normalized(dims, 2 * o, o), _normalized(dims, o, o)) for _, o in levels)
        self.heads = nn.ModuleList(head(o, _NNUNET_CLASSES, 1, bias=False) for _, o in levels[2:])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        kept, found = [], []
        for level in self.down:
            x = level(x)
            kept.append(x)
        for i, (grow, level) in enumerate(zip(self.grow, self.up, strict=True)):
            x = level(torch.cat((grow(x), kept[-i - 2]), 1))
            if i >= len(self.up) - len(self.heads):
                found.append(self.heads[i - len(self.up)](x))
        return found


def unet_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of pixels and the Dice coefficient of classes."""
    images, labels = batch
    return _pixel_loss(model(images), labels)


def nnunet_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The same at each level that has scores."""
    scans, labels = batch
    scores = model(scans)
    total = _pixel_loss(scores[-1], labels)
    for i, coarse in enumerate(reversed(scores[:-1]), start=1):
        step = 2**i
        total = total + _pixel_loss(coarse, labels[:, *(slice(None, None, step),) * (labels.dim() - 1)]) / step
    return total


def _pixel_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    scores = scores.float()
    shares = functional.softmax(scores, 1)
    wanted = functional.one_hot(labels, scores.shape[1]).movedim(-1, 1)
    places = tuple(range(2, scores.dim()))
    dice = 2 * (shares * wanted).sum(places) / (shares.sum(places) + wanted.sum(places))
    return functional.cross_entropy(scores, labels) + 1 - dice.mean()


def network(name: str, _seq_len: int = 0) -> Network:
    """U-Net on 572 x 572 images, or nnU-Net on brain scans: slices of 192 x 160, or patches of 128 x 128 x 128 voxels."""
    if name == "unet":
        return Network(
            build_model=UNet, make_batch=lambda n: (torch.empty(n, 1, _UNET_SIDE, _UNET_SIDE), torch.zeros(n, 388, 388, dtype=torch.int64)),
            loss_fn=unet_loss, optimizer="adam", usual_batch=8,
        )  # fmt: skip
    dims = 2 if name == "nnunet-2d" else 3
    patch = _NNUNET[dims][1]
    return Network(
        build_model=lambda: NnUNet(dims), make_batch=lambda n: (torch.empty(n, _NNUNET_CHANNELS, *patch), torch.zeros(n, *patch, dtype=torch.int64)),
        loss_fn=nnunet_loss, optimizer="adam", usual_batch=64 if dims == 2 else 2,
    )  # fmt: skip
