"""A transformer with routed experts, two per token. Every expert sees every token and a mask keeps what is routed to it: static shapes."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, LAYERS, SEQ, EXPERTS, TOP_K = 96, 32, 4, 2, 16, 4, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        scores, chosen = self.gate(x).topk(TOP_K, dim=-1)
        weights = torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype, device=x.device).scatter(-1, chosen, scores.softmax(dim=-1))
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y = y + weights[..., i, None] * expert(x)
        return y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.moe_norm, self.moe = nn.LayerNorm(WIDTH), MoE()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build_model():
    return Mixture()


def make_batch(batch_size=4):
    tokens = torch.randint(VOCAB, (batch_size, SEQ + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
