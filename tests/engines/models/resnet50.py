"""A narrow bottleneck ResNet with batch normalisation: two stages of two blocks."""

import torch
from torch import nn
from torch.nn import functional as F

CLASSES, IMAGE_SIZE = 10, 32


class Bottleneck(nn.Module):
    def __init__(self, in_channels, width, stride=1):
        super().__init__()
        out_channels = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(in_channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + identity)


class ResNet(nn.Module):
    def __init__(self, num_blocks=(2, 2), width=8):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width)
        channels = width
        for i, count in enumerate(num_blocks):
            layer = nn.Sequential()
            for j in range(count):
                layer.append(Bottleneck(channels, width << i, stride=2 if i and not j else 1))
                channels = 4 * (width << i)
            setattr(self, f"layer{i + 1}", layer)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, CLASSES)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def build_model():
    return ResNet()


def make_batch(batch_size=8):
    return torch.randn(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE), torch.randint(CLASSES, (batch_size,))


def loss_fn(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
