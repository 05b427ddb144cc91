"""A vision transformer with a class token and positions beside its layers, separate q, k and v, and sizes from attributes."""

import torch
from torch import nn
from torch.nn import functional as F

SIZE, PATCH, WIDTH, HEADS, CLASSES = 16, 4, 32, 4, 10
TOKENS = (SIZE // PATCH) ** 2  # one patch gives way to the class token, so that the sequence is even


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.embed_dim = HEADS, WIDTH
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = (p(x).reshape(batch, tokens, self.num_heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, self.embed_dim))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.attention, self.norm_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls_token, self.positions = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x[:, 1:]], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


def build_model():
    return ViT()


def make_batch(batch_size=4):
    return torch.randn(batch_size, 3, SIZE, SIZE), torch.randint(CLASSES, (batch_size,))


def loss_fn(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)
