"""A frozen tiny transformer with low-rank adapters in its layers, read from a data set; its head is tied to its embedding."""

import tiny_transformer
import torch
from tiny_transformer import SEQ, VOCAB, WIDTH, Tiny
from torch import nn
from torch.utils.data import Dataset


class Adapted(nn.Module):
    """A frozen layer and what is learnt beside it."""

    def __init__(self, frozen):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


class Sequences(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"tokens": torch.randint(VOCAB, (SEQ + 1,), generator=torch.Generator().manual_seed(index))}


def build_model():
    model = Tiny().requires_grad_(False)
    model.head.weight = model.embed.weight
    model.layers = nn.ModuleList(Adapted(layer) for layer in model.layers)
    return model


def make_batch(batch_size=4):
    return tiny_transformer.make_batch(batch_size)


def make_dataset():
    return Sequences()


def loss_fn(model, batch):
    return tiny_transformer.loss_fn(model, batch)


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)
