"""Comparison of predicted and published memory, and the fit of the constants."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from advisor.measure.memory_eval import (
    MemoryRuns,
    calibrate_memory,
    fit_memory_constants,
    fold_errors,
    memory_runs,
    predicted,
    price_runs,
    summary,
)
from advisor.measure.runs import read_runs
from cost_models.terms.memory_traits import GIB, MemoryConstants
from cost_models.transformer import TransformerShape, transformer_workload
from cost_models.types import Cluster, Device, Link, Plan, PlanTable

LINK = Link(name="any", bytes_per_s=1e11, latency_s=1e-6)
DEVICE = Device(name="any", memory_bytes=200 * GIB, memory_bytes_per_s=1e12, peak_flops_per_s={"bf16": 1e15})
CLUSTER = Cluster(device=DEVICE, gpus_per_node=8, num_nodes=1, intra=LINK, inter=LINK)


def made_up_runs(constants: MemoryConstants) -> MemoryRuns:
    """Runs whose figures are what the model says with these constants."""
    shape = TransformerShape(num_layers=16, hidden_size=2048, num_heads=16, vocab_size=32000, seq_len=2048)
    workload = transformer_workload(shape, runtime="megatron")
    plans = [Plan(runtime="megatron", micro_batch=b, tp_degree=t) for b in (1, 2, 4, 8) for t in (1, 2, 4)]
    size = len(plans)
    runs = MemoryRuns(
        workloads=(workload,) * size, clusters=(CLUSTER,) * size, plans=PlanTable.from_plans(plans), measured_bytes=np.ones(size),
        counted=np.array(["allocated", "reserved", "device"] * (size // 3)), rank=np.full(size, "fullest"),
        source=np.array(["a", "b"] * (size // 2)), model=np.full(size, "model"),
    )  # fmt: skip
    return dataclasses.replace(runs, measured_bytes=predicted(runs, price_runs(runs), constants)[0])


def test_a_fit_finds_the_constants_behind_the_figures():
    truth = MemoryConstants(reserved_factor=1.06, context_bytes=1.6 * GIB, group_bytes=0.5 * GIB)
    runs = made_up_runs(truth)
    got = fit_memory_constants(runs, price_runs(runs), np.ones(len(runs), bool))
    error = np.abs(np.log(predicted(runs, price_runs(runs), got)[0] / runs.measured_bytes))
    assert got.reserved_factor == pytest.approx(1.06)
    assert error.max() < 0.02


def test_a_constant_without_evidence_keeps_its_neutral_value():
    runs = made_up_runs(MemoryConstants())
    allocated = runs.counted == "allocated"
    got = fit_memory_constants(runs, price_runs(runs), allocated)
    assert got.context_bytes == pytest.approx(0.9 * GIB)


def test_the_group_being_scored_teaches_nothing():
    """Figures of one source doubled: its own error shows it, the other source's fit does not hide it."""
    runs = made_up_runs(MemoryConstants(reserved_factor=1.1, context_bytes=0.9 * GIB, group_bytes=0.35 * GIB))
    doubled = dataclasses.replace(runs, measured_bytes=np.where(runs.source == "b", 2 * runs.measured_bytes, runs.measured_bytes))
    error, high = fold_errors(doubled, doubled.source)
    assert np.allclose(error[runs.source == "b"], -np.log(2), atol=0.01)
    assert (high > error).all()


def test_a_fold_can_be_priced_with_less_than_is_known_of_it():
    """Constants come from the runs as they are known; the fold itself is priced as it is handed in."""
    runs = made_up_runs(MemoryConstants(reserved_factor=1.1, context_bytes=0.9 * GIB, group_bytes=0.35 * GIB))
    plain = transformer_workload(TransformerShape(num_layers=16, hidden_size=2048, num_heads=16, vocab_size=32000, seq_len=2048))
    plans = PlanTable.from_plans([dataclasses.replace(runs.plans.plan(i), runtime="torch") for i in range(len(runs))])
    unknown = dataclasses.replace(runs, workloads=(plain,) * len(runs), plans=plans)
    known_error, _ = fold_errors(runs, runs.source)
    error, _ = fold_errors(runs, runs.source, held_out=unknown)
    assert np.abs(known_error).max() < 0.01
    assert np.abs(error).max() > 0.05


def test_own_runs_move_the_share_of_activations_that_is_really_kept():
    runs = made_up_runs(MemoryConstants())
    truth = MemoryConstants(activation_scale=1.3)
    measured = predicted(runs, price_runs(runs, constants=truth), truth)[0]
    got = calibrate_memory(dataclasses.replace(runs, measured_bytes=measured))
    assert got["activation_scale"] == pytest.approx(1.3, abs=0.051)


def test_one_odd_run_moves_little():
    runs = made_up_runs(MemoryConstants()).take(np.array([0]))
    got = calibrate_memory(dataclasses.replace(runs, measured_bytes=3 * runs.measured_bytes))
    assert 0.85 <= got["activation_scale"] <= 1.2
    assert MemoryConstants.from_mapping(got).reserved_factor <= 1.25


def test_a_summary_counts_under_estimates():
    table = summary(np.log(np.array([0.5, 1.0, 1.0, 1.2])), np.array(["a", "a", "b", "b"]))
    assert table.loc["a", "under_by_5_percent"] == 0.5
    assert table.loc["all", "num_runs"] == 4


def test_published_figures_are_read_as_their_source_counts_them():
    row = {"model_name": "llama2-7b", "n_layers": 32, "hidden": 4096, "n_heads": 32, "ffn_hidden": 11008, "vocab": 32000, "seq_len": 4096,
           "gpu": "H100", "gpu_mem_gb": 80, "n_gpus": 8, "micro_batch": 1, "global_batch": 8, "peak_mem_gib": 40.0}  # fmt: skip
    frame = pd.DataFrame([row | {"source_repo_or_doc": "huggingface/nanotron"}, row | {"source_repo_or_doc": "somewhere"}, row])
    frame.loc[2, "peak_mem_gib"] = np.nan
    runs = memory_runs(read_runs(frame))
    assert list(runs.counted) == ["reserved", "reserved"]
    assert list(runs.rank) == ["first", "fullest"]
    assert runs.measured_bytes[0] == 40.0 * GIB


def test_a_source_that_prints_decimal_gigabytes_is_not_taken_for_gibibytes():
    row = {"model_name": "llama2-7b", "seq_len": 512, "gpu": "A10G", "n_gpus": 1, "micro_batch": 1, "global_batch": 1, "peak_mem_gib": 20.0}
    runs = memory_runs(read_runs(pd.DataFrame([row | {"source_repo_or_doc": "Lightning-AI/litgpt", "framework": "litgpt"}])))
    assert runs.measured_bytes[0] == 20e9
