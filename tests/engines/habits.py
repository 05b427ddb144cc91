"""A training script with the habits of many: parameter groups, its own accumulation, clipping, a schedule, validation, checkpoints."""

import argparse

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Samples(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(16, generator=generator)
        return x, x.sum().sin()


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        yield from (self.samples[i] for i in range(len(self.samples)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 1)

    def forward(self, x, scale=1.0):
        return {"y": self.head(self.frozen(self.blocks(x * scale))).squeeze(-1)}


parser = argparse.ArgumentParser()
parser.add_argument("--stream", action="store_true")
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--samples", type=int, default=48)
parser.add_argument("--save", default="")
parser.add_argument("--resume", default="")
args = parser.parse_args()

torch.manual_seed(7)
model = Net()
decay = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
rest = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=3e-2)
if args.resume:
    saved = torch.load(args.resume, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
samples = Samples(args.samples)
loader = DataLoader(Stream(samples), batch_size=8) if args.stream else DataLoader(samples, 8, num_workers=1)
validation = DataLoader(Samples(4), batch_size=2)

total = 0.0
for i, (x, y) in enumerate(loader, start=1):
    output = model(x, scale=0.5)
    loss = nn.functional.mse_loss(output["y"], y)
    (loss / args.accumulate).backward()
    total += loss.item() / args.accumulate
    if i % args.accumulate == 0:
        norm = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"turn {i} norm {norm:.4f} loss {total:.6f}", flush=True)
        total = 0.0

model.eval()
with torch.no_grad():
    print("validation", sum(nn.functional.mse_loss(model(x)["y"], y).item() for x, y in validation))
if args.save:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr": schedule.get_last_lr()}, args.save)
