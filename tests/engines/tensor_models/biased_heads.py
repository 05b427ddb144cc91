"""nano_gpt.py with a bias for each head by its number, as ALiBi has: a rank that counts its own heads only would compute another model."""

import runpy
from pathlib import Path

import torch
from torch.nn import functional as F

nano = runpy.run_path(str(Path(__file__).with_name("nano_gpt.py")))
make_batch, loss_fn, build_optimizer = nano["make_batch"], nano["loss_fn"], nano["build_optimizer"]


class BiasedSelfAttention(nano["CausalSelfAttention"]):
    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, dim=-1))
        slopes = 2.0 ** -torch.arange(self.n_head).div(self.n_head)
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, float("-inf"))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


def build_model():
    model = nano["build_model"]()
    for block in model.h:
        block.attn.__class__ = BiasedSelfAttention
    return model
