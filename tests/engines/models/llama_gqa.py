"""A transformers Llama with grouped queries (4 heads, 2 for keys and values); it computes its own loss."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, SEQ = 128, 16


def build_model():
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=88, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=SEQ, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_batch(batch_size=4):
    tokens = torch.randint(VOCAB, (batch_size, SEQ))
    return {"input_ids": tokens, "labels": tokens}


def loss_fn(model, batch):
    return model(**batch).loss


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
