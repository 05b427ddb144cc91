"""Which cluster is meant: options over file over this machine over the default, with every assumption said."""

import pytest

from advisor.errors import HardwareError
from advisor.measure import cluster as cluster_module
from advisor.measure.cluster import cluster_mapping, resolve_cluster
from advisor.measure.local_gpus import LocalGpus
from cost_models.catalogue import find_link


@pytest.fixture(autouse=True)
def no_local_gpu(monkeypatch):
    monkeypatch.setattr(cluster_module, "local_gpus", lambda: None)


def test_everything_given_leaves_nothing_assumed():
    cluster, assumptions = resolve_cluster(gpu="a100-sxm-80gb", gpus_per_node=8, nodes=4, intra="nvlink-3", inter="ib-hdr-4x")
    assert (cluster.num_gpus, cluster.inter.bytes_per_s, assumptions) == (32, 100e9, ())
    assert cluster.sources["inter"] == "given" and cluster.sources["memory_bytes"] == "catalogue"


def test_the_default_is_loudly_an_assumption():
    cluster, assumptions = resolve_cluster()
    assert (cluster.device.name, cluster.gpus_per_node, cluster.num_nodes) == ("h100-sxm-80gb", 8, 1)
    assert "no GPU was named" in assumptions[0] and "--gpu" in assumptions[0]


def test_open_names_and_links_are_said():
    cluster, assumptions = resolve_cluster(gpu="A100", nodes=2)
    assert cluster.device.name == "a100-sxm-80gb"
    text = " | ".join(assumptions)
    assert '"A100" is taken for a100-sxm-80gb' in text and "8 GPUs in a node" in text
    assert "nvlink-3" in text and "ib-hdr-8x" in text


def test_free_text_links_say_how_they_were_read():
    cluster, assumptions = resolve_cluster(gpu="h100-sxm-80gb", gpus_per_node=4, nodes=2, intra="NVLink", inter="400 Gb/s RDMA per GPU")
    assert cluster.inter.bytes_per_s == 200e9 and cluster.intra.name == "nvlink-4"
    assert any("RDMA per GPU" in a and "200 GB/s" in a for a in assumptions)


def test_one_node_needs_no_word_on_the_network():
    _, assumptions = resolve_cluster(gpu="l4", gpus_per_node=4)
    assert not any("--inter" in a for a in assumptions)


def test_host_copies_follow_the_slot():
    slow, fast = (resolve_cluster(gpu=g)[0].host_bytes_per_s for g in ("v100-sxm-16gb", "h100-sxm-80gb"))
    assert slow == pytest.approx(12.6e9) and fast == pytest.approx(50.4e9)


def test_a_cpu_cluster():
    cluster, _ = resolve_cluster(gpu="cpu", gpus_per_node=2)
    assert cluster.device.family == "cpu" and cluster.intra.kind == "host" and cluster.num_gpus == 2


def test_this_machines_gpus(monkeypatch):
    found = LocalGpus(device_name="NVIDIA A100-SXM4-40GB", count=4, memory_bytes=42.2e9, intra=find_link("nvlink-3"))
    monkeypatch.setattr(cluster_module, "local_gpus", lambda: found)
    cluster, assumptions = resolve_cluster()
    assert (cluster.device.name, cluster.gpus_per_node, cluster.device.memory_bytes) == ("a100-sxm-40gb", 4, 42.2e9)
    assert cluster.sources["gpus_per_node"] == "measured" and cluster.sources["intra"] == "measured" and assumptions == ()
    more, _ = resolve_cluster(nodes=3, gpus_per_node=8)
    assert more.num_gpus == 24 and more.sources["gpus_per_node"] == "given"


def test_an_unknown_local_gpu_is_an_error_not_a_stand_in(monkeypatch):
    found = LocalGpus(device_name="NVIDIA GeForce GTX 970", count=1, memory_bytes=4e9, intra=None)
    monkeypatch.setattr(cluster_module, "local_gpus", lambda: found)
    with pytest.raises(HardwareError, match="GTX 970") as error:
        resolve_cluster()
    assert "--gpu" in error.value.hint


@pytest.mark.parametrize(
    ("options", "says"),
    [({"gpu": "h10x"}, "h100-sxm-80gb"), ({"gpus_per_node": 0}, "can't have 0"), ({"nodes": -3}, "can't have -3"),
     ({"nodes": 9_000_000}, "9,000,000 nodes"), ({"gpus_per_node": 100_000}, "100,000"),
     ({"gpu": "h100", "inter": "bananas"}, "bananas"), ({"gpu": "h100", "inter": "nvlink-4"}, "inside a node"),
     ({"gpu": "h100", "gpus_per_node": 1000, "nodes": 60_000}, "60,000,000")],
)  # fmt: skip
def test_impossible_clusters_are_one_sentence(options, says):
    with pytest.raises(HardwareError) as error:
        resolve_cluster(**options)
    assert says in str(error.value) and error.value.exit_code == 2


def test_mapping_has_value_unit_and_source():
    mapping = cluster_mapping(resolve_cluster(gpu="a100-sxm-80gb", nodes=2, inter="ib-hdr-4x")[0])
    assert mapping["inter_bytes_per_s"] == {"value": 100e9, "unit": "bytes/s", "source": "given"}
    assert mapping["peak_bf16_flops_per_s"]["value"] == 312e12 and "data sheet" in mapping["peak_bf16_flops_per_s"]["reference"]
    assert mapping["num_gpus"]["value"] == 16
    assert all(row["source"] in ("catalogue", "measured", "given", "assumed") for row in mapping.values())


def test_a_link_without_a_count_is_one_adapter_and_says_so():
    cluster, assumptions = resolve_cluster(gpu="h100-sxm-80gb", gpus_per_node=8, nodes=2, intra="nvlink-4", inter="ib-ndr")
    assert cluster.inter.bytes_per_s == 50e9
    assert assumptions == ('"ib-ndr" is read as ib-ndr-1x: one 50 GB/s adapter per node (ib-ndr-8x for eight)',)
    for named in ("ib-ndr-1x", "ib-ndr-8x"):
        assert resolve_cluster(gpu="h100-sxm-80gb", gpus_per_node=8, nodes=2, intra="nvlink-4", inter=named)[1] == ()
