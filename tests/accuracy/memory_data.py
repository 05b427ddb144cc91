"""Reads memory_runs.csv: published memory figures with the shapes and layouts they belong to, one run per row.

`source` names the repository the figure was published in. `counted` is what it counts, `rank` whose it is (see PUBLISHED in
advisor/measure/memory_eval.py). Bytes measured are read into MemoryRuns.measured_bytes and nothing else.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd

from advisor.measure.memory_eval import MemoryRuns
from cost_models.terms.memory_traits import memory_traits
from cost_models.transformer import TransformerShape, transformer_workload
from cost_models.transformer_memory import loss_bytes
from cost_models.types import Cluster, Device, Link, Plan, PlanTable, Workload

CSV = Path(__file__).parent / "memory_runs.csv"
#: Bytes that the driver of a card sold as so many GB reports.
DEVICE_BYTES = {24: 24.1e9, 32: 34.1e9, 80: 84.95e9, 96: 101e9, 141: 150.1e9, 180: 191.5e9, 186: 197e9}
_LINK = Link(name="any", bytes_per_s=1e11, latency_s=1e-6)
_COUNTS = ("num_layers", "num_heads", "num_kv_heads", "num_experts", "num_active_experts", "num_dense_layers")
_SIZES = ("hidden_size", "ffn_size", "vocab_size", "seq_len", "expert_ffn_size", "shared_ffn_size")
_FLAGS = ("gated", "tied", "dropout", "flash", "compiled", "latent_attention")


def read_memory_runs() -> MemoryRuns:
    frame = pd.read_csv(CSV)
    clusters = {gb: _cluster(size) for gb, size in DEVICE_BYTES.items()}
    workloads: dict[tuple[object, ...], Workload] = {}
    rows = frame.to_dict("records")
    keys = [tuple(r[c] for c in (*_COUNTS, *_SIZES, *_FLAGS, "fused_loss", "runtime")) for r in rows]
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
    workload = transformer_workload(shape, runtime=str(row["runtime"]))
    logits = loss_bytes(shape.vocab_size, shape.seq_len, memory_traits(str(row["runtime"])), fused=bool(row["fused_loss"]))
    return dataclasses.replace(workload, logits_bytes=logits)


def _plan(row: dict[str, object]) -> Plan:
    zero, data, pp, chunks = (int(row[c]) for c in ("zero_stage", "dp_degree", "pp_degree", "virtual_stages"))
    return Plan(
        dp_replicate_degree=1 if zero else data, dp_shard_degree=data if zero else 1, tp_degree=int(row["tp_degree"]),
        cp_degree=int(row["cp_degree"]), ep_degree=int(row["ep_degree"]), pp_degree=pp, virtual_stages=chunks, zero_stage=zero,
        micro_batch=int(row["micro_batch"]), num_microbatches=int(row["num_microbatches"]), recompute=str(row["recompute"]),
        schedule="none" if pp == 1 else "interleaved" if chunks > 1 else "1f1b", sequence_parallel=bool(row["sequence_parallel"]),
        runtime=str(row["runtime"]),
    )  # fmt: skip
