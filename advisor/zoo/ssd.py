"""SSD300 with ResNet-50 (Liu et al. 2016; backbone and loss as in NVIDIA's reference): 8,732 boxes on six feature maps, 81 classes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from advisor.zoo.network import Batch, Network
from advisor.zoo.resnet import Block, ResNet

_CHANNELS = (1024, 512, 512, 256, 256, 256)
_INNER = (256, 256, 128, 128, 128)
_BOXES_PER_CELL = (4, 6, 6, 6, 4, 4)
_CLASSES, _BOXES, _SIDE = 81, 8732, 300


class SSD300(nn.Module):
    """Backbone up to the third stage, which keeps its resolution; five smaller maps; a box and a class head on each."""

    def __init__(self) -> None:
        super().__init__()
        resnet = ResNet("resnet50")
        first: Block = resnet.stages[2][0]  # type: ignore[index]
        first.convs[1].stride = first.shortcut[0].stride = (1, 1)  # type: ignore[assignment]
        self.backbone = nn.Sequential(resnet.stem, *resnet.stages[:3])
        self.extra = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels_in, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
                nn.Conv2d(inner, channels, 3, *((2, 1) if i < 3 else (1, 0)), bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
            )
            for i, (channels_in, inner, channels) in enumerate(zip(_CHANNELS, _INNER, _CHANNELS[1:], strict=False))
        )  # fmt: skip
        self.boxes = nn.ModuleList(nn.Conv2d(c, 4 * n, 3, padding=1) for c, n in zip(_CHANNELS, _BOXES_PER_CELL, strict=True))
        self.classes = nn.ModuleList(nn.Conv2d(c, _CLASSES * n, 3, padding=1) for c, n in zip(_CHANNELS, _BOXES_PER_CELL, strict=True))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        maps = [self.backbone(images)]
        for layer in self.extra:
            maps.append(layer(maps[-1]))
        boxes = [head(x).flatten(2).reshape(len(x), 4, -1) for head, x in zip(self.boxes, maps, strict=True)]
        classes = [head(x).flatten(2).reshape(len(x), _CLASSES, -1) for head, x in zip(self.classes, maps, strict=True)]
        return torch.cat(boxes, 2), torch.cat(classes, 2)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Smooth L1 of the matched boxes and cross-entropy with three hard negatives for each."""
    images, true_boxes, true_classes = batch
    boxes, classes = (scores.float() for scores in model(images))
    matched = true_classes > 0
    num_matched = matched.sum(1)
    of_boxes = (functional.smooth_l1_loss(boxes, true_boxes.float(), reduction="none").sum(1) * matched).sum(1)
    entropy = functional.cross_entropy(classes, true_classes, reduction="none")
    order = entropy.masked_fill(matched, 0.0).sort(1, descending=True)[1]
    hard = order.sort(1)[1] < (3 * num_matched).clamp(max=_BOXES)[:, None]
    of_classes = (entropy * (matched | hard)).sum(1)
    return ((of_boxes + of_classes) / num_matched.clamp(min=1)).mean()


def network(_name: str, _seq_len: int = 0) -> Network:
    """SSD300, trained on COCO."""

    def make_batch(batch_size: int) -> Batch:
        images = torch.empty(batch_size, 3, _SIDE, _SIDE)
        return images, torch.empty(batch_size, 4, _BOXES), torch.zeros(batch_size, _BOXES, dtype=torch.int64)

    return Network(build_model=SSD300, make_batch=make_batch, loss_fn=loss, usual_batch=128)
