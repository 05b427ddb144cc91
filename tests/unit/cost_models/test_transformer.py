"""Workloads from hyper-parameters."""

import pytest

from cost_models import TransformerShape, transformer_workload
from cost_models.convnet import resnet50_workload


def test_parameters_of_known_models(llama8b):
    assert llama8b.num_params == 8_030_261_248  # Llama 3 8B, as published
    gpt2 = transformer_workload(TransformerShape(num_layers=12, hidden_size=768, num_heads=12, vocab_size=50257, seq_len=1024))
    # 124,439,808 less learned positions, biases and norm offsets, which a hyper-parameter model leaves out
    assert gpt2.num_params == pytest.approx(124_439_808 - 1024 * 768, rel=0.002)


def test_experts_count_in_total_and_active_flops():
    shape = TransformerShape(
        num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, vocab_size=32000, seq_len=4096, gated=True, tied=False, rotary=True,
        num_experts=8, num_active_experts=2, expert_ffn_size=14336,
    )  # fmt: skip
    mixtral = transformer_workload(shape)
    assert mixtral.num_params == pytest.approx(46.7e9, rel=0.01)
    active = mixtral.model_flops / 6 / 4096 - 12 * 32 * 4096 * 4096 / 6
    assert active == pytest.approx(12.9e9 - 32000 * 4096, rel=0.02)


def test_dense_layers_come_before_experts():
    shape = TransformerShape(
        num_layers=6, hidden_size=1024, num_heads=8, vocab_size=1000, seq_len=128, num_experts=4, num_active_experts=2, expert_ffn_size=512,
        num_dense_layers=2,
    )  # fmt: skip
    names = [(g.name, g.num_repeats) for g in transformer_workload(shape).groups]
    assert names == [("embedding", 1), ("layers.*", 2), ("moe_layers.*", 4), ("head", 1)]


def test_the_tied_head_owns_no_weights():
    tied, untied = (
        transformer_workload(TransformerShape(num_layers=2, hidden_size=64, num_heads=4, vocab_size=1000, seq_len=16, tied=t))
        for t in (True, False)
    )
    assert untied.num_params - tied.num_params == 64 * 1000
    assert tied.tied_params == 64 * 1000
    assert untied.tied_params == 0


def test_frozen_weights_get_no_gradient():
    shape = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 1000, "seq_len": 16}
    full, lora = (transformer_workload(TransformerShape(**shape, trainable_share=s)) for s in (1.0, 0.01))
    assert lora.num_trainable_params == pytest.approx(0.01 * full.num_params)
    assert len(lora.groups[1].ops) < len(full.groups[1].ops)


@pytest.mark.parametrize(("change", "word"), [({"precision": "int3"}, "int3"), ({"optimizer": "magic"}, "magic")])
def test_unknown_words_are_named(change, word):
    with pytest.raises(ValueError, match=word):
        transformer_workload(TransformerShape(num_layers=1, hidden_size=8, num_heads=1, vocab_size=8, seq_len=8), **change)


def test_sizes_must_be_positive():
    with pytest.raises(ValueError, match="positive"):
        TransformerShape(num_layers=0, hidden_size=8, num_heads=1, vocab_size=8, seq_len=8)


def test_resnet50_has_its_published_size():
    assert resnet50_workload().num_params == 25_557_032
