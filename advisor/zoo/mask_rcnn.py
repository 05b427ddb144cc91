"""Mask R-CNN (He et al. 2017) with ResNet-50 and a feature pyramid, at the numbers of boxes that training samples.

Which boxes are sampled is not worked out (torch has no suppression of overlapping ones): their expected numbers go through the heads.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network
from advisor.zoo.resnet import ResNet

_HEIGHT, _WIDTH, _CLASSES = 800, 1216, 91
_PYRAMID, _ANCHORS = 256, 3
#: Per image: anchors that the proposal loss samples, boxes for the box head, and those of them that are positive and get a mask.
_SAMPLED_ANCHORS, _BOXES, _MASKS = 256, 512, 128


class FrozenNorm(nn.Module):
    """A batch norm whose statistics and scales stay as they are: one product and one sum."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.empty(channels, 1, 1))
        self.register_buffer("shift", torch.empty(channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.to(x.dtype) + self.shift.to(x.dtype)


def _freeze_norms(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, FrozenNorm(child.num_features))
        else:
            _freeze_norms(child)


class Pyramid(nn.Module):
    """Maps of 256 channels at strides 4 to 64."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Conv2d(256 * 2**i, _PYRAMID, 1) for i in range(4))
        self.outer = nn.ModuleList(nn.Conv2d(_PYRAMID, _PYRAMID, 3, padding=1) for _ in range(4))

    def forward(self, maps: list[torch.Tensor]) -> list[torch.Tensor]:
        x, found = self.inner[3](maps[3]), []
        for i in (3, 2, 1, 0):
            if i < 3:
                x = self.inner[i](maps[i]) + functional.interpolate(x, size=maps[i].shape[-2:])
            found.append(self.outer[i](x))
        return [*reversed(found), functional.max_pool2d(found[0], 1, 2)]


class MaskRCNN(nn.Module):
    """Backbone whose first two stages are frozen, pyramid, proposals, box head and mask head. Returns the scores of all of them."""

    def __init__(self) -> None:
        super().__init__()
        resnet = ResNet("resnet50")
        _freeze_norms(resnet)
        self.stem, self.stages, self.pyramid = resnet.stem, resnet.stages, Pyramid()
        for p in (*self.stem.parameters(), *self.stages[0].parameters()):
            p.requires_grad = False
        self.proposal = nn.Conv2d(_PYRAMID, _PYRAMID, 3, padding=1)
        self.proposal_heads = nn.ModuleList((nn.Conv2d(_PYRAMID, _ANCHORS, 1), nn.Conv2d(_PYRAMID, 4 * _ANCHORS, 1)))
        self.box = nn.Sequential(
            nn.Flatten(), nn.Linear(_PYRAMID * 49, 1024), nn.ReLU(inplace=True), nn.Linear(1024, 1024), nn.ReLU(inplace=True)
        )
        self.box_heads = nn.ModuleList((nn.Linear(1024, _CLASSES), nn.Linear(1024, 4 * _CLASSES)))
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Conv2d(_PYRAMID, _PYRAMID, 3, padding=1), nn.ReLU(inplace=True)]
        self.mask = nn.Sequential(
            *layers, nn.ConvTranspose2d(_PYRAMID, _PYRAMID, 2, 2), nn.ReLU(inplace=True), nn.Conv2d(_PYRAMID, _CLASSES, 1)
        )

    def forward(self, images: torch.Tensor, boxes: torch.Tensor, mask_boxes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        maps, x = [], self.stem(images)
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        pyramid = self.pyramid(maps)
        proposals = [functional.relu(self.proposal(level)) for level in pyramid]
        objectness, offsets = (torch.cat([head(p).flatten(1) for p in proposals], 1) for head in self.proposal_heads)
        in_boxes = self.box(_aligned(pyramid[1], boxes))
        return objectness, offsets, *(head(in_boxes) for head in self.box_heads), self.mask(_aligned(pyramid[1], mask_boxes))


def _aligned(level: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Maps of boxes, of which four places per cell are sampled; all from the pyramid's second level."""
    side = boxes.shape[2]
    sampled = functional.grid_sample(level, boxes.flatten(1, 2), align_corners=False)
    return functional.avg_pool2d(sampled.view(*sampled.shape[:2], -1, side, side).transpose(1, 2).flatten(0, 1), 2)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The five losses: of sampled anchors, of boxes and of masks."""
    images, boxes, mask_boxes, labels = batch
    objectness, offsets, classes, corners, masks = (scores.float() for scores in model(images, boxes, mask_boxes))
    anchors = objectness.topk(_SAMPLED_ANCHORS, 1)[0]
    of_anchors = (
        functional.binary_cross_entropy_with_logits(anchors, torch.ones_like(anchors)) + offsets[:, : 4 * _SAMPLED_ANCHORS].abs().mean()
    )
    of_boxes = functional.cross_entropy(classes, labels.flatten()) + corners.abs().mean()
    of_masks = functional.binary_cross_entropy_with_logits(masks[:, 0], torch.ones_like(masks[:, 0]))
    return of_anchors + of_boxes + of_masks


def network(_name: str, _seq_len: int = 0) -> Network:
    """Mask R-CNN on COCO images of 800 x 1,216 pixels."""

    def make_batch(batch_size: int) -> Batch:
        boxes, mask_boxes = torch.empty(batch_size, _BOXES, 14, 14, 2), torch.empty(batch_size, _MASKS, 28, 28, 2)
        return torch.empty(batch_size, 3, _HEIGHT, _WIDTH), boxes, mask_boxes, torch.zeros(batch_size, _BOXES, dtype=torch.int64)

    return Network(
        build_model=MaskRCNN,
        make_batch=make_batch,
        loss_fn=loss,
        usual_batch=8,
        assumed=(f"images of {_HEIGHT} x {_WIDTH}", f"{_BOXES} boxes, {_MASKS} masks"),
    )
