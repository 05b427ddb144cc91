"""A training script that goes past `model(...)`: data parallelism would never see its forward passes."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, x):
        return self.layer(x).square().mean()


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model.training_step(torch.randn(2, 4)).backward()
    optimizer.step()
