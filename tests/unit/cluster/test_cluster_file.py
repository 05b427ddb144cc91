"""Cluster files: any figure overridable, round trip exact, mistakes told with the near match."""

import pytest

from advisor.errors import HardwareError
from advisor.measure.cluster import resolve_cluster, to_toml

OWN = """
gpus_per_node = 4
num_nodes = 2
[device]
name = "my-accelerator"
memory_bytes = 64e9
memory_bytes_per_s = 1e12
[device.peak_flops_per_s]
bf16 = 100e12
[intra]
name = "my-bus"
bytes_per_s = 50e9
latency_s = 5e-6
[inter]
link = "ethernet-100g"
"""


def read(tmp_path, text, **options):
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf8")
    return resolve_cluster(file=path, **options)


def test_a_catalogue_gpu_with_overrides(tmp_path):
    text = 'gpu = "a100-sxm-80gb"\nnodes = 4\ninter = "ib-hdr-4x"\n[device.peak_flops_per_s]\nbf16 = 250e12\n[intra]\nbytes_per_s = 250e9\n'
    cluster, _ = read(tmp_path, text)
    assert cluster.device.peak_flops_per_s["bf16"] == 250e12 and cluster.device.peak_flops_per_s["fp32"] == 19.5e12
    assert (cluster.num_gpus, cluster.intra.name, cluster.intra.bytes_per_s) == (32, "nvlink-3", 250e9)
    assert cluster.sources["intra"] == "given" and cluster.sources["num_nodes"] == "given"
    assert cluster.sources["memory_bytes"] == "catalogue"


def test_an_own_device(tmp_path):
    cluster, assumptions = read(tmp_path, OWN)
    assert cluster.device.name == "my-accelerator" and cluster.num_gpus == 8 and cluster.inter.bytes_per_s == 12.5e9
    assert any("host copies" in a for a in assumptions)


def test_options_win_over_the_file(tmp_path):
    cluster, _ = read(tmp_path, OWN, nodes=3, inter="10GbE")
    assert cluster.num_nodes == 3 and cluster.inter.name == "ethernet-10g"
    assert read(tmp_path, OWN, gpu="l4")[0].device.name == "l4"


def test_what_a_file_leaves_open_is_said(tmp_path):
    text = " | ".join(read(tmp_path, 'gpu = "A100"\nnodes = 2\n')[1])
    assert "taken for a100-sxm-80gb" in text and "8 GPUs in a node" in text and "ib-hdr-8x" in text


@pytest.mark.parametrize("options", [{"gpu": "h100-sxm-80gb", "nodes": 2}, {"gpu": "mi250x"}, {"gpu": "cpu"}])
def test_round_trip(tmp_path, options):
    cluster, _ = resolve_cluster(**options)
    again, assumptions = read(tmp_path, to_toml(cluster))
    assert again == cluster
    assert not any("host copies" in a for a in assumptions)


@pytest.mark.parametrize(
    ("text", "says"),
    [('gpu = "l4"\nnode = 2', "did you mean nodes"), ('gpu = "l4"\n[device]\nmemory = 1', "did you mean device.memory_bytes"),
     ('gpu = "l4"\ngpus_per_node = 0', "above 0"), ('gpu = "l4"\ngpus_per_node = 2.5', "whole number"),
     ('gpu = "l4"\ngpus_per_node = "8"', "must be a number"), ('gpu = "l4"\nhost_bytes_per_s = nan', "must be a number"),
     ('gpu = "l40x"', "l40s"), ("gpus_per_node = 8", "[device] needs"), ('gpu = "l4"\ninter = "zzz"', "zzz"), ("= 3", "not TOML"),
     ('gpu = "l4"\n[intra]\nbytes_per_s = -1', "above 0"), ('gpu = "l4"\nintra = 3', "must be a table"),
     ('gpu = "l4"\n[sources]\nintra = "guess"', "one of"), ('gpu = "l4"\nnodes = 10000000', "10,000,000"),
     ("gpu = 4", "in quotes")],
)  # fmt: skip
def test_mistakes_are_told(tmp_path, text, says):
    with pytest.raises(HardwareError) as error:
        read(tmp_path, text)
    assert says in str(error.value)


def test_a_missing_file_is_told():
    with pytest.raises(HardwareError, match="can't be read"):
        resolve_cluster(file="/no/such/file.toml")
