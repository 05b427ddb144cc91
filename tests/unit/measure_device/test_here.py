"""This machine as a cluster: what was found here is said to be measured, what wasn't to be assumed."""

import pytest

from advisor.measure import cluster as cluster_module
from advisor.measure import here, host
from advisor.measure.cluster_file import read_cluster_file, to_toml
from advisor.measure.microbench import MatmulRate, Measurements

CPU = Measurements(
    device_name="A processor", device_kind="cpu", framework="torch 2.13.0", memory_bytes=25e9, num_multiprocessors=2,
    matmul=(MatmulRate(dtype="fp32", m=512, n=512, k=512, seconds=2.7e-3, achieved_flops_per_s=1e11),), memory_copy_bytes_per_s=2e10,
    memory_add_bytes_per_s=2e10, host_to_device_pinned_bytes_per_s=1e10, host_to_device_pageable_bytes_per_s=1e10, launch_s=1e-6,
    kernel_s=1e-6, warnings=(), duration_s=1.0, collectives=(),
)  # fmt: skip


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(cluster_module, "local_gpus", lambda: None)
    monkeypatch.setattr(here, "measure_device", lambda **_: CPU)
    monkeypatch.setattr(here, "host_memory_bytes", lambda: 64e9)


def test_a_machine_without_a_gpu_states_its_memory_and_where_each_figure_is_from(no_gpu):
    cluster, _ = here.cluster_here(quick=True)
    assert cluster.host_memory_bytes == 64e9
    measured = {
        "device",
        "memory_bytes",
        "memory_bytes_per_s",
        "peak_flops_per_s",
        "num_multiprocessors",
        "host_bytes_per_s",
        "host_memory_bytes",
    }
    assert {figure for figure, source in cluster.sources.items() if source == "measured"} == measured
    assert {source for figure, source in cluster.sources.items() if figure not in measured} == {"assumed"}


def test_the_cluster_file_keeps_them(no_gpu, tmp_path):
    cluster, _ = here.cluster_here(quick=True)
    (tmp_path / "here.toml").write_text(to_toml(cluster))
    assert read_cluster_file(tmp_path / "here.toml", base=cluster_module.usual_cluster)[0] == cluster


def test_plans_for_this_machine_know_its_host_memory(no_gpu):
    cluster, _ = here.with_measurements(cluster_module.usual_cluster("cpu"))
    assert (cluster.host_memory_bytes, cluster.sources["host_memory_bytes"]) == (64e9, "measured")


@pytest.mark.parametrize(("limit", "expected"), [("1073741824", 2.0**30), ("max", None), ("9223372036854771712", None), (None, None)])
def test_a_containers_limit_counts(monkeypatch, tmp_path, limit, expected):
    monkeypatch.setattr(host, "_LIMITS", (str(tmp_path / "memory.max"),))
    installed = host.host_memory_bytes()
    if limit:
        (tmp_path / "memory.max").write_text(limit)
    assert host.host_memory_bytes() == (expected or installed)
    assert installed > 2**30
