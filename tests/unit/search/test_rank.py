"""Ranking: what fits, in order, with reasons; what doesn't, with bytes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from toy import chain, cluster

from advisor.search import FAMILIES, Request, family, fewest_gpus, price, resized, scaling, search, sizes_around
from cost_models.types import Plan


def request(**changes):
    base = {"workload": chain(), "cluster": cluster(), "global_batch": 64}
    return Request(**{**base, **changes})


@pytest.fixture(scope="module")
def small():
    return search(request())


def test_candidates_fit_and_are_in_order_after_the_first(small):
    times = [c.estimate["step_time_s"] for c in small.candidates]
    assert times[1:] == sorted(times[1:])
    assert times[0] <= min(times) * 1.15
    assert all(c.estimate["high_memory_bytes"] <= 0.95 * 80e9 for c in small.candidates)


def test_parts_of_every_candidate_sum_to_the_whole(small):
    for c in small.candidates:
        assert sum(c.breakdown_s.values()) == pytest.approx(c.estimate["step_time_s"], rel=1e-9)
        assert sum(c.breakdown_bytes.values()) == pytest.approx(c.estimate["peak_memory_bytes"], rel=1e-9)


def test_candidates_are_different_strategies_with_reasons(small):
    keys = [(family(c.plan), c.plan.tp_degree, c.plan.pp_degree, c.plan.zero_stage, c.plan.offload) for c in small.candidates]
    assert len(set(keys)) == len(keys) > 3
    assert all(c.reasons for c in small.candidates)


def test_near_equal_times_go_to_the_simplest_plan():
    tiny = search(request(workload=chain(layers=4, width=256, heads=4, vocab=1000)))
    assert family(tiny.candidates[0].plan) == "DDP"


def test_a_model_too_big_for_copies_is_sharded_and_says_why_not_ddp():
    big = search(request(workload=chain(layers=32, width=4096, heads=32, tokens=2048), global_batch=64))
    assert big.candidates
    assert big.candidates[0].plan.zero_stage or big.candidates[0].plan.tp_degree * big.candidates[0].plan.pp_degree > 1
    ddp = next(r for r in big.rejected if family(r.plan) == "DDP")
    assert ddp.needed_bytes > ddp.available_bytes
    assert "GiB for optimizer states alone" in ddp.reason


def test_every_family_is_a_candidate_or_rejected_or_pointless():
    result = search(request(cluster=cluster(num_nodes=2)))
    named = {family(c.plan) for c in result.candidates} | {family(r.plan) for r in result.rejected}
    assert named == set(FAMILIES)


def test_models_that_cannot_be_split_say_so():
    model = dataclasses.replace(chain(), can_tensor_parallel=False, can_pipeline=False)
    reasons = {family(r.plan): r.reason for r in search(request(workload=model)).rejected}
    assert "column- and row-parallel" in reasons["tensor parallel"]
    assert "chain of layers" in reasons["pipeline parallel"]


def test_nothing_fits_leaves_the_closest_plans_and_their_bytes():
    huge = chain(layers=400, width=16384, heads=128, tokens=4096)
    result = search(request(workload=huge, global_batch=8))
    assert not result.candidates
    assert all(r.needed_bytes > r.available_bytes for r in result.rejected if r.needed_bytes is not None)
    size = fewest_gpus(request(workload=huge, global_batch=4096), most=4096)
    assert size is not None
    assert size.num_gpus > 8


def test_the_memory_objective_takes_the_smallest(small):
    least = search(request(objective="memory")).candidates[0]
    assert least.estimate["high_memory_bytes"] <= min(c.estimate["high_memory_bytes"] for c in small.candidates) * 1.05


@settings(deadline=None, max_examples=15)
@given(factor=st.floats(1.1, 8))
def test_more_memory_never_slows_the_best_plan(factor):
    model = chain(layers=32, width=4096, heads=32, tokens=2048)
    tight = search(request(workload=model, cluster=cluster(memory_bytes=60e9)))
    roomy = search(request(workload=model, cluster=cluster(memory_bytes=60e9 * factor)))

    def fastest(result):
        return min(c.estimate["step_time_s"] for c in result.candidates)

    assert fastest(roomy) <= fastest(tight) * 1.0000001


@pytest.mark.parametrize("bad", [{"objective": "fame"}, {"global_batch": 0}, {"max_memory_share": 1.5}])
def test_impossible_requests_are_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        request(**bad)


def test_sizes_are_parts_of_a_node_then_whole_nodes():
    assert sizes_around(cluster(gpus_per_node=8), most=64) == [1, 2, 4, 8, 16, 32, 64]
    assert resized(cluster(gpus_per_node=8), 2).gpus_per_node == 2
    assert resized(cluster(gpus_per_node=8), 32).num_nodes == 4
    with pytest.raises(ValueError, match="whole number of nodes"):
        resized(cluster(gpus_per_node=8), 12)


def test_scaling_is_at_the_same_batch_and_gets_faster():
    sizes = scaling(request(), [1, 2, 4, 8])
    assert all(s.best.plan.global_batch == 64 for s in sizes)
    times = [s.best.estimate["step_time_s"] for s in sizes]
    assert times == sorted(times, reverse=True)


def test_a_single_plan_can_be_priced_even_if_it_does_not_fit():
    alone = price(request(workload=chain(layers=64, width=8192, heads=64)), Plan(micro_batch=8, runtime="ddp"))
    assert alone.estimate["high_memory_bytes"] > 80e9


def refusing(refuses, why="no engine here writes it (reason)"):
    return lambda plan: why if refuses(plan) else ""


def test_a_plan_without_files_is_shown_with_the_reason_but_does_not_lead(small):
    first = family(small.candidates[0].plan)
    found = search(request(why_no_files=refusing(lambda plan: family(plan) == first)))
    lead, others = found.candidates[0], found.candidates[1:]
    assert not lead.no_files
    assert family(lead.plan) != first
    refused = [c for c in others if family(c.plan) == first]
    assert refused
    assert all("no engine here writes it (reason)" in c.reasons[0] for c in refused)
    assert {family(c.plan) for c in found.candidates} == {family(c.plan) for c in small.candidates}
    times = [c.estimate["step_time_s"] for c in others]
    assert times == sorted(times)
    if min(c.estimate["step_time_s"] for c in refused) < lead.estimate["step_time_s"]:
        assert "less time, but no engine here writes it (reason)." in lead.reasons[-1]


def test_a_strategy_is_shown_by_a_plan_with_files_that_is_nearly_as_good(small):
    lead = small.candidates[0].plan
    found = search(request(why_no_files=refusing(lambda plan: plan.recompute == lead.recompute and family(plan) == family(lead))))
    shown = next(c for c in found.candidates if family(c.plan) == family(lead))
    slower = shown.estimate["step_time_s"] / small.candidates[0].estimate["step_time_s"]
    assert bool(shown.no_files) != (shown.plan.recompute != lead.recompute)
    assert shown.no_files or slower <= 1.15


def test_where_nothing_has_files_the_best_plan_leads_all_the_same(small):
    found = search(request(why_no_files=refusing(lambda plan: True)))
    assert [c.plan for c in found.candidates] == [c.plan for c in small.candidates]
    assert all(c.no_files for c in found.candidates)


def test_the_fewest_gpus_are_those_with_a_plan_that_has_files():
    anything = fewest_gpus(request(), most=8)
    assert anything.num_gpus == 1
    found = fewest_gpus(request(why_no_files=refusing(lambda plan: plan.world_size < 4)), most=8)
    assert found.num_gpus == 4
    assert fewest_gpus(request(why_no_files=refusing(lambda plan: True)), most=8).num_gpus == 1


def test_the_least_memory_is_said_of_the_plans_that_have_files():
    least = search(request(objective="memory")).candidates[0].plan
    found = search(request(objective="memory", why_no_files=refusing(lambda plan: family(plan) == family(least)))).candidates[0]
    assert found.reasons[0].startswith("the least memory, within 1%, of all plans with files")
    assert "less memory, but no engine here writes it (reason)." in found.reasons[-1]
