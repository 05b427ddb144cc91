"""What users reported: whether a job fitted, or what it took. memory_cases.csv holds the facts with their sources.

What a report leaves open is in `assumed`. Reports of 4-bit bases are priced with 0.56 bytes per parameter on every rank.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import pytest

from cost_models.terms.memory import memory_costs
from cost_models.terms.memory_traits import GIB, memory_traits
from cost_models.transformer import TransformerShape, transformer_workload
from cost_models.types import Cluster, Device, Link, Plan, PlanTable

CASES = pd.read_csv(Path(__file__).parent / "memory_cases.csv").to_dict("records")
DEVICE_BYTES = {22: 23.6e9, 24: 25.4e9, 32: 34.1e9, 40: 42.4e9, 80: 84.95e9, 96: 101e9}
LINK = Link(name="any", bytes_per_s=1e11, latency_s=1e-6)
#: Reports the model gets wrong, and why; an entry that comes out right must go.
WRONG: dict[str, str] = {}
SHAPE_COUNTS = ("num_layers", "num_heads", "num_kv_heads", "num_experts", "num_active_experts")
SHAPE_SIZES = ("hidden_size", "ffn_size", "vocab_size", "seq_len", "expert_ffn_size")


def answer(case: dict) -> tuple[bool, str]:
    """Whether the model agrees with the report, and its figures in words."""
    shape = TransformerShape(
        **{k: int(case[k]) for k in SHAPE_COUNTS}, **{k: float(case[k]) for k in SHAPE_SIZES}, gated=bool(case["gated"]),
        tied=bool(case["tied"]), trainable_share=case["trainable_share"], fused_loss=bool(case["fused_loss"]),
    )  # fmt: skip
    workload = transformer_workload(shape, precision=case["precision"], runtime=case["runtime"])
    traits = memory_traits(case["runtime"])
    zero, data, pp = int(case["zero_stage"]), int(case["dp_degree"]), int(case["pp_degree"])
    plan = Plan(
        dp_replicate_degree=1 if zero else data, dp_shard_degree=data if zero else 1, tp_degree=int(case["tp_degree"]), pp_degree=pp,
        zero_stage=zero, micro_batch=int(case["micro_batch"]), num_microbatches=int(case["num_microbatches"]), recompute=case["recompute"],
        schedule="1f1b" if pp > 1 else "none", sequence_parallel=int(case["tp_degree"]) > 1, offload=bool(case["offload"]),
        runtime=case["runtime"],
    )  # fmt: skip
    device = Device(name="any", memory_bytes=DEVICE_BYTES[int(case["memory_gb"])], memory_bytes_per_s=1e12, peak_flops_per_s={"bf16": 1e15})
    cluster = Cluster(device=device, gpus_per_node=8, num_nodes=16, intra=LINK, inter=LINK)
    own = {"param_bytes": float(case["param_bytes"])} if pd.notna(case["param_bytes"]) else {}
    own |= {"state_bytes": 0.0} if case["optimizer"] == "paged" else {}
    costs = memory_costs(workload, cluster, PlanTable.from_plans([plan]), traits_of=lambda _: dataclasses.replace(traits, **own))
    if case["check"] == "fits":
        fits = costs.high[0] <= device.memory_bytes
        return fits == bool(case["expected"]), f"{costs.high[0] / GIB:.1f} of {device.memory_bytes / GIB:.1f} GiB"
    value = {"allocated": costs.allocated, "reserved": costs.reserved, "device": costs.peak}[case["counted"]][0] / GIB
    return abs(value / case["expected"] - 1) <= case["tolerance"], f"{value:.1f} GiB, reported {case['expected']:.1f}"


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_report_agrees_with_the_model(case):
    right, figures = answer(case)
    assert right != (case["id"] in WRONG), f"{case['id']}: {figures}"


def test_nearly_all_reports_are_right():
    assert len(WRONG) <= 0.15 * len(CASES)
