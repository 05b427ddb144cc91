"""The memory model: parts, properties, and figures known from elsewhere."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.terms.memory import memory_costs, memory_costs_rows, num_in_flight
from cost_models.transformer import TransformerShape, transformer_workload
from cost_models.types import MEMORY_PARTS, Cluster, Device, LayerGroup, Link, OpTable, OptimizerSpec, Plan, PlanTable, Workload

GIB = 2.0**30
LINK = Link(name="nvlink-4", bytes_per_s=450e9, latency_s=1e-6)
DEVICE = Device(name="h100-sxm-80gb", memory_bytes=80 * GIB, memory_bytes_per_s=3.35e12, peak_flops_per_s={"bf16": 989e12})
CLUSTER = Cluster(device=DEVICE, gpus_per_node=8, num_nodes=8, intra=LINK, inter=LINK)
LLAMA_8B = TransformerShape(num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, vocab_size=128256, seq_len=4096, ffn_size=14336,
                            gated=True, tied=False)  # fmt: skip
SMALL = TransformerShape(num_layers=8, hidden_size=512, num_heads=8, vocab_size=32000, seq_len=1024, tied=False)


def llama(runtime: str = "torchtitan", **changes: object) -> Workload:
    shape = dataclasses.replace(LLAMA_8B, **changes)
    return transformer_workload(shape, runtime=runtime)


def costs(workload: Workload, *plans: Plan, rank: str = "fullest"):
    return memory_costs(workload, CLUSTER, PlanTable.from_plans(list(plans)), rank=rank)


def empty_ops() -> OpTable:
    columns = {f.name: np.zeros(0, np.int64 if f.name in {"op_class", "kind", "phase", "batch_dim", "tp_split"} else np.float64)
               for f in dataclasses.fields(OpTable)}  # fmt: skip
    return OpTable(**columns)


def conv_net(**changes: object) -> Workload:
    """What a traced image model gives: ragged groups, no tensor parallelism, no logits to speak of."""
    group = {"num_repeats": 1, "ops": empty_ops(), "can_cut": True}
    groups = (
        LayerGroup(name="stem", num_params=1e4, num_trainable_params=1e4, saved_other_bytes=60e6, temporary_bytes=30e6, **group),
        LayerGroup(name="stage1", num_params=2e5, num_trainable_params=2e5, saved_other_bytes=40e6, boundary_bytes=3e6, **group),
        LayerGroup(name="stage2", num_params=8e6, num_trainable_params=8e6, saved_other_bytes=20e6, boundary_bytes=2e6, **group),
        LayerGroup(name="head", num_params=2e6, num_trainable_params=2e6, saved_other_bytes=1e4, **(group | {"can_cut": False})),
    )
    values = {"name": "net", "groups": groups, "num_params": 1.021e7, "num_trainable_params": 1.021e7, "compute_dtype": "fp32",
              "param_bytes": 4.0, "master_bytes": 0.0, "grad_bytes": 4.0, "input_bytes": 602112.0, "can_pipeline": True,
              "optimizer": OptimizerSpec(name="sgd", state_bytes_per_param=4.0)}  # fmt: skip
    return Workload(**(values | changes))


def legal(draw: st.DrawFn) -> Plan:
    pp = draw(st.sampled_from([1, 2, 4, 8]))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"])) if pp > 1 else "none"
    zero = draw(st.integers(0, 3))
    return Plan(
        dp_replicate_degree=draw(st.sampled_from([1, 2, 4])), dp_shard_degree=draw(st.sampled_from([1, 2, 8])) if zero else 1,
        tp_degree=draw(st.sampled_from([1, 2, 4, 8])), cp_degree=draw(st.sampled_from([1, 2])), pp_degree=pp,
        virtual_stages=2 if schedule == "interleaved" else 1, zero_stage=zero, micro_batch=draw(st.sampled_from([1, 2, 3, 8])),
        num_microbatches=draw(st.sampled_from([1, 2, 8, 16])), recompute=draw(st.sampled_from(["none", "selective", "full"])),
        schedule=schedule, sequence_parallel=draw(st.booleans()), offload=draw(st.booleans()) and zero > 0,
        runtime=draw(st.sampled_from(["torch", "ddp", "fsdp2", "deepspeed", "megatron", "nanotron", "torchtitan", "unheard-of"])),
    )  # fmt: skip


plans = st.composite(legal)()


@settings(max_examples=150, deadline=None)
@given(plan=plans)
def test_parts_sum_to_the_peak_and_the_cautious_end_is_above_it(plan):
    got = costs(llama(), plan)
    assert set(got.parts) == set(MEMORY_PARTS)
    assert np.allclose(sum(got.parts.values()), got.peak)
    assert all((values >= 0).all() for values in got.parts.values())
    assert got.allocated[0] <= got.reserved[0] <= got.peak[0] <= got.high[0]
    assert got.peak[0] >= max(got.load[0], got.save[0]) * (1 - 1e-12)


@settings(max_examples=100, deadline=None)
@given(plan=plans, factor=st.sampled_from([2, 4]))
def test_more_shards_never_need_more_memory_for_states(plan, factor):
    if not plan.zero_stage:
        return
    more = dataclasses.replace(plan, dp_shard_degree=plan.dp_shard_degree * factor)
    got = costs(llama(), plan, more, rank="first")  # which rank is fullest may change with the shards
    for part in ("parameters", "optimizer", "gradients"):
        # a single rank gathers nothing and has no parameters to shard
        assert got.parts[part][1] <= got.parts[part][0] * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(plan=plans)
def test_larger_micro_batches_need_more(plan):
    larger = dataclasses.replace(plan, micro_batch=plan.micro_batch * 2)
    got = costs(llama(), plan, larger)
    assert got.allocated[1] >= got.allocated[0]
    assert got.high[1] >= got.high[0]


@settings(max_examples=100, deadline=None)
@given(plan=plans)
def test_recomputing_more_keeps_fewer_activations(plan):
    got = costs(llama(), *(dataclasses.replace(plan, recompute=r) for r in ("none", "selective", "full")), rank="first")
    kept = got.parts["activations"]
    assert kept[0] >= kept[1] >= kept[2]


@settings(max_examples=60, deadline=None)
@given(plan=plans)
def test_a_plan_costs_the_same_alone_and_in_a_table(plan):
    others = [Plan(micro_batch=2), Plan(tp_degree=4, pp_degree=2, num_microbatches=4, schedule="1f1b", runtime="megatron"), plan]
    together, alone = costs(llama(), *others), costs(llama(), plan)
    assert together.peak[2] == pytest.approx(alone.peak[0])
    assert together.high[2] == pytest.approx(alone.high[0])


def test_states_are_eighteen_bytes_per_parameter_in_megatron_and_six_plus_twelve_over_dp_with_its_distributed_optimizer():
    workload = transformer_workload(SMALL)
    got = costs(workload, Plan(runtime="megatron"), Plan(runtime="megatron", dp_shard_degree=8, zero_stage=1))
    states = sum(got.parts[name] for name in ("parameters", "gradients", "optimizer"))
    assert states / workload.num_params == pytest.approx([18.0, 6 + 12 / 8])


def test_processes_on_cpus_have_no_driver_and_no_caching_allocator():
    cpu = dataclasses.replace(CLUSTER, device=dataclasses.replace(DEVICE, name="cpu", family="cpu"))
    plan = PlanTable.from_plans([Plan(runtime="ddp", dp_replicate_degree=4)])
    workload = transformer_workload(SMALL)
    on_cpu, on_gpu = memory_costs(workload, cpu, plan), memory_costs(workload, CLUSTER, plan)
    assert on_cpu.allocated == on_gpu.allocated
    assert on_cpu.peak[0] < 1.03 * on_cpu.allocated[0] < on_gpu.peak[0]
    assert on_cpu.load[0] < on_gpu.load[0]


@pytest.mark.parametrize(("stage", "bytes_per_param"), [(1, 2 + 2 + 16 / 8), (2, 2 + (2 + 16) / 8), (3, (2 + 2 + 16) / 8)])
def test_zero_stages_divide_optimizer_then_gradients_then_parameters(stage, bytes_per_param):
    workload = transformer_workload(SMALL)
    got = costs(workload, Plan(runtime="deepspeed", dp_shard_degree=8, zero_stage=stage))
    states = sum(got.parts[name] for name in ("parameters", "gradients", "optimizer"))
    assert states[0] / workload.num_params == pytest.approx(bytes_per_param)


def test_a_higher_stage_takes_more_memory_for_bert_large():
    """DeepSpeed issue 1302: 8,900 MB with stage 1, 9,600 MB with stage 2; two sets of buffers outweigh sharded gradients of 0.3B weights."""
    shape = TransformerShape(num_layers=24, hidden_size=1024, num_heads=16, vocab_size=30522, seq_len=128, causal=False)
    workload = transformer_workload(shape, precision="fp16", runtime="deepspeed")
    plan = Plan(dp_shard_degree=4, zero_stage=1, runtime="deepspeed", micro_batch=8)
    got = costs(workload, plan, dataclasses.replace(plan, zero_stage=2))
    assert got.peak[0] < got.peak[1]


def test_hybrid_sharding_divides_by_the_shard_degree_only():
    got = costs(llama(), Plan(dp_replicate_degree=4, dp_shard_degree=8, zero_stage=3), Plan(dp_shard_degree=8, zero_stage=3))
    assert got.parts["parameters"][0] == got.parts["parameters"][1]


def test_fsdp_keeps_the_root_unit_and_two_layers_whole():
    workload = llama()
    plan = Plan(dp_shard_degree=64, zero_stage=3, runtime="torchtitan")
    got = costs(workload, plan)
    layer, root = workload.groups[1].num_params, workload.groups[0].num_params + workload.groups[2].num_params
    assert got.parts["gathered"][0] == pytest.approx(2 * root + 4 * layer + 6 * layer, rel=1e-3)
    assert got.parts["parameters"][0] == pytest.approx(4 * workload.num_params / 64)


def test_fsdp_states_of_an_8b_model_on_64_ranks_equal_the_fake_tensor_trace():
    """torch's MemTracker on fully_shard, 64 fake ranks: parameters 0.467 GiB sharded plus 1.957 gathered root, optimizer 0.94 GiB."""
    got = costs(llama(), Plan(dp_shard_degree=64, zero_stage=3, runtime="torchtitan"))
    assert got.parts["parameters"][0] / GIB == pytest.approx(0.467, rel=0.01)
    assert got.parts["optimizer"][0] / GIB == pytest.approx(0.94, rel=0.01)


@pytest.mark.parametrize(("recompute", "traced_gib"), [("none", 36.8), ("full", 10.8)])
def test_an_8b_model_on_64_ranks_with_and_without_recomputation_is_near_the_fake_tensor_trace(recompute, traced_gib):
    """torch's MemTracker on fully_shard, bf16 compute, 64 fake ranks, 1 x 4096 tokens: 36.8 GiB allocated, 10.8 with checkpointing."""
    got = costs(llama("torch"), Plan(dp_shard_degree=64, zero_stage=3, runtime="torchtitan", recompute=recompute))
    assert got.allocated[0] / GIB == pytest.approx(traced_gib, rel=0.2)


def test_in_flight_micro_batches_by_schedule():
    def flight(schedule: str, m: int, stage: int, v: int = 1) -> float:
        table = PlanTable.from_plans([Plan(pp_degree=4, num_microbatches=m, schedule=schedule, virtual_stages=v)])
        return float(num_in_flight(table, np.array([float(stage)]))[0])

    assert [flight("gpipe", 8, stage) for stage in range(4)] == [8, 8, 8, 8]
    assert [flight("1f1b", 8, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert flight("1f1b", 2, 0) == 2
    assert flight("interleaved", 8, 0, v=2) == (2 * 3 + 4 + 1) / 2


def test_a_pipeline_is_as_full_as_its_fullest_stage():
    plan = Plan(pp_degree=4, num_microbatches=8, schedule="1f1b", runtime="megatron")
    first, last, fullest = (costs(llama("megatron"), plan, rank=r).peak[0] for r in ("first", "last", "fullest"))
    assert fullest >= max(first, last)
    assert costs(llama("megatron"), plan, rank="ends").peak[0] == max(first, last)


def test_the_head_makes_the_last_stage_the_fullest_where_few_micro_batches_are_in_flight():
    plan = Plan(pp_degree=2, num_microbatches=1, schedule="1f1b", runtime="torchtitan", micro_batch=4, recompute="full")
    got = costs(llama(), plan)
    assert got.parts["logits"][0] > 0
    assert got.peak[0] == costs(llama(), plan, rank="last").peak[0]


def test_tied_weights_exist_on_both_ends_of_a_pipeline():
    tied = transformer_workload(dataclasses.replace(SMALL, tied=True))
    untied = transformer_workload(SMALL)
    plan = Plan(pp_degree=4, num_microbatches=4, schedule="1f1b", runtime="megatron")
    assert costs(tied, plan, rank="last").parts["parameters"] == costs(untied, plan, rank="last").parts["parameters"]
    alone = Plan(runtime="megatron")
    assert costs(tied, alone).parts["parameters"] < costs(untied, alone).parts["parameters"]


def test_plain_ddp_adds_buckets_of_the_size_of_the_gradients_and_generated_files_share_them():
    """pytorch issue 131653: wrapping a 166 MB model added 152 MB."""
    workload = transformer_workload(SMALL, precision="fp32")
    alone, plain = Plan(runtime="torch"), Plan(runtime="torch", dp_replicate_degree=2)
    got = costs(workload, alone, plain, Plan(runtime="ddp", dp_replicate_degree=2))
    assert got.parts["buckets"][0] == got.parts["buckets"][2] == 0
    assert got.parts["buckets"][1] == pytest.approx(4 * workload.num_params)


def test_frozen_weights_have_neither_gradients_nor_states():
    shape = dataclasses.replace(LLAMA_8B, trainable_share=0.01)
    lora, full = transformer_workload(shape), transformer_workload(LLAMA_8B)
    plan = Plan(runtime="fsdp2", num_microbatches=2)
    got, whole = costs(lora, plan), costs(full, plan)
    assert got.parts["parameters"] == whole.parts["parameters"]
    for part in ("gradients", "optimizer"):
        assert got.parts[part][0] == pytest.approx(0.01 * whole.parts[part][0])


def test_offloaded_states_need_host_memory_instead():
    plan = Plan(dp_shard_degree=8, zero_stage=2, runtime="deepspeed")
    got = costs(transformer_workload(SMALL), plan, dataclasses.replace(plan, offload=True))
    assert got.parts["optimizer"][1] == 0 < got.parts["optimizer"][0]
    assert got.host_bytes[1] >= 8 * got.parts["optimizer"][0]


def test_states_and_host_memory_equal_deepspeeds_own_estimator_for_t5_3b():
    """DeepSpeed pull request 965: 2.852B parameters on 8 cards print 15.93 GB (over 2**30) of device states and, with the optimizer on
    the host, 127.48 GB of host memory."""
    num_params = 2.852e9
    block = LayerGroup(name="all", num_repeats=1, ops=empty_ops(), num_params=num_params, num_trainable_params=num_params)
    workload = conv_net(groups=(block,), num_params=num_params, num_trainable_params=num_params, compute_dtype="bf16",
                        optimizer=OptimizerSpec(name="adamw", state_bytes_per_param=8.0))  # fmt: skip
    plan = Plan(dp_shard_degree=8, zero_stage=1, runtime="deepspeed")
    got = costs(workload, plan, dataclasses.replace(plan, offload=True))
    states = sum(got.parts[name] for name in ("parameters", "gradients", "optimizer"))
    assert states[0] / GIB == pytest.approx(15.93, rel=0.03)
    assert got.host_bytes[1] / GIB == pytest.approx(127.48, rel=0.03)


def test_models_that_are_never_trained_count_on_every_rank():
    plan = Plan(dp_shard_degree=8, zero_stage=3, runtime="fsdp2")
    base, more = costs(conv_net(), plan), costs(conv_net(resident_bytes=1e9), plan)
    assert more.allocated[0] - base.allocated[0] == pytest.approx(1e9)


def test_an_early_layer_with_wide_temporaries_does_not_meet_the_activations_of_later_ones():
    """torch's MemTracker on ResNet-50, batch 64, fp32: the peak is 5.37 GiB, while the stem alone needs 0.8 GiB in its backward pass."""
    wide = dataclasses.replace(conv_net().groups[0], temporary_bytes=55e6)
    net = conv_net(groups=(wide, *conv_net().groups[1:]))
    got = costs(net, Plan(micro_batch=64, runtime="ddp"))
    assert got.parts["temporaries"][0] < 64 * 10e6


def test_a_traced_conv_net_is_mostly_activations():
    got = costs(conv_net(), Plan(micro_batch=64, runtime="ddp"))
    assert got.parts["activations"][0] == pytest.approx(64 * (60e6 + 40e6 + 20e6 + 1e4))
    assert got.parts["inputs"][0] >= 64 * 602112.0
    assert max(got.parts, key=lambda name: got.parts[name][0]) == "activations"


def test_states_are_what_counts_when_the_batch_is_tiny():
    """The peak is then in the optimizer step: parameters, gradients, moments and the foreach temporaries, no activations."""
    workload = conv_net(groups=tuple(dataclasses.replace(g, saved_other_bytes=1.0, temporary_bytes=1.0) for g in conv_net().groups))
    got = costs(workload, Plan(runtime="ddp"))
    assert got.parts["activations"][0] == 0
    assert got.allocated[0] >= (4 + 4 + 4 + 4) * workload.num_params


def test_ragged_models_are_cut_without_losing_a_layer():
    plan = Plan(pp_degree=2, num_microbatches=4, schedule="1f1b")
    ends = [costs(conv_net(), plan, rank=r).parts["parameters"][0] for r in ("first", "last")]
    assert sum(ends) == pytest.approx(4 * conv_net().num_params)


def test_rows_of_different_workloads_match_single_answers():
    workloads = [llama(), conv_net(), llama()]
    rows = [Plan(dp_shard_degree=8, zero_stage=3), Plan(micro_batch=16, runtime="ddp"), Plan(tp_degree=2, runtime="megatron")]
    got = memory_costs_rows(workloads, [CLUSTER] * 3, PlanTable.from_plans(rows))
    for i, (workload, plan) in enumerate(zip(workloads, rows, strict=True)):
        assert got.peak[i] == pytest.approx(costs(workload, plan).peak[0])
    with pytest.raises(ValueError, match="do not match"):
        memory_costs_rows(workloads[:2], [CLUSTER] * 3, PlanTable.from_plans(rows))


def test_an_empty_table_has_empty_costs():
    table = PlanTable.from_plans([Plan()]).take(np.zeros(0, np.int64))
    assert len(memory_costs(llama(), CLUSTER, table).peak) == 0


def test_expert_weights_are_divided_by_expert_and_tensor_degrees():
    shape = dataclasses.replace(SMALL, num_experts=8, num_active_experts=2, expert_ffn_size=1024.0, num_dense_layers=0)
    workload = transformer_workload(shape)
    one = costs(workload, Plan(runtime="megatron")).parts["parameters"][0]
    spread = costs(workload, Plan(runtime="megatron", dp_shard_degree=8, ep_degree=8)).parts["parameters"][0]
    experts = sum(g.num_expert_params * g.num_repeats for g in workload.groups)
    assert one - spread == pytest.approx(2 * experts * (1 - 1 / 8))
