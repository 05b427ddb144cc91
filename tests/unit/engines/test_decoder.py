"""A decoder's sizes from its parameters' shapes, and the reason where they can't be told."""

from __future__ import annotations

import pytest
from framework_cases import GPT2_SMALL, LLAMA_8B

from advisor.engines.decoder import decoder

LAYERS = {"block_paths": [f"layers.{i}" for i in range(12)]}


def changed(part: str, **shapes: list[int]) -> dict:
    return {part: {**LLAMA_8B[part], **{name.replace("__", "."): shape for name, shape in shapes.items()}}}


def test_sizes_and_kinds_of_llama_and_gpt2() -> None:
    llama, gpt2 = decoder(LAYERS | LLAMA_8B), decoder(LAYERS | GPT2_SMALL)
    assert (llama.ffn_size, llama.gated, llama.rms_norm, llama.biases, llama.tied, llama.num_positions) == (
        14336,
        True,
        True,
        False,
        False,
        0,
    )
    assert (gpt2.ffn_size, gpt2.gated, gpt2.rms_norm, gpt2.biases, gpt2.tied, gpt2.num_positions) == (3072, False, False, True, True, 1024)
    assert (gpt2.num_layers, gpt2.hidden_size, gpt2.num_heads, gpt2.num_kv_heads, gpt2.vocab_size, gpt2.seq_len) == (
        12,
        768,
        12,
        12,
        50257,
        1024,
    )


def test_weights_may_be_stored_the_other_way_round() -> None:
    turned = {name: shape[::-1] for name, shape in GPT2_SMALL["block_parameters"].items()}
    assert decoder(LAYERS | GPT2_SMALL | {"block_parameters": turned}) == decoder(LAYERS | GPT2_SMALL)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"block_parameters": {}}, "no equal layers"),
        ({"seq_len": 0, "vocab_size": 0}, "vocab_size and seq_len aren't known"),
        ({"causal_attention": False, "class": "Encoder"}, "later positions"),
        (changed("block_parameters", mlp__gate__weight=[64, 4096]), "experts, adapters"),
        (changed("block_parameters", self_attn__k_proj__weight=[4096, 4096]), "aren't those of q, k, v"),
        ({"block_modules": {"norm": "RMSNorm"}}, "two in a layer"),
        ({"outer_modules": {"embed": "Embedding", "norm": "LayerNorm"}}, "several kinds"),
        (changed("block_parameters", self_attn__q_proj__bias=[4096]), "only some of its linear layers have biases"),
        ({"outer_modules": {"model.norm": "LlamaRMSNorm"}}, "embeddings aren't"),
        (changed("outer_parameters", lm_head__bias=[128256]), "its head has a bias"),
        ({"num_kv_heads": 16}, "experts, adapters"),
    ],
)
def test_what_is_no_plain_decoder_has_a_reason(facts: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decoder(LAYERS | LLAMA_8B | facts)


def test_transformers_decoders_mask_by_a_tensor() -> None:
    assert decoder(LAYERS | LLAMA_8B | {"causal_attention": False}).num_heads == 32
