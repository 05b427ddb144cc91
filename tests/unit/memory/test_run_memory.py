"""Memory of a table's runs: the published figure, and whether a run fits."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from advisor.measure.predict import estimate_runs, predict_runs
from advisor.measure.run_memory import published_as, run_memory
from advisor.measure.runs import read_runs

ROW = {"model_name": "llama3-70B", "seq_len": 8192, "gpu": "H100", "gpu_mem_gb": 80, "n_gpus": 64, "dp": 64, "tp": 1, "pp": 1, "zero_stage": 3,
       "framework": "torchtitan", "micro_batch": 1, "global_batch": 64, "precision": "bf16", "activation_ckpt": "none"}  # fmt: skip


def predicted(**change):
    return predict_runs(pd.DataFrame([{**ROW, **change}])).iloc[0]


def test_a_run_that_states_no_recomputation_recomputes_as_little_as_makes_it_fit():
    stated, blank = predicted(), predicted(activation_ckpt=math.nan)
    assert not stated.predicted_fits
    assert blank.predicted_fits
    assert "activation_ckpt = full" in blank.assumed
    assert blank.predicted_peak_mem_gib < 80 < stated.predicted_peak_mem_gib
    assert blank.predicted_step_time_s > stated.predicted_step_time_s


def test_nothing_is_presumed_of_a_run_that_fits_or_never_can():
    assert "memory only" not in predicted(activation_ckpt=math.nan, seq_len=512).assumed
    never = predicted(activation_ckpt=math.nan, n_gpus=8, dp=8, global_batch=8, gpu="A100", gpu_mem_gb=40)
    assert not never.predicted_fits
    assert "memory only" not in never.assumed


def test_a_run_fits_where_its_best_estimate_does():
    """The cautious end decides what to recommend, not what a published run did."""
    row = {**ROW, "model_name": "llama3-8B", "n_gpus": 8, "dp": 8, "micro_batch": 2, "global_batch": 16, "seq_len": 8704,
           "activation_ckpt": "selective"}  # fmt: skip
    runs = read_runs(pd.DataFrame([row]))
    room = runs.clusters[0].device.memory_bytes
    assert run_memory(runs).fits[0]
    assert estimate_runs(runs).high_memory_bytes[0] > room


@pytest.mark.parametrize(
    ("source", "counted", "rank", "unit_bytes"),
    [("huggingface/nanotron ultrascale-playbook", "reserved", "first", 2**30), ("Lightning-AI/litgpt", "allocated", "fullest", 1e9),
     ("pytorch/torchtune", "allocated", "fullest", 2**30), ("somewhere", "reserved", "fullest", 2**30), ("own", "device", "fullest", 2**30)],
)  # fmt: skip
def test_figures_are_what_their_source_publishes(source, counted, rank, unit_bytes):
    got = published_as(source)
    assert (got.counted, got.rank, got.unit_bytes) == (counted, rank, unit_bytes)


@pytest.mark.parametrize(
    ("notes", "counted"),
    [("torch.cuda.max_memory_allocated", "allocated"), ("peak memory reserved", "reserved"), ("read off nvidia-smi", "device"), ("", "reserved")],
)  # fmt: skip
def test_the_notes_of_other_sources_may_say_what_a_figure_is(notes, counted):
    assert published_as("some/where", notes).counted == counted


def test_what_is_read_on_the_first_and_last_of_one_node_is_the_first_rank_s():
    source, llama = published_as("bigscience-workshop/bigscience"), read_runs(pd.DataFrame([ROW]))
    one_node = read_runs(pd.DataFrame([{**ROW, "n_gpus": 8, "dp": 8, "global_batch": 8}]))
    assert source.rank_on(llama.clusters[0]) == "ends"
    assert source.rank_on(one_node.clusters[0]) == "first"
