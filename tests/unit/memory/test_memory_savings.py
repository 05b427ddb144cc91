"""What saves memory: weights in 4 bits, small optimizer states, a loss in chunks, memory used twice; and what waits before it is free."""

from __future__ import annotations

import dataclasses

import pytest

from cost_models.terms.memory import MemoryCosts, memory_costs
from cost_models.terms.memory_traits import memory_traits
from cost_models.transformer import TransformerShape, transformer_workload
from cost_models.types import Cluster, Device, Link, Plan, PlanTable, Workload

LINK = Link(name="nvlink-4", bytes_per_s=450e9, latency_s=1e-6)
DEVICE = Device(name="h100-sxm-80gb", memory_bytes=80 * 2.0**30, memory_bytes_per_s=3.35e12, peak_flops_per_s={"bf16": 989e12})
CLUSTER = Cluster(device=DEVICE, gpus_per_node=8, num_nodes=8, intra=LINK, inter=LINK)
LLAMA_8B = TransformerShape(num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, vocab_size=128256, seq_len=4096, ffn_size=14336,
                            gated=True, tied=False)  # fmt: skip
SMALL = TransformerShape(num_layers=8, hidden_size=512, num_heads=8, vocab_size=32000, seq_len=1024, tied=False)


def llama(runtime: str, **changes: object) -> Workload:
    return transformer_workload(dataclasses.replace(LLAMA_8B, **changes), runtime=runtime)


def costs(workload: Workload, plan: Plan) -> MemoryCosts:
    return memory_costs(workload, CLUSTER, PlanTable.from_plans([plan]))


def test_frozen_weights_in_four_bits_stay_so_in_every_runtime():
    adapters = dataclasses.replace(LLAMA_8B, trainable_share=0.01)
    for runtime in ("torchtune", "deepspeed", "fsdp2", "litgpt"):
        plan = Plan(runtime=runtime, recompute="full")
        plain = costs(transformer_workload(adapters, runtime=runtime), plan)
        quantized = costs(transformer_workload(dataclasses.replace(adapters, quantized=True), runtime=runtime), plan)
        in_blocks = 8.03e9 - 2 * 128256 * 4096
        saved = plain.parts["parameters"][0] - quantized.parts["parameters"][0]
        assert saved == pytest.approx(in_blocks * (2 - 0.5 - 4 / 64), rel=0.01), runtime


@pytest.mark.parametrize(("optimizer", "state_bytes"), [("adamw", 4.0), ("adamw8bit", 1.0), ("paged_adamw", 0.0), ("adafactor", 0.05)])
def test_a_runtime_s_optimizer_states_shrink_with_the_optimizer(optimizer, state_bytes):
    """torchtune keeps both moments in bf16: half of the fp32 ones that an optimizer is stated with."""
    workload = transformer_workload(SMALL, runtime="torchtune", optimizer=optimizer)
    got = costs(workload, Plan(runtime="torchtune"))
    assert got.parts["optimizer"][0] == pytest.approx(state_bytes * workload.num_params)


def test_a_loss_in_chunks_holds_less():
    peaks = {fused: costs(llama("torchtitan", fused_loss=fused), Plan(runtime="torchtitan", recompute="full")) for fused in (True, False)}
    assert peaks[True].parts["logits"][0] == pytest.approx(peaks[False].parts["logits"][0] * 5 / 12)
    assert llama("torchtune").logits_bytes == llama("torchtune", fused_loss=True).logits_bytes  # its recipes' default


def test_short_lived_gradients_lie_partly_where_activations_were():
    workload, plan = transformer_workload(SMALL, runtime="nanotron"), PlanTable.from_plans([Plan(runtime="nanotron")])
    traits = memory_traits("nanotron")
    whole = memory_costs(workload, CLUSTER, plan, traits_of=lambda _: dataclasses.replace(traits, reused_grad_bytes=0.0))
    got = memory_costs(workload, CLUSTER, plan)
    saved = whole.parts["gradients"][0] - got.parts["gradients"][0]
    assert saved == pytest.approx(traits.reused_grad_bytes * workload.num_params)


@pytest.mark.parametrize(("micro_batch", "held"), [(1, 0.0), (4, 3.0)])
def test_freed_tensors_wait_only_where_a_layer_is_long_enough(micro_batch, held):
    """2 x 2048 x 2048 x 12 products, 1024 tokens and 2 ranks: 0.05 TFLOP of a layer per sample."""
    shape = TransformerShape(num_layers=4, hidden_size=2048, num_heads=16, vocab_size=32000, seq_len=1024, tied=False)
    traits = dataclasses.replace(memory_traits("megatron"), held_where=({"min_layer_flops": 1.5e11, "outputs": 3.0},))
    plan = Plan(runtime="megatron", tp_degree=2, micro_batch=micro_batch)
    workload, table = transformer_workload(shape, runtime="megatron"), PlanTable.from_plans([plan])
    with_it, without = (memory_costs(workload, CLUSTER, table, traits_of=lambda _, t=t: t) for t in (traits, memory_traits("megatron")))
    assert with_it.peak[0] - without.peak[0] == pytest.approx(held * 2 * 1024 * 2048 * micro_batch)


@pytest.mark.parametrize(("num_microbatches", "held"), [(1, 0.0), (2, 0.0), (3, 4.0)])
def test_freed_tensors_wait_only_where_there_is_time_to_run_ahead(num_microbatches, held):
    traits = dataclasses.replace(memory_traits("megatron"), held_where=({"min_num_microbatches": 3, "outputs": 4.0},))
    workload = transformer_workload(SMALL, runtime="megatron")
    table = PlanTable.from_plans([Plan(runtime="megatron", tp_degree=2, num_microbatches=num_microbatches)])
    with_it, without = (memory_costs(workload, CLUSTER, table, traits_of=lambda _, t=t: t) for t in (traits, memory_traits("megatron")))
    assert with_it.peak[0] - without.peak[0] == pytest.approx(held * 2 * 1024 * 512)


def test_products_with_four_bit_weights_may_keep_more_for_the_backward_pass():
    kept = {}
    for quantized in (False, True):
        workload = llama("litgpt", trainable_share=0.003, quantized=quantized)
        kept[quantized] = costs(workload, Plan(runtime="litgpt")).parts["activations"][0]
    assert kept[True] == pytest.approx(memory_traits("litgpt").quantized_activations * kept[False], rel=0.02)
