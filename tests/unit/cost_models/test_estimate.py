"""Prices of plans."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import TransformerShape, estimate, estimate_rows, load_calibration, transformer_workload
from cost_models.convnet import resnet50_workload
from cost_models.types import MEMORY_PARTS, TIME_PARTS, Plan, PlanTable

RUNTIMES = ("torch", "ddp", "fsdp2", "deepspeed", "megatron-core")


def plans_for(draw):
    tp, pp, dp = (draw(st.sampled_from((1, 2, 4, 8))) for _ in range(3))
    return Plan(
        dp_shard_degree=dp, dp_replicate_degree=draw(st.sampled_from((1, 2))), tp_degree=tp, pp_degree=pp,
        virtual_stages=draw(st.sampled_from((1, 2))) if pp > 1 else 1, zero_stage=draw(st.integers(0, 3)), micro_batch=draw(st.integers(1, 8)),
        num_microbatches=draw(st.integers(1, 32)), recompute=draw(st.sampled_from(("none", "selective", "full"))),
        schedule="1f1b" if pp > 1 else "none", sequence_parallel=tp > 1 and draw(st.booleans()), offload=draw(st.booleans()),
        runtime=draw(st.sampled_from(RUNTIMES)),
    )  # fmt: skip


plan_tables = st.composite(lambda draw: PlanTable.from_plans([plans_for(draw) for _ in range(draw(st.integers(1, 6)))]))()


def seconds(workload, cluster, *plans, calibration=None):
    return estimate(workload, cluster, PlanTable.from_plans(list(plans)), calibration).step_time_s


@settings(max_examples=40, deadline=None)
@given(table=plan_tables)
def test_parts_sum_to_the_whole(llama8b, cluster, table):
    got = estimate(llama8b, cluster, table)
    assert tuple(got.breakdown_s) == TIME_PARTS
    assert set(got.breakdown_bytes) == set(MEMORY_PARTS)
    np.testing.assert_allclose(np.sum(list(got.breakdown_s.values()), axis=0), got.step_time_s, rtol=1e-12)
    assert all((v >= -1e-12).all() for v in got.breakdown_s.values())
    assert (got.low_s < got.step_time_s).all()
    assert (got.high_s > got.step_time_s).all()
    assert ((got.mfu > 0) & (got.mfu < 1)).all()


@settings(max_examples=30, deadline=None)
@given(table=plan_tables, faster=st.sampled_from(("intra", "inter", "memory", "flops")))
def test_better_hardware_never_slows_a_step(llama8b, cluster_of, a100, table, faster):
    base = cluster_of(a100, nodes=64)
    better = {
        "intra": cluster_of(a100, nodes=64, intra_bytes_per_s=600e9), "inter": cluster_of(a100, nodes=64, inter_bytes_per_s=400e9),
        "memory": cluster_of(dataclasses.replace(a100, memory_bytes_per_s=4e12), nodes=64),
        "flops": cluster_of(dataclasses.replace(a100, peak_flops_per_s={"bf16": 624e12, "fp32": 39e12}), nodes=64),
    }[faster]  # fmt: skip
    assert (estimate(llama8b, better, table).step_time_s <= estimate(llama8b, base, table).step_time_s * (1 + 1e-9)).all()


@settings(max_examples=20, deadline=None)
@given(table=plan_tables)
def test_a_plan_costs_the_same_alone_and_in_company(llama8b, small_gpt, cluster, table):
    together = estimate(llama8b, cluster, table).step_time_s
    alone = [estimate(llama8b, cluster, table.take(np.array([i]))).step_time_s[0] for i in range(len(table))]
    rows = estimate_rows([llama8b, small_gpt] * len(table), [cluster] * (2 * len(table)), table.take(np.repeat(np.arange(len(table)), 2)))
    np.testing.assert_allclose(together, alone, rtol=1e-9)
    np.testing.assert_allclose(together, rows.step_time_s[::2], rtol=1e-9)


def test_many_plans_are_priced_like_few(llama8b, cluster):
    few = PlanTable.from_plans(
        [Plan(tp_degree=t, dp_shard_degree=4, micro_batch=b, zero_stage=z) for t in (1, 2) for b in (1, 4) for z in (0, 3)]
    )
    many = few.take(np.tile(np.arange(len(few)), 5000))
    np.testing.assert_allclose(estimate(llama8b, cluster, many).step_time_s, np.tile(estimate(llama8b, cluster, few).step_time_s, 5000))


def test_a_step_of_llama_8b_takes_what_eight_a100_usually_need(llama8b, cluster):
    got = estimate(
        llama8b, cluster, PlanTable.from_plans([Plan(dp_shard_degree=8, zero_stage=3, micro_batch=2, recompute="full", runtime="fsdp2")])
    )
    assert 0.35 < got.mfu[0] < 0.60


def test_one_small_gpu_step_is_bound_by_launches(small_gpt, cluster):
    got = estimate(small_gpt, cluster, PlanTable.from_plans([Plan()]))
    assert got.breakdown_s["host_overhead"][0] > got.breakdown_s["compute"][0]


def test_larger_micro_batches_use_a_gpu_better(llama8b, cluster):
    small, large = seconds(llama8b, cluster, Plan(micro_batch=1, num_microbatches=8), Plan(micro_batch=8, num_microbatches=1))
    assert large < small


def test_full_recomputation_costs_about_a_forward_pass(llama8b, cluster):
    got = estimate(llama8b, cluster, PlanTable.from_plans([Plan(micro_batch=2), Plan(micro_batch=2, recompute="full")]))
    assert 1.2 < got.step_time_s[1] / got.step_time_s[0] < 1.4
    assert got.breakdown_s["recompute"][0] == 0


def test_interleaving_shrinks_the_bubble(llama8b, cluster):
    plain, interleaved = (Plan(pp_degree=4, virtual_stages=v, num_microbatches=8, runtime="megatron-core") for v in (1, 4))
    got = estimate(llama8b, cluster, PlanTable.from_plans([plain, interleaved])).breakdown_s["pipeline_bubble"]
    assert got[1] < 0.4 * got[0]


def test_more_micro_batches_amortise_the_bubble(llama8b, cluster):
    got = estimate(llama8b, cluster, PlanTable.from_plans([Plan(pp_degree=4, num_microbatches=m) for m in (4, 32)]))
    share = got.breakdown_s["pipeline_bubble"] / got.step_time_s
    assert share[1] < share[0] / 3


def test_tensor_parallelism_across_nodes_is_expensive(llama8b, cluster):
    got = estimate(llama8b, cluster, PlanTable.from_plans([Plan(tp_degree=t, micro_batch=2) for t in (8, 16)])).breakdown_s[
        "tp_communication"
    ]
    assert got[1] > 1.5 * got[0]


def test_sharding_trades_traffic_for_memory(llama8b, cluster):
    table = PlanTable.from_plans([Plan(dp_shard_degree=32, zero_stage=z, micro_batch=1) for z in (0, 1, 2, 3)])
    got = estimate(llama8b, cluster, table)
    assert (np.diff(got.peak_memory_bytes) < 0).all()
    assert got.breakdown_s["fsdp_communication"][3] > 0
    assert (got.breakdown_s["fsdp_communication"][:3] == 0).all()
    assert got.breakdown_s["dp_communication"][3] < got.breakdown_s["dp_communication"][0]


def test_hybrid_sharding_gathers_inside_a_node(llama8b, cluster):
    whole, hybrid = Plan(dp_shard_degree=32, zero_stage=3), Plan(dp_replicate_degree=4, dp_shard_degree=8, zero_stage=3)
    got = estimate(llama8b, cluster, PlanTable.from_plans([whole, hybrid]))
    assert got.breakdown_s["fsdp_communication"][1] < got.breakdown_s["fsdp_communication"][0]
    assert got.breakdown_s["dp_communication"][1] > 0


def test_offloading_is_charged_for_copies_and_the_cpu(llama8b, cluster):
    got = estimate(
        llama8b,
        cluster,
        PlanTable.from_plans([Plan(dp_shard_degree=8, zero_stage=2, offload=o, runtime="deepspeed") for o in (False, True)]),
    )
    assert got.breakdown_s["optimizer"][1] == 0
    copies_s = 8.03e9 / 8 * 4 / cluster.host_bytes_per_s
    assert got.breakdown_s["offload"][1] > copies_s
    assert got.peak_memory_bytes[1] < got.peak_memory_bytes[0]


def test_gradients_accumulated_on_the_host_cross_the_link_twice_a_micro_batch(llama8b, cluster):
    plans = [
        Plan(dp_shard_degree=8, zero_stage=z, offload=True, num_microbatches=m, runtime="deepspeed-zero") for z in (1, 2) for m in (1, 5)
    ]
    got = estimate(llama8b, cluster, PlanTable.from_plans(plans)).breakdown_s["offload"]
    assert got[1] == pytest.approx(got[0])  # ZeRO-1 accumulates on the device
    assert got[3] - got[2] == pytest.approx(4 * 2 * 2 * 8.03e9 / 8 / cluster.host_bytes_per_s, rel=0.01)


def test_a_measured_step_anchors_the_price(llama8b, cluster):
    plan = Plan(micro_batch=2)
    modelled = seconds(llama8b, cluster, plan)[0]
    measured = dataclasses.replace(llama8b, measured_step_s=1.5 * modelled, measured_device=cluster.device.name, traced_batch=2)
    assert seconds(measured, cluster, plan)[0] == pytest.approx(1.5 * modelled, rel=1e-3)
    elsewhere = dataclasses.replace(measured, measured_device="another card")
    assert seconds(elsewhere, cluster, plan)[0] == pytest.approx(modelled)


def test_measured_launch_times_replace_the_constant(small_gpt, cluster):
    slow = dataclasses.replace(small_gpt, measured_host_s_per_kernel=200e-6)
    assert seconds(slow, cluster, Plan())[0] > 2 * seconds(small_gpt, cluster, Plan())[0]


def test_convolutional_networks_are_priced_too(cluster):
    table = PlanTable.from_plans([Plan(dp_replicate_degree=n, micro_batch=256, runtime="ddp") for n in (1, 8)])
    got = estimate(resnet50_workload(precision="amp16"), cluster, table)
    images_per_s = 256 * np.array([1, 8]) / got.step_time_s
    assert 1000 < images_per_s[0] < 3500  # one A100 trains 1,500 to 2,700 images a second in mixed precision
    assert 7 < images_per_s[1] / images_per_s[0] <= 8


def test_a_refitted_constant_moves_the_price(small_gpt, cluster):
    shipped = load_calibration()
    slower = dataclasses.replace(shipped, constants={**shipped.constants, "host_s_per_kernel": 2 * shipped.constants["host_s_per_kernel"]})
    assert seconds(small_gpt, cluster, Plan(), calibration=slower)[0] > 1.3 * seconds(small_gpt, cluster, Plan())[0]


def test_nanotron_quirks_touch_nanotron_only(llama8b, cluster):
    plan = Plan(tp_degree=8, pp_degree=4, num_microbatches=8)
    here, there = seconds(llama8b, cluster, dataclasses.replace(plan, runtime="nanotron"), dataclasses.replace(plan, runtime="torchtitan"))
    assert here > 1.5 * there


def test_nanotron_pipelines_without_zero_reduce_bucket_by_bucket(llama8b, cluster_of, a100):
    plan = Plan(dp_shard_degree=32, pp_degree=2, num_microbatches=8, runtime="nanotron")
    whole, scattered = (
        estimate(llama8b, cluster_of(a100, nodes=8), PlanTable.from_plans([dataclasses.replace(plan, zero_stage=z)])).breakdown_s
        for z in (0, 1)
    )
    buckets = 4 * 4.5e9 / 25e6  # fp32 gradients of the larger half
    assert whole["dp_communication"][0] == pytest.approx(buckets * 62 * 25e-6, rel=0.2)
    assert scattered["dp_communication"][0] < whole["dp_communication"][0]


@pytest.mark.parametrize(
    ("tables", "word"),
    [((1, 1, 0), "equal"), ((2, 1, 2), "equal")],
)
def test_rows_must_match(llama8b, cluster, tables, word):
    workloads, clusters, plans = tables
    with pytest.raises(ValueError, match=word):
        estimate_rows([llama8b] * workloads, [cluster] * clusters, PlanTable.from_plans([Plan()] * plans))


def test_unusable_input_is_explained(llama8b, cluster, cluster_of, a100):
    with pytest.raises(ValueError, match="no plans"):
        estimate(llama8b, cluster, PlanTable.from_plans([]))
    with pytest.raises(ValueError, match="unknown runtime"):
        estimate(llama8b, cluster, PlanTable.from_plans([Plan(runtime="warp-drive")]))
    with pytest.raises(ValueError, match="no peak rate"):
        estimate(llama8b, cluster_of(dataclasses.replace(a100, peak_flops_per_s={"int8": 1e14})), PlanTable.from_plans([Plan()]))


def test_runtimes_that_were_measured_get_the_narrower_interval(llama8b, cluster):
    table = PlanTable.from_plans([Plan(dp_shard_degree=8, zero_stage=3, runtime=r) for r in ("torchtitan", "fsdp2")])
    got = estimate(llama8b, cluster, table)
    width = got.high_s / got.low_s
    interval = load_calibration().interval
    np.testing.assert_allclose(width, [interval["known_runtime_factor"] ** 2, interval["unknown_runtime_factor"] ** 2])


def test_context_ranks_divide_the_work_of_attention_beyond_the_number_of_heads(cluster_of, h100):
    shape = TransformerShape(num_layers=2, hidden_size=1024, num_heads=8, vocab_size=1024, seq_len=2.0**20)
    long = transformer_workload(shape, runtime="megatron-core")
    table = PlanTable.from_plans([Plan(cp_degree=n, runtime="megatron-core") for n in (8, 16, 64)])
    work = estimate(long, cluster_of(h100, nodes=8), table).breakdown_s["compute"]
    assert work[0] / work == pytest.approx([1, 2, 8], rel=0.02)
