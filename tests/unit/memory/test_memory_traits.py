"""Runtime files and constants of the memory model."""

from __future__ import annotations

import pytest

import cost_models
from cost_models.terms.memory_traits import MemoryConstants, MemoryTraits, documented_traits, memory_traits, runtime_names
from cost_models.transformer import TransformerShape, transformer_workload
from cost_models.transformer_memory import BlockShape, block_bytes, loss_bytes


@pytest.mark.parametrize("name", runtime_names())
def test_every_runtime_file_loads(name):
    assert memory_traits(name).name == name


def test_every_runtime_of_the_time_model_has_a_memory_file():
    assert set(cost_models.runtime_names()) <= set(runtime_names())


def test_a_runtime_without_a_file_gets_plain_pytorch():
    assert memory_traits("unheard-of") == memory_traits("torch")


def test_a_file_may_be_like_another():
    bf16, base = memory_traits("megatron-deepspeed-bf16"), memory_traits("megatron-deepspeed")
    assert (bf16.grad_bytes, base.grad_bytes) == (6.0, 2.0)
    assert bf16.comm_buffer_bytes == base.comm_buffer_bytes


def test_inferred_traits_can_be_left_out():
    assert memory_traits("nanotron").held_where
    assert not documented_traits("nanotron").held_where
    assert documented_traits("nanotron").grad_bytes == memory_traits("nanotron").grad_bytes


def test_a_bf16_optimizer_steps_on_the_buffer_it_accumulates_in():
    assert memory_traits("megatron-deepspeed-bf16").sharded_grad_bytes == 0.0
    assert memory_traits("megatron-deepspeed").sharded_grad_bytes > 0.0


def test_wrong_traits_are_named():
    with pytest.raises(ValueError, match="stage_split"):
        MemoryTraits(stage_split="random")
    with pytest.raises(ValueError, match="max_pp"):
        MemoryTraits(held_where=({"max_pp": 1, "outputs": 1},))
    with pytest.raises(ValueError, match="outputs"):
        MemoryTraits(held_where=({"max_pp_degree": 1},))


def test_constants_come_from_a_calibration_and_are_checked():
    assert MemoryConstants.from_mapping({"reserved_factor": 1.2}).reserved_factor == 1.2
    with pytest.raises(ValueError, match="reserve_factor"):
        MemoryConstants.from_mapping({"reserve_factor": 1.2})
    with pytest.raises(ValueError, match="finite"):
        MemoryConstants.from_mapping({"context_bytes": float("nan")})


def test_a_megatron_block_keeps_34_bytes_per_token_and_hidden_element_without_scores():
    """Korthikanti et al. 2022, equation 2: s b h (34 + 5 a s / h) with dropout, for a block with ffn = 4 h."""
    shape = BlockShape(hidden=1024, num_heads=16, num_kv_heads=16, ffn=4096, seq_len=512, gated=False, dropout=True, flash=False)
    got = block_bytes(shape, memory_traits("megatron"))
    published = 512 * 1024 * (34 + 5 * 16 * 512 / 1024)
    assert got.saved_inner_bytes + got.saved_sequence_bytes == pytest.approx(published, rel=0.03)
    assert got.selective_inner_bytes + got.selective_sequence_bytes == pytest.approx(512 * 1024 * 34, rel=0.03)


def test_grouped_queries_and_flash_attention_keep_less():
    traits = memory_traits("megatron")
    base = {"hidden": 4096.0, "num_heads": 32, "ffn": 14336.0, "seq_len": 4096.0}
    whole = block_bytes(BlockShape(**base, num_kv_heads=32), traits).saved_inner_bytes
    assert block_bytes(BlockShape(**base, num_kv_heads=8), traits).saved_inner_bytes < whole
    assert block_bytes(BlockShape(**base, num_kv_heads=32, flash=False), traits).saved_inner_bytes > whole


def test_logits_of_a_248k_vocabulary():
    """THUDM/slime issue 2253: one fp32 copy of 11.6k x 248320 logits is 10.73 GiB; in place cross-entropy holds more than one."""
    one_copy = loss_bytes(248320, 11600, MemoryTraits(logit_bytes=4.0)) / 2**30
    assert one_copy == pytest.approx(10.73, rel=0.03)
    assert loss_bytes(248320, 11600, memory_traits("torch")) / 2**30 == pytest.approx(3 * 10.73, rel=0.03)


def test_fp32_activations_are_twice_as_large():
    shape = TransformerShape(num_layers=2, hidden_size=256, num_heads=4, vocab_size=1000, seq_len=128)
    low, high = (transformer_workload(shape, precision=precision).groups[1] for precision in ("bf16", "fp32"))
    assert high.saved_inner_bytes == pytest.approx(2 * low.saved_inner_bytes)
