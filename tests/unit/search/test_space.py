"""Only legal plans, and all of them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from toy import chain, cluster

from advisor.search.space import Space, divisors, legal_plans


@given(st.integers(1, 5000))
def test_divisors_are_all_and_sorted(n):
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


@settings(deadline=None, max_examples=30)
@given(nodes=st.sampled_from([1, 2, 3, 4]), per_node=st.sampled_from([1, 2, 4, 8]), batch=st.integers(1, 96))
def test_every_plan_fills_the_world_and_the_batch(nodes, per_node, batch):
    plans = legal_plans(chain(layers=12, heads=12), cluster(gpus_per_node=per_node, num_nodes=nodes), global_batch=batch)
    dp = plans.dp_replicate_degree * plans.dp_shard_degree
    assert (dp * plans.tp_degree * plans.pp_degree == nodes * per_node).all()
    assert (dp * plans.micro_batch * plans.num_microbatches == batch).all()
    assert (12 % plans.tp_degree == 0).all()
    assert (plans.pp_degree * plans.virtual_stages <= 12).all()
    assert ((plans.zero_stage > 0) | (plans.dp_shard_degree == 1)).all()
    assert ((plans.schedule == 3) == (plans.virtual_stages > 1)).all()


def test_no_plan_is_there_twice():
    plans = legal_plans(chain(), cluster(num_nodes=2), global_batch=64)
    rows = {
        tuple(int(getattr(plans, f.name)[i]) for f in dataclasses.fields(plans) if f.name != "runtime_names") for i in range(len(plans))
    }
    assert len(rows) == len(plans) > 100


def test_a_model_without_pairs_or_chain_is_data_parallel_only():
    model = dataclasses.replace(chain(), can_tensor_parallel=False, can_pipeline=False)
    plans = legal_plans(model, cluster(), global_batch=64)
    assert set(plans.tp_degree) == set(plans.pp_degree) == {1}
    assert set(plans.zero_stage) == {0, 1, 2, 3}


def test_key_value_heads_limit_tensor_parallelism():
    grouped = dataclasses.replace(chain(heads=32), num_kv_heads=4)
    plans = legal_plans(grouped, cluster(), global_batch=8)
    assert set(plans.tp_degree) == {1, 2, 4}


def test_hybrid_sharding_stays_in_the_node():
    plans = legal_plans(chain(), cluster(num_nodes=4), global_batch=64)
    hybrid = (plans.zero_stage == 3) & (plans.dp_replicate_degree > 1)
    assert hybrid.any()
    assert ((plans.dp_shard_degree * plans.tp_degree)[hybrid] <= 8).all()


def test_a_batch_smaller_than_the_world_leaves_no_pure_data_parallel_plan():
    plans = legal_plans(chain(), cluster(), global_batch=2)
    assert len(plans)
    assert (plans.dp_replicate_degree * plans.dp_shard_degree <= 2).all()


def test_a_batch_that_nothing_divides_gives_no_plans():
    model = dataclasses.replace(chain(), can_tensor_parallel=False, can_pipeline=False)
    assert len(legal_plans(model, cluster(), global_batch=7)) == 0


@pytest.mark.parametrize("limit", [1, 4])
def test_the_space_can_be_narrowed(limit):
    plans = legal_plans(chain(), cluster(), global_batch=64, space=Space(max_tp_degree=limit, offload=False, recomputes=("none",)))
    assert plans.tp_degree.max() == limit
    assert not plans.offload.any()
    assert not plans.recompute.any()
