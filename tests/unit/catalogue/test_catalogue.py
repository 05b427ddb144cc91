"""The catalogue: every file is whole and plausible, every usual spelling resolves, every unknown one is refused with help."""

import datetime

import pytest

from cost_models import hardware_data
from cost_models.catalogue import (
    default_gpus_per_node,
    default_links,
    describe_gpu,
    describe_link,
    find_gpu,
    find_link,
    gpu_for_device_name,
    gpu_names,
    is_presumed,
    link_names,
)

#: GPU spellings of published measured runs.
SPELLINGS_IN_THE_WILD = {
    "A100": "a100-sxm-80gb",
    "H100 (96GB HBM2e, 500W)": "h100-sxm-96gb-hbm2e",
    "H200": "h200-sxm-141gb",
    "V100 (DGX-2)": "v100-sxm-32gb",
    "A100 (DGX-A100)": "a100-sxm-80gb",
    "GB200": "gb200-186gb",
    "B300": "b300-288gb",
    "H100": "h100-sxm-80gb",
    "B200": "b200-180gb",
    "T4": "t4",
    "V100": "v100-sxm-16gb",
    "A10G": "a10g",
    "TITAN RTX": "titan-rtx",
    "Quadro RTX 8000": "rtx-8000",
    "RTX 3090": "rtx-3090",
    "A10": "a10",
    "A100 PCIe": "a100-pcie-40gb",
    "RTX 6000 Ada": "rtx-6000-ada",
}
DEVICE_NAMES = {
    "NVIDIA H200": "h200-sxm-141gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "Tesla V100-SXM2-16GB": "v100-sxm-16gb",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GH200 480GB": "gh200-96gb",
    "NVIDIA RTX A6000": "rtx-a6000",
    "AMD Instinct MI250X": "mi250x",
}


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_file_is_whole_and_plausible(name):
    entry = hardware_data.gpu_entries()[name]
    device = entry.device
    rates = device.peak_flops_per_s
    # the driver reports up to 8 % less than the box says and never more than its binary reading
    assert 0.92 * entry.memory_label_gb * 1e9 < device.memory_bytes <= entry.memory_label_gb * 2**30
    if entry.per == "die":
        assert device.memory_bytes < 70e9
    assert 1e11 < device.memory_bytes_per_s < 1e13
    assert 16 <= device.num_multiprocessors <= 400
    assert set(rates) <= {"fp32", "tf32", "fp16", "bf16", "fp8", "fp4"} and {"fp32", "fp16"} <= set(rates)
    assert all(5e12 < r < 2e16 for r in rates.values())
    assert rates["fp16"] >= rates["fp32"]
    if "bf16" in rates:
        assert rates["bf16"] == rates["fp16"]
    if "fp8" in rates:  # dense against dense: a sparse figure would be four times
        assert rates["fp8"] == pytest.approx(2 * rates["bf16"], rel=0.02)
    if "fp4" in rates:  # NVIDIA's Ultra chips triple fp8 instead of doubling it
        assert rates["fp4"] == pytest.approx((3 if "b300" in device.name else 2) * rates["fp8"], rel=0.02)
    assert entry.per in ("package", "die") and entry.vendor in ("nvidia", "amd")
    assert entry.source and isinstance(entry.checked_on, datetime.date)
    assert entry.gpus_per_node >= 1
    for link, where in ((entry.intra_link, "intra"), (entry.pcie_link, "intra"), (entry.inter_link, "inter")):
        assert link in link_names(where)
    assert not entry.nvlink_link or entry.nvlink_link in link_names("intra")


@pytest.mark.parametrize("name", link_names())
def test_every_link_is_whole_and_plausible(name):
    described = describe_link(name)
    assert described["where"] in ("intra", "inter") and described["kind"] and described["source"]
    assert 1e8 <= described["bytes_per_s"] <= 1e13
    assert 1e-6 <= described["latency_s"] <= 1e-3


def test_no_spelling_means_two_things():
    # building the tables raises where a spelling is used twice
    assert len(hardware_data.gpu_aliases()) > len(gpu_names())
    assert len(hardware_data.link_aliases()) > len(link_names())
    assert not set(hardware_data.gpu_aliases()) & set(hardware_data.presumed_gpu_aliases())


def test_old_gpus_have_no_bf16():
    for name in ("v100-sxm-16gb", "v100-pcie-32gb", "t4", "rtx-8000", "titan-rtx", "p100-sxm-16gb"):
        assert "bf16" not in find_gpu(name).peak_flops_per_s


@pytest.mark.parametrize(("spelling", "name"), SPELLINGS_IN_THE_WILD.items())
def test_spellings_of_published_runs_resolve(spelling, name):
    assert find_gpu(spelling).name == name


def test_a_mixed_cluster_is_refused():
    with pytest.raises(ValueError, match="different GPUs"):
        find_gpu("mixed T4 + V100 (g4dn.12xlarge + p3.8xlarge)")


@pytest.mark.parametrize(("device_name", "name"), DEVICE_NAMES.items())
def test_device_names_resolve(device_name, name):
    assert gpu_for_device_name(device_name) == name


def test_memory_decides_where_the_name_is_open():
    assert find_gpu("A100", memory_gb=40).name == "a100-sxm-40gb"
    assert find_gpu("A100 PCIe", memory_gb=80).name == "a100-pcie-80gb"
    assert find_gpu("V100", memory_gb=32).name == "v100-sxm-32gb"
    assert gpu_for_device_name("NVIDIA H100", memory_bytes=95.04 * 2**30) == "h100-sxm-96gb-hbm2e"
    assert find_gpu("a100-sxm-80gb", memory_gb=40).name == "a100-sxm-80gb"


def test_open_names_are_told_from_exact_ones():
    assert is_presumed("A100") and is_presumed("h100")
    assert not is_presumed("A100-SXM4-80GB") and not is_presumed("nonsense")


@pytest.mark.parametrize(("typo", "near"), [("a100-sxm-80", "a100-sxm-80gb"), ("h10", "h100-sxm-80gb"), ("mi300", "mi300x")])
def test_an_unknown_gpu_names_the_nearest(typo, near):
    with pytest.raises(ValueError, match=near):
        find_gpu(typo)


def test_nonsense_still_helps():
    with pytest.raises(ValueError, match="--cluster"):
        find_gpu("quantum toaster")


def test_a_mig_slice_is_refused():
    with pytest.raises(ValueError, match="MIG"):
        gpu_for_device_name("NVIDIA A100-SXM4-80GB MIG 1g.10gb")


def test_default_links():
    intra, inter = default_links("a100-sxm-80gb")
    assert (intra.name, inter.name) == ("nvlink-3", "ib-hdr-8x")
    assert intra.bytes_per_s == 300e9 and inter.bytes_per_s == 200e9
    assert default_gpus_per_node("gb200") == 72


def test_description_carries_its_source():
    described = describe_gpu("H100")
    assert described["name"] == "h100-sxm-80gb" and described["source"] and described["checked_on"] == "2026-11-29"
    assert described["peak_flops_per_s"]["bf16"] == pytest.approx(989e12, rel=0.01)


def test_any_number_of_adapters():
    assert find_link("ib-hdr-3x").bytes_per_s == 75e9
    with pytest.raises(ValueError, match="ib-hdr"):
        find_link("ib-hdr-0x")


def test_the_cpu_is_there_but_is_no_gpu():
    assert find_gpu("cpu").family == "cpu" and "cpu" not in gpu_names()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("V100 16GB", "v100-sxm-16gb"), ("V100 32GB", "v100-sxm-32gb"), ("8x A100 40GB", "a100-sxm-40gb"), ("A100 40GB x8", "a100-sxm-40gb"),
        ("RTX 2080Ti", "rtx-2080-ti"), ("RTX3090", "rtx-3090"), ("RTX 4090 24GB", "rtx-4090"), ("DGX-1", "v100-sxm-16gb"), ("DGX-2", "v100-sxm-32gb"),
    ],
)  # fmt: skip
def test_counts_capacities_and_odd_hyphens_are_read(text: str, name: str) -> None:
    assert find_gpu(text).name == name


@pytest.mark.parametrize("text", ["A100 16GB", "80GB", "8x", "RTX 4090 80GB"])
def test_a_capacity_that_no_such_card_has_is_unknown(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        find_gpu(text)


def test_a_name_with_a_capacity_still_leaves_its_form_factor_open() -> None:
    assert is_presumed("V100 16GB")
    assert not is_presumed("RTX 4090 24GB")
