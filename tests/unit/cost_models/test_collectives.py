"""What a plan is charged as communication: by kind, group, calls and bytes; and that its seconds are made of just that."""

import dataclasses

import numpy as np
import pytest

from cost_models import TransformerShape, estimate, load_calibration, transformer_workload
from cost_models.buckets import bucket_sizes, ddp_bucket_bytes
from cost_models.collectives import charged, collective_kind
from cost_models.types import Cluster, Link, Plan, PlanTable

RATE = 100e9


def fsdp(ranks=8, stage=3, **more):
    return Plan(dp_shard_degree=ranks, zero_stage=stage, runtime="fsdp2", **more)


def ddp(ranks=8, **more):
    return Plan(dp_replicate_degree=ranks, runtime="torch-ddp", **more)


def tensor(degree=8, **more):
    return Plan(tp_degree=degree, runtime="torch-tp", **more)


def find(charges, kind, purpose="", group=""):
    found = [c for c in charges if c.kind == kind and c.purpose.startswith(purpose) and c.group.startswith(group)]
    return sum(c.count for c in found), sum(c.bytes for c in found)


@pytest.fixture(scope="module")
def experts():
    shape = TransformerShape(num_layers=4, hidden_size=512, num_heads=8, vocab_size=4096, seq_len=512, num_experts=8, num_active_experts=2,
                             expert_ffn_size=1024)  # fmt: skip
    return transformer_workload(shape)


@pytest.mark.parametrize("runtime", ["torch-ddp", "fsdp2", "torch-tp", "deepspeed-zero"])
def test_one_gpu_communicates_nothing(llama8b, runtime):
    assert charged(llama8b, Plan(num_microbatches=4, recompute="full", runtime=runtime)) == ()


def test_sharded_messages_are_as_large_on_any_number_of_ranks(llama8b):
    few, many = (charged(llama8b, fsdp(ranks)) for ranks in (8, 64))
    assert [dataclasses.replace(c, ranks=0) for c in few] == [dataclasses.replace(c, ranks=0) for c in many]


def test_layers_are_gathered_twice_and_the_rest_once(llama8b):
    layers = 32 * llama8b.groups[1].num_params
    charges = charged(llama8b, fsdp())
    assert find(charges, "all-gather", "parameters forward") == (33, pytest.approx(2 * llama8b.num_params))
    assert find(charges, "all-gather", "parameters backward") == (32, pytest.approx(2 * layers))
    assert find(charges, "reduce-scatter") == (33, pytest.approx(4 * llama8b.num_params))


def test_stage_2_gathers_a_layer_once_less_than_stage_3(llama8b):
    second, third = (charged(llama8b, fsdp(stage=stage)) for stage in (2, 3))
    assert find(third, "all-gather")[0] - find(second, "all-gather")[0] == 32
    assert find(second, "reduce-scatter") == find(third, "reduce-scatter")


@pytest.mark.parametrize(("rows", "ranks", "whole_rows"), [(50257, 8, 50264), (50257, 512, 50688), (512, 8, 512)])
def test_messages_hold_equal_parts_of_whole_rows(rows, ranks, whole_rows):
    shape = TransformerShape(num_layers=2, hidden_size=512, num_heads=8, vocab_size=rows, seq_len=64)
    charges = charged(transformer_workload(shape), fsdp(ranks))
    root = find(charges, "all-gather", "parameters forward")[1] - find(charges, "all-gather", "parameters backward")[1]
    assert root == pytest.approx(2 * 512 * (whole_rows + 1))  # and the last norm


def test_accumulation_repeats_what_every_micro_batch_does(llama8b):
    for plan, repeated in ((fsdp(), True), (fsdp(stage=2), True), (ddp(), False), (tensor(), True)):
        once, thrice = (charged(llama8b, dataclasses.replace(plan, num_microbatches=m)) for m in (1, 3))
        times = 3 if repeated else 1
        assert [(c.count, c.bytes) for c in thrice] == [(times * c.count, pytest.approx(times * c.bytes)) for c in once]


def test_replicas_of_shards_are_reduced_once_a_step(llama8b):
    plan = fsdp(dp_replicate_degree=4, num_microbatches=3)
    assert find(charged(llama8b, plan), "all-reduce", group="dp_replicate") == (33, pytest.approx(4 * llama8b.num_params / 8))


def test_tensor_ranks_sum_twice_a_layer_each_way(llama8b):
    size = 2 * 4096 * 4096 * 3  # 3 samples
    plain = charged(llama8b, tensor(micro_batch=3))
    divided = charged(llama8b, tensor(micro_batch=3, sequence_parallel=True))
    assert find(plain, "all-reduce") == (2 * 65, 2 * 65 * size)  # embedding forward, head backward
    assert find(divided, "all-reduce", "activations") == (2, 2 * size)
    assert find(divided, "reduce-scatter") == (2 * 64, 2 * 64 * size)
    assert find(divided, "all-gather", "activations") == (2 * 65, 2 * 65 * size)  # embedding and head take whole sequences


def test_logits_are_gathered_where_the_script_computes_its_loss(llama8b, small_gpt):
    assert find(charged(llama8b, tensor(num_microbatches=3)), "all-gather", "logits") == (3, 3 * 2 * 4096 * 128256)
    assert find(charged(llama8b, Plan(tp_degree=8, runtime="megatron")), "all-gather") == (0, 0)
    assert find(charged(small_gpt, tensor()), "all-gather") == (0, 0)  # tied weights stay whole


def test_a_divided_vocabulary_is_one_more_sum_each_way(llama8b):
    charges = charged(llama8b, Plan(tp_degree=8, sequence_parallel=True, runtime="megatron"))
    assert find(charges, "reduce-scatter")[0] == 2 * 65


@pytest.mark.parametrize(
    ("runtime", "recompute", "sums"),
    [("torch-tp", "full", 32), ("torch-tp", "selective", 32), ("megatron", "full", 64), ("megatron", "selective", 0)],
)
def test_recomputation_repeats_the_sums_that_it_reaches(llama8b, runtime, recompute, sums):
    charges = charged(llama8b, Plan(tp_degree=8, recompute=recompute, runtime=runtime))
    assert find(charges, "all-reduce", "activations recomputed")[0] == sums


def test_recomputing_products_gathers_their_inputs_and_keeps_the_sums(llama8b):
    plan = Plan(tp_degree=8, sequence_parallel=True, recompute="selective", runtime="torchtitan")
    again = [c for c in charged(llama8b, plan) if c.purpose == "activations recomputed"]
    assert [(c.kind, c.count) for c in again] == [("all-gather", 2 * 32)]


def test_shared_embeddings_are_reduced_between_the_end_stages(small_gpt, a100):
    plan = Plan(pp_degree=4, tp_degree=2, num_microbatches=8, schedule="1f1b", runtime="megatron-core")
    first, middle, last = (find(charged(small_gpt, plan, stage=s), "all-reduce", "gradients of shared") for s in (0, 1, 3))
    assert first == last == (1, small_gpt.tied_params / 2 * 4)
    assert middle == (0, 0)
    cluster, constants = bare(a100)
    seconds = float(estimate(small_gpt, cluster, PlanTable.from_plans([plan]), constants).breakdown_s["dp_communication"][0])
    assert seconds == pytest.approx(first[1] / RATE)  # two passes of half of it


def test_a_middle_stage_sends_both_ways_and_an_end_one(llama8b):
    plan = Plan(pp_degree=4, num_microbatches=8, schedule="1f1b", runtime="torch-tp")
    sends = [find(charged(llama8b, plan, stage=s), "send") for s in range(4)]
    assert [count for count, _ in sends] == [8, 16, 16, 8]
    assert {size / count for count, size in sends} == {2 * 4096 * 4096}


@pytest.mark.parametrize(("pp", "chunks"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_all_stages_together_send_each_micro_batch_over_each_cut_twice(llama8b, pp, chunks):
    plan = Plan(
        pp_degree=pp, virtual_stages=chunks, num_microbatches=8, schedule="1f1b" if chunks == 1 else "interleaved", runtime="torch-tp"
    )
    assert sum(find(charged(llama8b, plan, stage=s), "send")[0] for s in range(pp)) == 2 * 8 * (pp * chunks - 1)


def test_sequence_parallel_ranks_send_their_part(llama8b):
    plan = Plan(pp_degree=2, tp_degree=4, num_microbatches=2, schedule="1f1b", runtime="torch-tp")
    whole, part = (find(charged(llama8b, dataclasses.replace(plan, sequence_parallel=s), stage=0), "send") for s in (False, True))
    assert part == (whole[0], whole[1] / 4)


def test_an_unknown_stage_is_an_error(llama8b):
    with pytest.raises(ValueError, match="stage 2"):
        charged(llama8b, Plan(pp_degree=2, runtime="torch-tp"), stage=2)


def test_experts_exchange_tokens_four_times_a_layer(experts):
    plan = Plan(dp_shard_degree=8, ep_degree=4, micro_batch=2, runtime="megatron", zero_stage=1)
    tokens = 2.0 * 2 * 512 * 2 * 512  # bytes, samples, positions, experts a token, width
    assert find(charged(experts, plan), "all-to-all") == (4 * 4, 4 * 4 * tokens)
    again = charged(experts, dataclasses.replace(plan, recompute="full"))
    assert find(again, "all-to-all", "tokens recomputed") == (2 * 4, 2 * 4 * tokens)


def test_context_ranks_pass_keys_and_values(llama8b):
    charges = charged(llama8b, Plan(cp_degree=4, runtime="megatron-core"))
    whole = 2 * 2 * 4096 * 1024  # keys and values, 2 bytes, positions, width of 8 of 32 heads
    assert find(charges, "all-gather", group="cp") == (2 * 32, 2 * 32 * whole)
    assert find(charges, "reduce-scatter", group="cp") == (32, 32 * whole)


def test_ddp_reduces_each_gradient_once(small_gpt):
    charges = charged(small_gpt, ddp())
    assert {c.kind for c in charges} == {"all-reduce"}
    assert find(charges, "all-reduce")[1] == pytest.approx(4 * small_gpt.num_trainable_params)


def test_buckets_close_when_they_are_full():
    assert bucket_sizes([3, 4, 5, 20, 1], 10, 10) == [12, 20, 1]
    assert bucket_sizes([3, 4, 5, 20, 1], 10, 2) == [3, 29, 1]
    assert ddp_bucket_bytes(1e9) == 25 * 2**20
    assert ddp_bucket_bytes(10 * 2**20) == 8 * 2**20
    assert ddp_bucket_bytes(1000) == 2**20


def test_a_tiny_model_is_one_bucket():
    tiny = transformer_workload(TransformerShape(num_layers=2, hidden_size=32, num_heads=4, vocab_size=97, seq_len=16), precision="fp32")
    assert find(charged(tiny, ddp(2)), "all-reduce") == (1, pytest.approx(4 * tiny.num_params))


def test_a_sharded_optimizer_of_ddp_broadcasts_each_parameter(small_gpt):
    charges = charged(small_gpt, Plan(dp_shard_degree=4, zero_stage=1, runtime="torch-ddp"))
    assert find(charges, "broadcast") == (sum(g.num_repeats * len(g.param_shapes) for g in small_gpt.groups), 2 * small_gpt.num_params)
    assert find(charges, "all-reduce")[1] == pytest.approx(4 * small_gpt.num_params)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("c10d::_allgather_base_", "all-gather"), ("_c10d_functional.all_gather_into_tensor.default", "all-gather"), ("c10d::allreduce_", "all-reduce"),
     ("_c10d_functional::all_reduce_coalesced", "all-reduce"), ("c10d::_reduce_scatter_base_", "reduce-scatter"), ("gloo:broadcast", "broadcast"),
     ("_c10d_functional.reduce_scatter_tensor", "reduce-scatter"), ("c10d::alltoall_base_", "all-to-all"), ("all_to_all_single", "all-to-all"),
     ("c10d::send", "send"), ("gloo:send", "send"), ("nccl:all_reduce", "all-reduce"), ("c10d::recv_", ""), ("aten::add", ""), ("c10d::barrier", ""),
     ("_c10d_functional.wait_tensor.default", "")],
)  # fmt: skip
def test_operators_are_told_by_their_names(name, kind):
    assert collective_kind(name) == kind


def bare(a100, **latency):
    """A machine and constants by which nothing is hidden and a ring takes bytes over one rate, or one second a pass for each
    doubling of the ranks."""
    link = Link(name="link", bytes_per_s=RATE if not latency else 1e30, latency_s=0.0, kind="nvlink")
    cluster = Cluster(device=a100, gpus_per_node=4096, num_nodes=1, intra=link, inter=link)
    shown = {"fsdp_hidden_share": 0.0, "overlap_contention": 0.0, "dp_hidden_share": 0.0, "all_reduce_discount": 1.0, "intra_rate_share": 1.0, "reduction_rate_share": 1.0,
             "p2p_rate_share": 1.0, "all_to_all_rate_share": 1.0, "intra_latency_s": 0.0, "p2p_latency_s": 0.0}  # fmt: skip
    shipped = load_calibration()
    return cluster, dataclasses.replace(shipped, constants={**shipped.constants, **shown, **latency}, by_runtime={}, by_family={})


PASSES = {"all-reduce": 2}
PLANS = {
    "fsdp": fsdp(64), "fsdp of odd rows": fsdp(512), "zero-2": fsdp(stage=2, num_microbatches=4), "hsdp": fsdp(dp_replicate_degree=4, num_microbatches=3),
    "tensor": tensor(num_microbatches=2), "sequence": tensor(sequence_parallel=True, recompute="full"), "selective": tensor(recompute="selective"),
    "tensor x fsdp": tensor(4, dp_shard_degree=16, zero_stage=3, sequence_parallel=True), "tensor x replicas": tensor(4, dp_replicate_degree=4),
    "torchtitan": Plan(tp_degree=4, dp_shard_degree=4, zero_stage=3, sequence_parallel=True, recompute="selective", runtime="torchtitan"),
    "megatron": Plan(tp_degree=4, dp_shard_degree=4, zero_stage=1, sequence_parallel=True, recompute="full", runtime="megatron"),
    "ddp": ddp(num_microbatches=2), "ddp zero-1": Plan(dp_shard_degree=8, zero_stage=1, runtime="torch-ddp"),
    "deepspeed zero-2": Plan(dp_shard_degree=8, zero_stage=2, num_microbatches=3, runtime="deepspeed-zero"),
    "deepspeed zero-3": Plan(dp_shard_degree=8, zero_stage=3, runtime="deepspeed"),
}  # fmt: skip


def ring_seconds(charges, *groups):
    return sum(PASSES.get(c.kind, 1) * c.bytes * (c.ranks - 1) / c.ranks / RATE for c in charges if c.group in groups)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("workload", ["llama8b", "small_gpt"])
def test_seconds_are_those_of_the_charged_bytes(plan, workload, a100, request):
    workload = request.getfixturevalue(workload)
    cluster, constants = bare(a100)
    parts = estimate(workload, cluster, PlanTable.from_plans([plan]), constants).breakdown_s
    charges = charged(workload, plan)
    data_s = float(parts["fsdp_communication"][0] + parts["dp_communication"][0])
    assert float(parts["tp_communication"][0]) == pytest.approx(ring_seconds(charges, "tp"))
    assert data_s == pytest.approx(ring_seconds(charges, "dp_shard", "dp_replicate"))


@pytest.mark.parametrize("name", ["fsdp", "zero-2", "tensor", "sequence", "selective", "tensor x fsdp", "megatron", "deepspeed zero-3"])
def test_seconds_are_those_of_the_charged_calls(name, llama8b, a100):
    cluster, constants = bare(a100, intra_latency_s=1.0)
    parts = estimate(llama8b, cluster, PlanTable.from_plans([PLANS[name]]), constants).breakdown_s
    charges = charged(llama8b, PLANS[name])
    for part, groups, purposes in (
        ("tp_communication", "tp", ("activations", "logits", "gradients of whole")),
        ("fsdp_communication", "dp_shard", ("parameters ", "gradients")),
    ):
        if parts[part][0]:
            calls = sum(
                PASSES.get(c.kind, 1) * c.count * np.log2(c.ranks) for c in charges if c.group == groups and c.purpose.startswith(purposes)
            )
            assert float(parts[part][0]) == pytest.approx(calls)


def test_transfers_take_the_charged_bytes(llama8b, a100):
    plan = Plan(pp_degree=4, num_microbatches=8, schedule="1f1b", runtime="torch-tp")
    cluster, constants = bare(a100)
    seconds = float(estimate(llama8b, cluster, PlanTable.from_plans([plan]), constants).breakdown_s["pipeline_p2p"][0])
    count, size = find(charged(llama8b, plan, stage=1), "send")
    on_the_way = count + 2 * (plan.pp_degree - 1)  # filling and draining
    assert seconds == pytest.approx(on_the_way * size / count / RATE)


def test_experts_take_the_charged_bytes(experts, a100):
    plan = Plan(dp_shard_degree=8, ep_degree=4, runtime="megatron-core", zero_stage=1)
    cluster, constants = bare(a100)
    parts = estimate(experts, cluster, PlanTable.from_plans([plan]), constants).breakdown_s
    charges = charged(experts, plan)
    assert float(parts["tp_communication"][0]) == pytest.approx(find(charges, "all-to-all")[1] * (1 - 1 / 4) / RATE)
    assert float(parts["dp_communication"][0]) == pytest.approx(ring_seconds(charges, "dp_shard", "dp_replicate"))


def test_tables_are_divided_only_into_equal_shards(llama8b):
    few, many = (charged(llama8b, tensor(dp_shard_degree=n, zero_stage=3)) for n in (8, 64))  # 128256 rows are 512 x 250.5
    assert find(few, "all-gather", "logits")[0] == 1
    assert find(many, "all-gather", "logits")[0] == 0
    assert find(many, "all-reduce", "activations")[0] == find(few, "all-reduce", "activations")[0] - 2
