"""Train ResNet-50 on synthetic images. Declares the four functions that the advisor (and the files it writes) can call.

python examples/resnet50.py
advise examples/resnet50.py --gpu a100-sxm-80gb --global-batch 2048
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = int(os.environ.get("RESNET_WIDTH", "64"))  # 64 is ResNet-50; smaller ones train on a laptop
IMAGE_SIZE = int(os.environ.get("RESNET_IMAGE_SIZE", "224"))


class Bottleneck(nn.Module):
    def __init__(self, in_channels, width, stride=1):
        super().__init__()
        out_channels = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(in_channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels))

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, num_blocks=(3, 4, 6, 3), width=64, num_classes=1000):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        channels, stages = width, []
        for i, count in enumerate(num_blocks):
            blocks = []
            for j in range(count):
                blocks.append(Bottleneck(channels, width << i, stride=2 if i and j == 0 else 1))
                channels = 4 * (width << i)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images):
        x = self.stages(self.stem(images))
        return self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))


def build_model():
    return ResNet(width=WIDTH)


def make_batch(batch_size=64):
    return torch.randn(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE), torch.randint(1000, (batch_size,))


def loss_fn(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


if __name__ == "__main__":
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model().to(device)
    optimizer = build_optimizer(model)
    for step in range(100):
        images, labels = make_batch(64)
        loss = loss_fn(model, (images.to(device), labels.to(device)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
