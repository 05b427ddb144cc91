"""A frozen transformers Llama with low-rank adapters beside its linear layers, as PEFT builds them."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, SEQ = 96, 16


class LoraLinear(nn.Module):
    """A frozen linear layer and a product of low rank."""

    def __init__(self, base_layer, rank=4):
        super().__init__()
        self.base_layer, self.dropout = base_layer, nn.Dropout(0.0)
        self.lora_A, self.lora_B = nn.Linear(base_layer.in_features, rank, bias=False), nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(self.dropout(x)))


def build_model():
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=SEQ, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).requires_grad_(False)
    for layer in model.model.layers:
        for home, names in ((layer.self_attn, ("q_proj", "v_proj", "o_proj")), (layer.mlp, ("gate_proj", "up_proj", "down_proj"))):
            for name in names:
                setattr(home, name, LoraLinear(getattr(home, name)))
    return model


def make_batch(batch_size=4):
    tokens = torch.randint(VOCAB, (batch_size, SEQ))
    return {"input_ids": tokens, "labels": tokens}


def loss_fn(model, batch):
    return model(**batch).loss


def build_optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
