"""A plan's prices are its own: neither the order nor the company of plans in a table changes them, nor how many micro-batches others take."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import estimate, runtime_names
from cost_models.terms.memory import memory_costs
from cost_models.types import RECOMPUTES, SCHEDULES, Estimates, PlanTable

MICRO_BATCHES = (1, 2, 3, 7, 8, 33, 1000)
NONE, GPIPE, ONE_F_ONE_B, INTERLEAVED = (SCHEDULES.index(name) for name in ("none", "gpipe", "1f1b", "interleaved"))
EXACT = {"rtol": 1e-12, "atol": 1e-6}  # seconds and bytes: sums are taken in another order


def random_plans(size: int, seed: int) -> PlanTable:
    """Plans over everything that a plan can say, with many that differ in their number of micro-batches only."""
    draw = np.random.default_rng(seed)

    def of(*values: int) -> np.ndarray:
        return draw.choice(np.array(values, dtype=np.int64), size)

    pp, tp = of(1, 2, 4, 8), of(1, 2, 8)
    virtual = np.where(pp > 1, of(1, 2), 1)
    schedule = np.where(pp == 1, NONE, np.where(virtual > 1, INTERLEAVED, of(GPIPE, ONE_F_ONE_B)))
    names = runtime_names()
    return PlanTable(
        dp_replicate_degree=of(1, 2), dp_shard_degree=of(1, 8), tp_degree=tp, cp_degree=of(1, 2), ep_degree=of(1, 1, 2), pp_degree=pp,
        virtual_stages=virtual, zero_stage=of(0, 1, 2, 3), micro_batch=of(1, 4), num_microbatches=of(*MICRO_BATCHES),
        recompute=of(*range(len(RECOMPUTES))), schedule=schedule, sequence_parallel=np.where(tp > 1, of(0, 1), 0), offload=of(0, 1),
        runtime=draw.integers(0, len(names), size), runtime_names=names,
    )  # fmt: skip


def columns(got: Estimates) -> dict[str, np.ndarray]:
    out = {}
    for field in dataclasses.fields(got):
        value = getattr(got, field.name)
        out |= {f"{field.name}: {k}": v for k, v in value.items()} if isinstance(value, dict) else {field.name: value}
    return out


@pytest.mark.parametrize("workload", ["llama8b", "small_gpt"])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(2, 400))
def test_order_and_company_of_plans_do_not_matter(request, cluster, workload, seed, size):
    model, table = request.getfixturevalue(workload), random_plans(size, seed)
    shuffled = np.random.default_rng(seed + 1).permutation(size)
    some = shuffled[: max(1, size // 3)]
    whole = columns(estimate(model, cluster, table))
    for index in (shuffled, some):
        for name, values in columns(estimate(model, cluster, table.take(index))).items():
            np.testing.assert_allclose(values, whole[name][index], **EXACT, err_msg=name)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_micro_batches_of_one_kind_of_plan_are_priced_as_if_alone(llama8b, cluster, seed):
    """Plans that differ in nothing else share their prices inside."""
    one = random_plans(1, seed).take(np.zeros(len(MICRO_BATCHES), dtype=np.int64))
    table = dataclasses.replace(one, num_microbatches=np.array(MICRO_BATCHES, dtype=np.int64))
    together = columns(estimate(llama8b, cluster, table))
    for i in range(len(table)):
        for name, values in columns(estimate(llama8b, cluster, table.take(np.array([i])))).items():
            np.testing.assert_allclose(values[0], together[name][i], **EXACT, err_msg=name)


def test_a_table_longer_than_a_chunk_is_priced_like_its_parts(llama8b, cluster):
    table = random_plans(20_000, 5)
    whole, parts = memory_costs(llama8b, cluster, table), np.array_split(np.arange(len(table)), 7)
    for index in parts:
        np.testing.assert_allclose(memory_costs(llama8b, cluster, table.take(index)).high, whole.high[index], rtol=1e-12)
