"""A transformers GPT-2: Conv1D layers, q, k and v in one of them, the head tied to the token embedding; it computes its own loss."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB, SEQ = 96, 16


def build_model():
    sizes = {"vocab_size": VOCAB, "n_positions": SEQ, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def make_batch(batch_size=4):
    tokens = torch.randint(VOCAB, (batch_size, SEQ))
    return {"input_ids": tokens, "labels": tokens}


def loss_fn(model, batch):
    return model(**batch).loss


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)
