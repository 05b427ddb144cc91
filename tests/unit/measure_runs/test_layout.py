"""Rows that state no layout."""

import pandas as pd
import pytest

from advisor.measure.runs import read_runs

ROW = {
    "model_name": "gpt3-175B",
    "gpu": "A100",
    "gpu_mem_gb": 80,
    "n_gpus": 256,
    "precision": "bf16",
    "framework": "Megatron-LM",
    "global_batch": 256,
}


def read(**changed):
    runs = read_runs(pd.DataFrame([ROW | changed]))
    return runs.plans.plan(0), "; ".join(runs.assumed[0])


def test_a_model_too_big_for_one_gpu_is_divided_in_the_node_first():
    plan, assumed = read()
    assert plan.tp_degree == 8
    assert plan.pp_degree > 1
    assert plan.world_size == 256
    assert plan.global_batch == 256
    assert f"tp = 8; pp = {plan.pp_degree}" in assumed


@pytest.mark.parametrize("changed", [{"model_name": "gpt2"}, {"tp": 1, "pp": 1}, {"zero_stage": 3}])
def test_no_division_is_presumed_where_it_fits_or_another_is_stated(changed):
    plan, assumed = read(**changed)
    assert (plan.tp_degree, plan.pp_degree) == (1, 1)
    assert "tp = " not in assumed


def test_pipelines_of_torch_cut_the_stated_batch_into_samples():
    stated = {"model_name": "llama3-8B", "tp": 1, "pp": 4, "dp": 8, "n_gpus": 32, "micro_batch": 8}
    cut, assumed = read(**stated, framework="torchtitan")
    assert (cut.micro_batch, cut.num_microbatches) == (1, 32)
    assert "micro_batch = 1" in assumed
    assert read(**stated)[0].micro_batch == 8


def test_recomputation_is_presumed_where_nothing_else_fits():
    plan, assumed = read(n_gpus=64)
    assert plan.recompute == "full"
    assert "activation_ckpt = full" in assumed
    assert read(n_gpus=64, activation_ckpt="none")[0].recompute == "none"
