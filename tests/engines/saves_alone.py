"""A training script in which one rank saves and the others don't, as happens where each decides from its own loss."""

import os
import sys

import torch
from torch import nn

model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(2, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if os.environ["RANK"] == sys.argv[1]:
        torch.save(model.state_dict(), sys.argv[2])
