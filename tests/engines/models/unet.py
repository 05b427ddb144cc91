"""A small diffusion U-Net: residual blocks with group normalisation, a time embedding, skip connections."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, IMAGE_SIZE, NUM_TIMES = 16, 16, 100


class ResBlock(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, in_channels), nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time = nn.Linear(4 * WIDTH, out_channels)
        self.norm2, self.conv2 = nn.GroupNorm(4, out_channels), nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.skip = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x, time):
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Embedding(NUM_TIMES, WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU())
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.down1, self.shrink1 = ResBlock(WIDTH, WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.down2, self.shrink2 = ResBlock(WIDTH, 2 * WIDTH), nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, stride=2, padding=1)
        self.middle = ResBlock(2 * WIDTH, 2 * WIDTH)
        self.up2, self.up1 = ResBlock(4 * WIDTH, WIDTH), ResBlock(2 * WIDTH, WIDTH)
        self.norm, self.head = nn.GroupNorm(4, WIDTH), nn.Conv2d(WIDTH, 3, 3, padding=1)

    def forward(self, x, time):
        time = self.time(time)
        first = self.down1(self.stem(x), time)
        second = self.down2(self.shrink1(first), time)
        x = self.middle(self.shrink2(second), time)
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2.0), second], dim=1), time)
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2.0), first], dim=1), time)
        return self.head(F.silu(self.norm(x)))


def build_model():
    return UNet()


def make_batch(batch_size=4):
    shape = (batch_size, 3, IMAGE_SIZE, IMAGE_SIZE)
    return {"images": torch.randn(shape), "noise": torch.randn(shape), "times": torch.randint(NUM_TIMES, (batch_size,))}


def loss_fn(model, batch):
    share = (batch["times"].float() / NUM_TIMES)[:, None, None, None]
    noisy = (1 - share).sqrt() * batch["images"] + share.sqrt() * batch["noise"]
    return F.mse_loss(model(noisy, batch["times"]), batch["noise"])


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)
