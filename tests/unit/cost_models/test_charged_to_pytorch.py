"""What PyTorch's engines were seen to do where their models are small, tied or have experts: all cells of the engines' matrix are charged so."""

import dataclasses

import numpy as np
import pytest

from cost_models import TransformerShape, estimate, load_calibration, transformer_workload
from cost_models.collectives import charged
from cost_models.terms.volumes import MIN_UNIT_PARAMS, sharding_units
from cost_models.types import Plan, PlanTable

MOE = TransformerShape(num_layers=4, hidden_size=512, num_heads=8, vocab_size=4096, seq_len=512, num_experts=8, num_active_experts=2,
                       expert_ffn_size=1024)  # fmt: skip
SMALL = TransformerShape(num_layers=4, hidden_size=512, num_heads=8, vocab_size=50257, seq_len=512)


def find(charges, kind, group):
    found = [c for c in charges if c.kind == kind and c.group == group]
    return sum(c.count for c in found), sum(c.bytes for c in found)


@pytest.mark.parametrize(
    "plan", [Plan(dp_replicate_degree=2, runtime="torch-ddp"), Plan(dp_shard_degree=2, zero_stage=1, runtime="torch-ddp")]
)
def test_experts_that_all_ranks_hold_are_reduced_like_all_else(plan):
    workload = transformer_workload(MOE, precision="fp32")
    charges = charged(workload, plan)
    assert {c.kind for c in charges} <= {"all-reduce", "broadcast"}
    assert find(charges, "all-reduce", "dp_replicate")[1] == pytest.approx(4 * workload.num_trainable_params)


def test_experts_on_different_ranks_are_reduced_apart():
    workload = transformer_workload(MOE)
    charges = charged(workload, Plan(dp_shard_degree=8, ep_degree=4, zero_stage=1, runtime="megatron-core"))
    assert any(c.purpose == "gradients of experts" for c in charges)


def test_a_small_model_without_layers_is_one_sharding_unit():
    units = sharding_units(np.array([5.0, 5.0]), np.array([0.0, 0.0]), np.array([MIN_UNIT_PARAMS - 1.0, MIN_UNIT_PARAMS]))
    assert units.num_units.tolist() == [1, 5]
    assert units.root_params.tolist() == [MIN_UNIT_PARAMS - 1, 0]


@pytest.mark.parametrize(
    ("more", "parts"),
    [({}, 1), ({"tp_degree": 2}, 1), ({"dp_shard_degree": 2, "zero_stage": 3}, 2), ({"dp_replicate_degree": 2}, 1)],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tied_weight_is_reduced_between_the_ends(more, parts, precision):
    workload = transformer_workload(SMALL, precision=precision)
    plan = Plan(pp_degree=2, num_microbatches=4, schedule="1f1b", runtime="torch-tp", **more)
    for stage in (0, 1):
        assert find(charged(workload, plan, stage=stage), "all-reduce", "pp") == (1, 4 * workload.tied_params / parts)


def test_a_tied_weight_costs_its_bytes(cluster):
    workload = transformer_workload(SMALL)
    plans = PlanTable.from_plans([Plan(pp_degree=2, num_microbatches=4, schedule="1f1b", runtime="torch-tp")])
    tied, free = (
        float(estimate(one, cluster, plans, load_calibration()).breakdown_s["dp_communication"][0])
        for one in (workload, dataclasses.replace(workload, tied_params=0.0))
    )
    assert tied > free == 0
