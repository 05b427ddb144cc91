"""A BERT encoder: padding mask, separate q, k and v, and the loss on masked tokens only (as many in each row)."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, LAYERS, SEQ, NUM_MASKED, MASK = 96, 32, 4, 2, 16, 3, 1


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.dense(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm_1 = SelfAttention(), nn.LayerNorm(WIDTH)
        self.intermediate, self.output = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)

    def forward(self, x, mask):
        x = self.norm_1(x + self.attention(x, mask))
        return self.norm_2(x + self.output(F.gelu(self.intermediate(x))))


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.position = nn.Embedding(VOCAB, WIDTH, padding_idx=0), nn.Embedding(SEQ, WIDTH)
        self.register_buffer("position_ids", torch.arange(SEQ), persistent=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.decoder = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[:, None, None, :].bool()
        x = self.norm(self.word(input_ids) + self.position(self.position_ids[: input_ids.shape[1]]))
        for layer in self.layer:
            x = layer(x, mask)
        return self.decoder(x)


def build_model():
    return Bert()


def make_batch(batch_size=4):
    tokens = torch.randint(2, VOCAB, (batch_size, SEQ))
    lengths = torch.randint(SEQ // 2, SEQ + 1, (batch_size,))
    attention_mask = (torch.arange(SEQ) < lengths[:, None]).long()
    masked = torch.rand(batch_size, SEQ // 2).argsort(dim=1)[:, :NUM_MASKED]
    labels = torch.full_like(tokens, -100).scatter(1, masked, tokens.gather(1, masked))
    input_ids = tokens.scatter(1, masked, MASK) * attention_mask
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def loss_fn(model, batch):
    scores = model(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
