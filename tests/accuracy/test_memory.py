"""Errors on published memory figures, held out, against a committed baseline.

Two kinds of folds. "model": constants fitted without the model being scored. "source": constants fitted without the source being scored,
and its runtime's habits only as code or documentation tell them. "unknown_runtime": constants likewise, but the source's runs taken for
plain PyTorch's. memory_runs.csv has the published figures with the shapes and layouts they belong to and, in `source`, the repository each
was published in; `counted` is what a figure counts and `rank` whose it is. `python tests/accuracy/test_memory.py` writes a new baseline.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from advisor.measure.memory_eval import MemoryRuns, fold_errors, predicted, price_runs, summary
from cost_models.terms.memory import memory_costs_rows
from cost_models.terms.memory_traits import GENERIC_RUNTIME, MemoryConstants, documented_traits, memory_traits
from cost_models.transformer import TransformerShape, transformer_workload
from cost_models.types import Cluster, Device, Link, Plan, PlanTable, Workload

CSV = Path(__file__).parent / "memory_runs.csv"
#: Bytes that the driver of a card sold as so many GB reports.
DEVICE_BYTES = {24: 24.1e9, 32: 34.1e9, 80: 84.95e9, 96: 101e9, 141: 150.1e9, 180: 191.5e9, 186: 197e9}
_LINK = Link(name="any", bytes_per_s=1e11, latency_s=1e-6)
_COUNTS = ("num_layers", "num_heads", "num_kv_heads", "num_experts", "num_active_experts", "num_dense_layers")
_SIZES = ("hidden_size", "ffn_size", "vocab_size", "seq_len", "expert_ffn_size", "shared_ffn_size")
_FLAGS = ("gated", "tied", "dropout", "flash", "compiled", "latent_attention", "fused_loss")
BASELINE = Path(__file__).parent / "memory_baseline.json"
#: Share by which an error may grow before the test fails: constants are taken from a grid.
SLACK = 1.1


@pytest.fixture(scope="module")
def runs() -> MemoryRuns:
    return read_memory_runs()


@pytest.fixture(scope="module")
def figures(runs: MemoryRuns) -> dict[str, dict[str, float]]:
    return measure(runs)


def families(runs: MemoryRuns) -> np.ndarray:
    """BigScience's tuning models of 170-210B differ by a few layers: one fold."""
    return np.array(["bs-170B" if name.startswith(("bs-1", "bs-2")) else name for name in runs.model])


def measure(runs: MemoryRuns) -> dict[str, dict[str, float]]:
    quality = pd.read_csv(CSV)["quality"].to_numpy()
    out: dict[str, dict[str, float]] = {}
    plain = read_memory_runs(GENERIC_RUNTIME)
    folds = {
        "model": (runs, families(runs), memory_traits), "source": (runs, runs.source, documented_traits),
        "unknown_runtime": (plain, runs.source, memory_traits),
    }  # fmt: skip
    for kind, (some, groups, traits_of) in folds.items():
        error, high = fold_errors(runs, groups, traits_of=traits_of, held_out=some)
        table = summary(error, runs.source)
        good = np.isin(quality, ["A", "B"])
        out[kind] = {
            "median": table.loc["all", "median"], "p90": table.loc["all", "p90"],
            "median_quality_a_b": float(np.median(np.abs(np.expm1(error[good])))),
            "mean_of_source_medians": float(table["median"].drop("all").mean()),
            "high_under_by_5_percent": float((np.expm1(high) < -0.05).mean()),
        } | {f"median {name}": value for name, value in table["median"].drop("all").items()}  # fmt: skip
        costs = memory_costs_rows(some.workloads, some.clusters, some.plans, traits_of=traits_of)
        room = np.array([c.device.memory_bytes for c in runs.clusters])
        out[kind]["ran_but_called_too_big"] = float((costs.peak > room).mean())
        out[kind]["ran_but_not_recommended"] = float((costs.high > room).mean())
    return {kind: {name: round(float(value), 4) for name, value in values.items()} for kind, values in out.items()}


def test_errors_are_no_worse_than_the_baseline(figures):
    baseline = json.loads(BASELINE.read_text(encoding="utf8"))
    worse = {
        f"{kind}: {name}": (value, figures[kind][name])
        for kind, values in baseline.items() for name, value in values.items() if figures[kind][name] > max(SLACK * value, value + 0.003)
    }  # fmt: skip
    assert not worse, f"(baseline, now): {worse}"


def test_targets_are_met(figures):
    model, source = figures["model"], figures["source"]
    assert model["median"] <= 0.045
    assert model["p90"] <= 0.18
    assert model["high_under_by_5_percent"] <= 0.015
    assert source["mean_of_source_medians"] <= 0.06
    assert source["high_under_by_5_percent"] <= 0.01
    assert source["ran_but_called_too_big"] <= 0.005
    assert source["ran_but_not_recommended"] <= 0.01
    assert figures["unknown_runtime"]["mean_of_source_medians"] <= 0.12


def test_a_measured_value_never_reaches_its_own_prediction(runs):
    """Shuffling what was measured changes no price."""
    shuffled = dataclasses.replace(runs, measured_bytes=np.random.default_rng(0).permutation(runs.measured_bytes))
    one, other = (predicted(r, price_runs(r), MemoryConstants())[0] for r in (runs, shuffled))
    assert np.array_equal(one, other)


def read_memory_runs(runtime: str = "") -> MemoryRuns:
    frame = pd.read_csv(CSV)
    if runtime:
        frame["runtime"] = runtime
    clusters = {gb: _cluster(size) for gb, size in DEVICE_BYTES.items()}
    workloads: dict[tuple[object, ...], Workload] = {}
    rows = frame.to_dict("records")
    keys = [tuple(r[c] for c in (*_COUNTS, *_SIZES, *_FLAGS, "runtime")) for r in rows]
    for key, row in zip(keys, rows, strict=True):
        if key not in workloads:
            workloads[key] = _workload(row)
    return MemoryRuns(
        workloads=tuple(workloads[key] for key in keys), clusters=tuple(clusters[r["memory_gb"]] for r in rows),
        plans=PlanTable.from_plans([_plan(r) for r in rows]), measured_bytes=frame["measured_gib"].to_numpy() * 2.0**30,
        counted=frame["counted"].to_numpy(dtype=np.str_), rank=frame["rank"].to_numpy(dtype=np.str_),
        source=frame["source"].to_numpy(dtype=np.str_), model=frame["model"].to_numpy(dtype=np.str_),
    )  # fmt: skip


def _cluster(memory_bytes: float) -> Cluster:
    device = Device(name="any", memory_bytes=memory_bytes, memory_bytes_per_s=1e12, peak_flops_per_s={"bf16": 1e15})
    return Cluster(device=device, gpus_per_node=8, num_nodes=1, intra=_LINK, inter=_LINK)


def _workload(row: dict[str, object]) -> Workload:
    shape = TransformerShape(
        **{c: int(row[c]) for c in _COUNTS}, **{c: float(row[c]) for c in _SIZES}, **{c: bool(row[c]) for c in _FLAGS}
    )  # fmt: skip
    return transformer_workload(shape, runtime=str(row["runtime"]))


def _plan(row: dict[str, object]) -> Plan:
    zero, data, pp, chunks = (int(row[c]) for c in ("zero_stage", "dp_degree", "pp_degree", "virtual_stages"))
    return Plan(
        dp_replicate_degree=1 if zero else data, dp_shard_degree=data if zero else 1, tp_degree=int(row["tp_degree"]),
        cp_degree=int(row["cp_degree"]), ep_degree=int(row["ep_degree"]), pp_degree=pp, virtual_stages=chunks, zero_stage=zero,
        micro_batch=int(row["micro_batch"]), num_microbatches=int(row["num_microbatches"]), recompute=str(row["recompute"]),
        schedule="none" if pp == 1 else "interleaved" if chunks > 1 else "1f1b", sequence_parallel=bool(row["sequence_parallel"]),
        runtime=str(row["runtime"]),
    )  # fmt: skip


if __name__ == "__main__":
    BASELINE.write_text(json.dumps(measure(read_memory_runs()), indent=1) + "\n", encoding="utf8")
