"""CLIP with ViT-B/32 (Radford et al. 2021): images and texts, every one of a batch against every other."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network
from advisor.zoo.vit import Block

_IMAGE_WIDTH, _TEXT_WIDTH, _JOINT, _LAYERS, _PATCH, _SIDE = 768, 512, 512, 12, 32, 224
_VOCAB, _CONTEXT = 49408, 77


class ImageTower(nn.Module):
    """Patches of 32 x 32 pixels, a class token and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, _IMAGE_WIDTH, _PATCH, _PATCH, bias=False)
        self.token = nn.Parameter(torch.empty(1, 1, _IMAGE_WIDTH))
        self.positions = nn.Parameter(torch.empty((_SIDE // _PATCH) ** 2 + 1, _IMAGE_WIDTH))
        self.norm_before, self.norm_after = nn.LayerNorm(_IMAGE_WIDTH), nn.LayerNorm(_IMAGE_WIDTH)
        self.blocks = nn.ModuleList(Block(_IMAGE_WIDTH, fast_gelu=True) for _ in range(_LAYERS))
        self.projection = nn.Linear(_IMAGE_WIDTH, _JOINT, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = self.norm_before(torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions)
        for block in self.blocks:
            x = block(x)
        return self.projection(self.norm_after(x[:, 0]))


class TextTower(nn.Module):
    """Causal blocks; the last token stands for the text."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(_VOCAB, _TEXT_WIDTH), nn.Parameter(torch.empty(_CONTEXT, _TEXT_WIDTH))
        self.blocks = nn.ModuleList(Block(_TEXT_WIDTH, causal=True, fast_gelu=True) for _ in range(_LAYERS))
        self.norm, self.projection = nn.LayerNorm(_TEXT_WIDTH), nn.Linear(_TEXT_WIDTH, _JOINT, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.projection(self.norm(x)[:, -1])


class CLIP(nn.Module):
    """Both towers and the scale of their similarities, which are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.scale = ImageTower(), TextTower(), nn.Parameter(torch.empty(()))

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.scale.exp() * functional.normalize(self.image(images), dim=1) @ functional.normalize(self.text(tokens), dim=1).T


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the matching pairs, by rows and by columns."""
    similarity = model(*batch).float()
    pairs = torch.arange(len(similarity))
    return (functional.cross_entropy(similarity, pairs) + functional.cross_entropy(similarity.T, pairs)) / 2


def network(_name: str, _seq_len: int = 0) -> Network:
    """CLIP, of which a sample is one image with its text."""

    def make_batch(batch_size: int) -> Batch:
        return torch.empty(batch_size, 3, _SIDE, _SIDE), torch.zeros(batch_size, _CONTEXT, dtype=torch.int64)

    return Network(build_model=CLIP, make_batch=make_batch, loss_fn=loss, optimizer="adamw")
