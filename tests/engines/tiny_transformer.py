"""A script in the form of four functions: a two-layer transformer on random tokens."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, SEQ = 97, 32, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm_1(x)
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (self.query(y), self.key(y), self.value(y)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build_model():
    return Tiny()


def make_batch(batch_size=4):
    return {"tokens": torch.randint(VOCAB, (batch_size, SEQ + 1))}


def loss_fn(model, batch):
    tokens = batch["tokens"]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)
