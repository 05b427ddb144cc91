"""GPT-2 as nanoGPT writes it: q, k and v in one weight, sizes from the input and from attributes, the head tied to the token embedding."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, LAYERS, SEQ = 96, 32, 4, 2, 16


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in self.c_attn(x).split(self.n_embd, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), CausalSelfAttention(), nn.LayerNorm(WIDTH)
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe, self.ln_f = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH), nn.LayerNorm(WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def build_model():
    return GPT()


def make_batch(batch_size=4):
    tokens = torch.randint(VOCAB, (batch_size, SEQ + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)
