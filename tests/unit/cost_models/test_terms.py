"""Collectives, pipelines and what happens once per step."""

import itertools

import numpy as np
import pytest

from cost_models import load_calibration
from cost_models.terms import communication, optimizer, pipeline


@pytest.fixture(scope="module")
def constants():
    return {name: np.array([value]) for name, value in load_calibration().constants.items()}


def machine(**changes):
    figures = {"gpus_per_node": 8.0, "intra_bytes_per_s": 300e9, "inter_bytes_per_s": 200e9, "intra_latency_s": 0.0, "inter_latency_s": 0.0,
               "over_pcie": 0.0, "over_ethernet": 0.0, **changes}  # fmt: skip
    return communication.Machine(**{name: np.array([value]) for name, value in figures.items()})


def ring(ranks, stride, constants, **changes):
    return communication.ring(machine(**changes), constants, np.array([float(ranks)]), np.array([float(stride)]))


@pytest.mark.parametrize(("line_bytes_per_s", "low", "high"), [(1.25e9, 0.75e9, 1.25e9), (4e9, 2e9, 3e9), (12.5e9, 4e9, 6e9)])
def test_tcp_carries_slow_ethernet_nearly_in_full_and_fast_ethernet_in_part(constants, line_bytes_per_s, low, high):
    """10, 32 and 100 Gb/s: what NVIDIA/nccl issues 209 and 450 report."""
    two_nodes = ring(16, 1, constants, inter_bytes_per_s=line_bytes_per_s, over_ethernet=1.0)
    assert low < (15 / 16) / two_nodes.s_per_byte[0] < high


def test_a_group_of_one_costs_nothing(constants):
    alone = ring(1, 1, constants)
    assert alone.seconds(np.array([1e9]))[0] == 0


def test_a_ring_moves_all_but_one_share(constants):
    rate = 300e9 * constants["intra_rate_share"][0]
    assert ring(8, 1, constants).s_per_byte[0] == pytest.approx(7 / 8 / rate)


def test_groups_of_one_node_share_its_adapters(constants):
    whole, each = ring(16, 1, constants), ring(2, 8, constants)  # one group of 16; eight groups of two, one device per node each
    assert each.s_per_byte[0] > 3 * whole.s_per_byte[0]


def test_latency_grows_with_nodes(constants):
    latency = [ring(8 * n, 1, constants).latency_s[0] for n in (1, 2, 4, 8)]
    assert latency == sorted(latency)
    assert latency[3] > 3 * latency[1] - latency[0]


def test_latency_in_a_node_grows_with_the_logarithm_of_the_ranks(constants):
    two, four, eight = (ring(n, 1, constants).latency_s[0] for n in (2, 4, 8))
    assert (four, eight) == (pytest.approx(2 * two), pytest.approx(3 * two))


def test_pcie_and_ethernet_achieve_less_of_their_line_rate(constants):
    assert ring(8, 1, constants, over_pcie=1.0).s_per_byte[0] > 2 * ring(8, 1, constants).s_per_byte[0]
    assert ring(16, 1, constants, over_ethernet=1.0).s_per_byte[0] > 1.5 * ring(16, 1, constants).s_per_byte[0]


def dispatched_s(constants, *, ep, active=8.0, experts=128.0, stride=1.0, routed=1.0, once_per_node=0.0, **changes):
    how = {"ep_degree": ep, "num_active": active, "num_experts": experts, "stride": stride, "routed_share": routed,
           "once_per_node": once_per_node}  # fmt: skip
    dispatch = communication.Dispatch(**{name: np.array([float(value)]) for name, value in how.items()})
    return communication.all_to_all_s(machine(**changes), constants, np.array([1e8]), dispatch)[0]


def test_experts_in_other_nodes_are_reached_over_the_network(constants):
    assert dispatched_s(constants, ep=16) > 3 * dispatched_s(constants, ep=8)


@pytest.mark.parametrize(("experts", "active", "groups"), [(8, 2, 4), (16, 4, 2), (12, 3, 12), (6, 6, 3), (9, 1, 3)])
def test_groups_hit_by_a_token_are_those_counted_over_all_choices(experts, active, groups):
    choices = list(itertools.combinations(range(experts), active))
    counted = np.mean([len({e * groups // experts for e in choice}) for choice in choices])
    hit = communication.groups_hit(np.array([float(experts)]), np.array([float(active)]), np.array([float(groups)]))
    assert hit[0] == pytest.approx(counted)


def test_a_token_that_crosses_to_each_node_once_takes_less_network(constants):
    plain, once = (dispatched_s(constants, ep=16, once_per_node=flag) for flag in (0.0, 1.0))
    assert once < plain / 3  # eight experts, four of them in the other node


def test_one_expert_a_token_leaves_nothing_to_save(constants):
    plain, once = (dispatched_s(constants, ep=64, active=1.0, once_per_node=flag) for flag in (0.0, 1.0))
    assert once == pytest.approx(plain, rel=0.1)


def test_routing_limited_to_some_groups_reaches_fewer_nodes(constants):
    free, limited = (dispatched_s(constants, ep=64, experts=256, routed=share, once_per_node=1.0) for share in (1.0, 0.5))
    assert 0.6 * free < limited < 0.8 * free  # 3.6 of 4 nodes instead of 5.2 of 8


def test_one_nvlink_domain_has_no_network_in_it(constants):
    rack, nodes = (
        dispatched_s(constants, ep=64, once_per_node=1.0, gpus_per_node=size, inter_bytes_per_s=size * 25e9) for size in (72.0, 8.0)
    )
    assert rack < nodes / 2


def test_an_expert_group_of_one_sends_nothing(constants):
    assert dispatched_s(constants, ep=1) == dispatched_s(constants, ep=1, once_per_node=1.0) == 0


def test_collectives_cut_into_a_part_per_rank_show_one_of_them_and_slow_the_products(constants):
    two, eight = (communication.overlapped_share(np.array([float(n)]), np.array([1.0]), constants)[0] for n in (2, 8))
    assert 1 / 8 < eight < two < 1
    assert communication.overlapped_share(np.array([8.0]), np.array([0.0]), constants)[0] == 1


def test_hidden_traffic_still_slows_compute(constants):
    shown = communication.exposed_sharding_s(np.array([0.1, 5.0]), np.array([1.0, 1.0]), constants)
    assert 0 < shown[0] < 0.1
    assert shown[1] > 4.0


@pytest.mark.parametrize(("memory_s", "shown"), [(0.0, 0.1), (0.05, 0.1 + 0.9 * 0.45), (1.0, 1.0)])
def test_the_last_bucket_of_a_reduction_always_shows_and_the_hidden_ones_compete_for_memory(constants, memory_s, shown):
    one, far, overlap = np.ones(2), np.full(2, 100.0), np.array([1.0, 0.0])
    got = communication.exposed_reduction_s(one, far, overlap, np.full(2, memory_s), constants)
    assert got == pytest.approx([shown, 1.0])


def test_device_and_host_work_side_by_side():
    assert pipeline.blend(np.array([1.0]), np.array([0.0]))[0] == 1.0
    assert pipeline.blend(np.array([1.0]), np.array([1.0]))[0] == pytest.approx(2**0.25)
    assert pipeline.blend(np.array([1.0]), np.array([0.5]))[0] < 1.02


def test_a_lead_of_the_host_in_one_pass_does_not_help_in_the_other():
    device, host, half = np.array([2.0]), np.array([2.0]), np.array([0.5])
    even = pipeline.busy_s(device, host, forward_device_share=half, forward_host_share=half)[0]
    uneven = pipeline.busy_s(device, host, forward_device_share=np.array([0.1]), forward_host_share=np.array([0.9]))[0]
    assert even == pytest.approx(pipeline.blend(device, host)[0])
    assert uneven == pytest.approx(2 * 1.8, rel=1e-3)


def test_the_slowest_rank_sets_the_pace():
    slowest = pipeline.slowest_rank(np.array([1.0, 3.0, 2.0, 5.0]), np.array([0, 0, 0, 1]), np.array([0, 3]))
    assert slowest.rank.tolist() == [1, 3]
    assert slowest.others_s.tolist() == [3.0, 0.0]


def test_interleaving_multiplies_transfers():
    plain, interleaved = pipeline.transfers_s(np.array([1.0, 1.0]), np.array([8.0, 8.0]), np.array([4, 4]), np.array([1, 2]))
    assert (plain, interleaved) == (22.0, 38.0)
    assert pipeline.transfers_s(np.array([1.0]), np.array([8.0]), np.array([1]), np.array([1]))[0] == 0


def test_adam_in_mixed_precision_moves_38_bytes_per_parameter():
    assert optimizer.optimizer_bytes_per_param(*np.array([[8.0], [4.0], [2.0], [4.0]]))[0] == 38.0


def test_offloading_waits_for_copies_then_for_the_cpu():
    seconds = optimizer.offload_s(
        np.array([1e9]), copied_bytes=np.array([4.0]), touched_bytes=np.array([28.0]), host_bytes_per_s=np.array([25e9]),
        cpu_bytes_per_s=np.array([20e9]),
    )  # fmt: skip
    assert seconds[0] == pytest.approx(0.16 + 1.4)
