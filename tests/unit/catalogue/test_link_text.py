"""Links from free text: what tables and people write."""

import pytest

from cost_models.catalogue import parse_link

INTRA = [
    ("NVLink4/NVSwitch", "h100", "nvlink-4", 450e9),
    ("NVLink", "a100", "nvlink-3", 300e9),
    ("NVLink", "A800", "nvlink-3-a800", 200e9),
    ("NVLink/NVSwitch", "gb200", "nvlink-5", 900e9),
    ("NVLink x2", "titan rtx", "nvlink-bridge-turing", 50e9),
    ("PCIe", "t4", "pcie-3-x16", 15.75e9),
    ("PCIe", "rtx 3090", "pcie-4-x16", 31.5e9),
    ("PCIe Gen5", "", "pcie-5-x16", 63e9),
    ("PCIe (P2P disabled)", "titan rtx", "pcie-3-x16-host", 7.88e9),
    ("", "h800", "nvlink-4-h800", 200e9),
    ("100 GB/s", "", "intra-100GBps", 100e9),
]
INTER = [
    ("ib-hdr-4x", 8, "ib-hdr-4x", 100e9),
    ("8x HDR IB 200Gb/s (Selene)", 8, "ib-hdr-8x", 200e9),
    ("4x Omni-Path 100Gb/s per node", 8, "omni-path-4x", 50e9),
    ("Omni-Path 4x", 8, "omni-path-4x", 50e9),
    ("1600 Gbps/node RoCE", 8, "roce-1600", 200e9),
    ("800 Gbps/node (config inter_node_bandwidth)", 8, "network-800g", 100e9),
    ("100 Gb/s IB per node", 8, "ib-edr-1x", 12.5e9),
    ("PCIe; 50 Gb/s Ethernet", 4, "ethernet-50g", 6.25e9),
    ("heterogeneous 10-50 Gb/s Ethernet", 4, "ethernet-10g", 1.25e9),
    ("400 Gb/s RDMA per GPU", 8, "ib-ndr-8x", 400e9),
    ("400 Gb/s RDMA per GPU", 4, "ib-ndr-4x", 200e9),
    ("IB ~660 Gbps measured per node", 16, "infiniband-660g", 82.5e9),
    ("200G RoCE Tomahawk4", 8, "roce-200", 25e9),
    ("HF cluster (AWS p5 EFA, from memory)", 8, "efa-3200", 400e9),
    ("ethernet-100", 8, "ethernet-100g", 12.5e9),
    ("10GbE", 8, "ethernet-10g", 1.25e9),
    ("50 GB/s", 8, "network-400g", 50e9),
]


@pytest.mark.parametrize(("text", "gpu", "name", "bytes_per_s"), INTRA)
def test_links_inside_a_node(text, gpu, name, bytes_per_s):
    link = parse_link(text, where="intra", gpu=gpu)
    assert link.name == name and link.bytes_per_s == pytest.approx(bytes_per_s) and link.latency_s > 0


@pytest.mark.parametrize(("text", "gpus_per_node", "name", "bytes_per_s"), INTER)
def test_links_between_nodes(text, gpus_per_node, name, bytes_per_s):
    link = parse_link(text, where="inter", gpus_per_node=gpus_per_node)
    assert link.name == name and link.bytes_per_s == pytest.approx(bytes_per_s) and link.latency_s > 0


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [("bananas", "inter", "ib-hdr-4x"), ("nvlink-4", "inter", "inside a node"), ("ib-hdr-8x", "intra", "between nodes"),
     ("NVLink", "intra", "nvlink-3"), ("0 Gb/s", "inter", "no rate"), ("", "inter", "without a GPU"), ("x", "sideways", "intra")],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_help(text, where, says):
    with pytest.raises(ValueError, match=says):
        parse_link(text, where=where)
