"""A plan for many GPUs becomes one for a few processes that still has each kind of parallelism."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.verify.shrink import shrink, shrink_plan, usual_processes
from cost_models.types import Plan

POWERS = st.integers(0, 6).map(lambda k: 2**k)
PLANS = st.builds(
    lambda pp, tp, shard, replicate, zero, micro, turns: Plan(
        pp_degree=pp, tp_degree=tp, dp_shard_degree=shard if zero else 1, dp_replicate_degree=replicate, zero_stage=zero if shard > 1 else 0,
        micro_batch=micro, num_microbatches=turns * pp, schedule="1f1b" if pp > 1 else "none",
    ),
    POWERS, POWERS, POWERS, POWERS, st.sampled_from((0, 1, 2, 3)), st.integers(1, 64), st.integers(1, 16),
)  # fmt: skip
KINDS = ("pp_degree", "tp_degree", "dp_shard_degree", "dp_replicate_degree")


def kinds(plan: Plan) -> set[str]:
    return {name for name in KINDS if getattr(plan, name) > 1}


@given(PLANS, st.sampled_from((1, 2, 3, 4, 8, 16)))
def test_fits_the_processes_and_invents_nothing(plan: Plan, num_processes: int) -> None:
    small = shrink_plan(plan, num_processes)
    assert small.world_size <= num_processes
    assert kinds(small) <= kinds(plan)
    assert small.micro_batch <= plan.micro_batch
    assert small.num_microbatches <= plan.num_microbatches


@given(PLANS)
def test_keeps_every_kind_where_there_are_processes_for_it(plan: Plan) -> None:
    assert kinds(shrink_plan(plan, 2 ** len(kinds(plan)))) == kinds(plan)


@given(PLANS, st.sampled_from((2, 4, 8)))
def test_a_pipeline_has_a_micro_batch_for_each_stage(plan: Plan, num_processes: int) -> None:
    small = shrink_plan(plan, num_processes)
    assert small.num_microbatches >= small.pp_degree
    assert small.num_microbatches % small.pp_degree == 0


def test_tensor_and_sharding_ranks_stay_in_pairs() -> None:
    small = shrink_plan(Plan(tp_degree=8, dp_shard_degree=16, zero_stage=3, micro_batch=4, num_microbatches=8, sequence_parallel=True), 4)
    assert (small.tp_degree, small.dp_shard_degree, small.zero_stage, small.sequence_parallel) == (2, 2, 3, True)


def test_what_remains_goes_to_data_parallelism() -> None:
    assert shrink_plan(Plan(dp_replicate_degree=16), 4).dp_replicate_degree == 4
    assert shrink_plan(Plan(dp_replicate_degree=2), 4).dp_replicate_degree == 2


def test_without_sharding_ranks_nothing_is_sharded() -> None:
    small = shrink_plan(Plan(pp_degree=4, tp_degree=2, dp_shard_degree=8, zero_stage=3, num_microbatches=8), 4)
    assert (small.pp_degree, small.tp_degree, small.dp_shard_degree, small.zero_stage) == (2, 2, 1, 0)


def test_a_tensor_degree_without_a_factor_of_two_keeps_its_smallest() -> None:
    assert shrink_plan(Plan(tp_degree=3), 4).tp_degree == 3
    assert shrink_plan(Plan(tp_degree=3), 2).tp_degree == 1


def test_accumulation_of_the_script_itself_stays() -> None:
    assert shrink_plan(Plan(dp_replicate_degree=8, num_microbatches=12), 2, accumulation=4).num_microbatches == 8


@pytest.mark.parametrize(
    ("plan", "processes"),
    [
        (Plan(), 1),
        (Plan(dp_replicate_degree=8), 2),
        (Plan(tp_degree=8, dp_shard_degree=16, zero_stage=3), 4),
        (Plan(tp_degree=8, dp_shard_degree=16, zero_stage=3, pp_degree=2), 4),
    ],
)
def test_two_processes_for_each_kind_up_to_four(plan: Plan, processes: int) -> None:
    assert usual_processes(plan) == processes


LAYERS = {
    "block_paths": ["stem.0", *(f"layers.{i}" for i in range(6))],
    "layer_groups": [
        {"name": "stem.0", "num_repeats": 1}, {"name": "layers.0", "num_repeats": 1}, {"name": "layers.*", "num_repeats": 5},
        {"name": "head", "num_repeats": 1},
    ],
}  # fmt: skip


def test_the_first_blocks_of_a_run_stay_and_the_different_one_among_them() -> None:
    assert shrink(Plan(dp_replicate_degree=2), LAYERS, 2, can_cut=True).removed_blocks == ("layers.2", "layers.3", "layers.4", "layers.5")
    assert shrink(Plan(dp_replicate_degree=2), LAYERS, 2, can_cut=False).removed_blocks == ()


def test_a_pipeline_keeps_a_block_for_each_stage() -> None:
    plan = Plan(pp_degree=2, virtual_stages=2, num_microbatches=4, schedule="interleaved")
    assert shrink(plan, LAYERS, 2, can_cut=True).removed_blocks == ("layers.4", "layers.5")


def test_says_every_change() -> None:
    plan = Plan(pp_degree=4, tp_degree=2, dp_shard_degree=8, zero_stage=3, micro_batch=16, num_microbatches=32, schedule="1f1b")
    assert shrink(plan, LAYERS, 4, can_cut=True).changes == (
        "pipeline stages 4 -> 2", "sharding 8 left out: too few processes", "micro-batch 16 -> 2", "micro-batches per step 32 -> 4",
        "layers 7 -> 3",
    )  # fmt: skip
