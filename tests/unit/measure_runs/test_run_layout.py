"""What a row leaves open about layout, sharding and recomputation is filled in so that it fits, and named."""

import pandas as pd
import pytest

from advisor.measure.run_sharding import recompute_of, sharding_of
from advisor.measure.run_values import Fields
from advisor.measure.runs import read_runs
from cost_models import estimate
from cost_models.traits import load_runtime
from cost_models.types import PlanTable

GPT_175B = {
    "model_name": "gpt3-175B", "n_layers": 96, "hidden": 12288, "n_heads": 96, "vocab": 51200, "seq_len": 2048, "gpu": "A100", "gpu_mem_gb": 80,
    "n_gpus": 128, "framework": "NeMo Megatron", "global_batch": 1024, "precision": "bf16",
}  # fmt: skip
GPT_LARGE = {
    "model_name": "gpt2-large", "gpu": "V100", "gpu_mem_gb": 16, "n_gpus": 8, "framework": "DeepSpeed", "dp": 8, "tp": 1, "pp": 1, "zero_stage": 1,
    "micro_batch": 4, "global_batch": 32, "seq_len": 1024, "precision": "fp16",
}  # fmt: skip


def read(**fields):
    runs = read_runs(pd.DataFrame([fields]))
    assert len(runs) == 1, runs.skipped
    return runs


def peak_share(runs):
    found = estimate(runs.workloads[0], runs.clusters[0], PlanTable.from_plans([plan_of(runs)]))
    return float(found.peak_memory_bytes[0]) / runs.clusters[0].device.memory_bytes


def plan_of(runs):
    return runs.plans.plan(0)


def test_a_model_too_large_for_one_device_gets_the_layout_that_it_needs():
    runs = read(**GPT_175B)
    plan = plan_of(runs)
    assert plan.tp_degree * plan.pp_degree >= 16
    assert plan.dp_degree * plan.tp_degree * plan.pp_degree == 128
    assert peak_share(runs) <= 1
    assert f"tp = {plan.tp_degree}" in runs.assumed[0]
    assert f"pp = {plan.pp_degree}" in runs.assumed[0]


def test_a_stated_layout_stays_even_if_it_does_not_fit():
    plan = plan_of(read(**GPT_175B, tp=2, pp=1, activation_ckpt="none"))
    assert (plan.tp_degree, plan.pp_degree, plan.recompute) == (2, 1, "none")


def test_a_small_model_stays_data_parallel():
    runs = read(**(GPT_LARGE | {"tp": None, "pp": None, "n_layers": 12, "hidden": 768, "model_name": "small"}))
    assert (plan_of(runs).dp_degree, plan_of(runs).recompute) == (8, "none")


@pytest.mark.parametrize(("gpu_mem_gb", "mode"), [(16, "full"), (32, "none")])
def test_recomputation_is_presumed_only_where_the_run_would_not_fit_without(gpu_mem_gb, mode):
    runs = read(**(GPT_LARGE | {"gpu_mem_gb": gpu_mem_gb, "micro_batch": 3, "global_batch": 24}))
    assert plan_of(runs).recompute == mode
    assert ("activation_ckpt = full" in runs.assumed[0]) == (mode == "full")


@pytest.mark.parametrize(
    ("fields", "stage", "in_nodes"),
    [
        ({"sharding": "FULL_SHARD"}, 3, False), ({"sharding": "HYBRID_SHARD"}, 3, True), ({"sharding": "SHARD_GRAD_OP"}, 2, False),
        ({"sharding": "distributed optimizer (presumed)"}, 1, False), ({"sharding": "none"}, 0, False), ({"framework": "PyTorch FSDP"}, 3, False),
        ({"framework": "DeepSpeed ZeRO-2"}, 2, False), ({"framework": "HF Trainer DDP"}, 0, False), ({"sharding": "HSDP", "zero_stage": 3}, 3, True),
        ({"sharding": "FULL_SHARD", "zero_stage": 1}, 1, False),
    ],
)  # fmt: skip
def test_sharding_is_read_from_words(fields, stage, in_nodes):
    row = Fields(fields)
    found = sharding_of(row, load_runtime("torch"), 8)
    assert (found.zero_stage, found.in_nodes, row.assumed) == (stage, in_nodes, [])


def test_an_unstated_sharding_is_the_runtimes_habit_and_named():
    row = Fields({"framework": "torchtitan"})
    assert sharding_of(row, load_runtime("torchtitan"), 8).zero_stage == 3
    assert row.assumed == ["zero_stage"]


def test_hybrid_sharding_shards_within_nodes():
    plan = plan_of(read(**(GPT_LARGE | {"n_gpus": 16, "gpus_per_node": 8, "dp": 16, "sharding": "HYBRID_SHARD", "zero_stage": 3})))
    assert (plan.dp_replicate_degree, plan.dp_shard_degree) == (2, 8)


@pytest.mark.parametrize(
    ("text", "mode"),
    [("full", "full"), ("True", "full"), ("1.0", "full"), ("full block", "full"), ("sometimes", "none"), ("uniform 1 layer", "full"), ("selective_op", "selective"),
     ("none", "none"), ("no", "none"), ("0", "none"), ("", "none")],
)  # fmt: skip
def test_recomputation_is_read_from_words(text, mode):
    row = Fields({"activation_ckpt": text})
    assert recompute_of(row) == mode
    assert bool(row.assumed) == (text == "sometimes")


BIG = {
    "model_name": "gpt3-175B",
    "gpu": "A100",
    "gpu_mem_gb": 80,
    "n_gpus": 256,
    "precision": "bf16",
    "framework": "Megatron-LM",
    "global_batch": 256,
}


def read_big(**changed):
    runs = read_runs(pd.DataFrame([BIG | changed]))
    return runs.plans.plan(0), "; ".join(runs.assumed[0])


def test_a_model_too_big_for_one_gpu_is_divided_in_the_node_first():
    plan, assumed = read_big()
    assert plan.tp_degree == 8
    assert plan.pp_degree > 1
    assert plan.world_size == 256
    assert plan.global_batch == 256
    assert f"tp = 8; pp = {plan.pp_degree}" in assumed


@pytest.mark.parametrize("changed", [{"model_name": "gpt2"}, {"tp": 1, "pp": 1}, {"zero_stage": 3}])
def test_no_division_is_presumed_where_it_fits_or_another_is_stated(changed):
    plan, assumed = read_big(**changed)
    assert (plan.tp_degree, plan.pp_degree) == (1, 1)
    assert "tp = " not in assumed


def test_pipelines_of_torch_cut_the_stated_batch_into_samples():
    stated = {"model_name": "llama3-8B", "tp": 1, "pp": 4, "dp": 8, "n_gpus": 32, "micro_batch": 8}
    cut, assumed = read_big(**stated, framework="torchtitan")
    assert (cut.micro_batch, cut.num_microbatches) == (1, 32)
    assert "micro_batch = 1" in assumed
    assert read_big(**stated)[0].micro_batch == 8


def test_recomputation_is_presumed_where_nothing_else_fits():
    plan, assumed = read_big(n_gpus=64)
    assert plan.recompute == "full"
    assert "activation_ckpt = full" in assumed
    assert read_big(n_gpus=64, activation_ckpt="none")[0].recompute == "none"


def test_a_row_whose_stated_degrees_leave_no_other_layout_is_priced_as_it_stands():
    runs = read_runs(pd.DataFrame([{"model_name": "mixtral-8x22B", "gpu": "H100", "n_gpus": 10, "framework": "Megatron-Core", "dp": 2, "zero_stage": 0,
                                    "activation_ckpt": "none", "micro_batch": 1, "global_batch": 8, "precision": "bf16"}]))  # fmt: skip
    assert not runs.skipped
    assert (runs.plans.plan(0).dp_degree, runs.plans.plan(0).tp_degree) == (2, 1)
