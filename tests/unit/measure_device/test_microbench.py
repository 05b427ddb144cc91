"""Microbenchmarks: figures of this machine, kept as TOML, turned into a Device that the cost model prices back to the measured seconds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from advisor.errors import AdvisorError
from advisor.measure import microbench
from advisor.measure.microbench import (
    CollectiveRate,
    MatmulRate,
    Measurements,
    cluster_figures,
    cpu_device,
    measure_collectives,
    measure_device,
    measured_cluster,
)
from cost_models import op_seconds
from cost_models.types import Cluster, Device, Link, OpTable


def product(m: int, n: int, k: int) -> OpTable:
    """One matrix product of fixed size."""
    one, zero, code = np.ones(1), np.zeros(1), np.zeros(1, dtype=np.int64)
    return OpTable(op_class=code + 1, kind=code, phase=code, batch_dim=code, tp_split=code, m=one * m, n=one * n, k=one * k, batch=one,
                   work_share=one, bytes_per_sample=zero, bytes_fixed=zero, num_kernels=one)  # fmt: skip


def rate(dtype: str, side: int, flops_per_s: float) -> MatmulRate:
    return MatmulRate(dtype=dtype, m=side, n=side, k=side, seconds=2 * side**3 / flops_per_s, achieved_flops_per_s=flops_per_s)


GPU = Measurements(
    device_name='NVIDIA "H200"', device_kind="cuda", framework="torch 2.13.0", memory_bytes=150e9, num_multiprocessors=132,
    matmul=(rate("bf16", 512, 90e12), rate("bf16", 8192, 700e12), rate("fp32", 4096, 50e12)), memory_copy_bytes_per_s=4.0e12,
    memory_add_bytes_per_s=4.1e12, host_to_device_pinned_bytes_per_s=55e9, host_to_device_pageable_bytes_per_s=12e9, launch_s=4e-6,
    kernel_s=1.5e-6, warnings=("fp8 product: no\\such kernel",), duration_s=3.5,
    collectives=(CollectiveRate(operation="all_reduce", backend="nccl", num_ranks=8, message_bytes=2**20, seconds=1e-4, bus_bytes_per_s=1.8e10),),
)  # fmt: skip


@pytest.fixture(scope="module")
def here() -> Measurements:
    """The CPU of this machine."""
    return measure_device(quick=True, device="cpu")


def test_measurements_survive_toml():
    assert Measurements.from_toml(GPU.to_toml()) == GPU


@pytest.mark.parametrize("text", ["", "device_name = 3 = 4", 'device_name = "x"', "matmul = 5"])
def test_other_toml_is_refused_in_one_sentence(text: str):
    with pytest.raises(AdvisorError, match="holds no measurements"):
        Measurements.from_toml(text, where="mine.toml")


def test_the_cost_model_gives_measured_products_back():
    figures = cluster_figures(GPU)
    device = Device(
        name="", memory_bytes=1e11, memory_bytes_per_s=1e30, peak_flops_per_s=figures["peak_flops_per_s"], num_multiprocessors=132
    )
    for dtype, side, flops_per_s in (("bf16", 8192, 700e12), ("fp32", 4096, 50e12)):
        seconds = op_seconds(product(side, side, side), device, micro_batch=1, compute_dtype=dtype)[0]
        assert seconds == pytest.approx(2 * side**3 / flops_per_s)


def test_figures_are_marked_measured_and_prefer_pinned_copies():
    figures = cluster_figures(GPU)
    assert figures["host_bytes_per_s"] == 55e9
    assert figures["memory_bytes_per_s"] > 4.1e12
    assert set(figures["sources"]) == set(figures) - {"sources"}
    assert set(figures["sources"].values()) == {"measured"}


def test_what_was_not_measured_is_not_overridden():
    figures = cluster_figures(dataclasses.replace(GPU, matmul=(), memory_copy_bytes_per_s=0.0, memory_add_bytes_per_s=0.0))
    assert "peak_flops_per_s" not in figures
    assert "memory_bytes_per_s" not in figures


def test_a_cluster_takes_measured_figures_and_keeps_the_others():
    device = Device(name="h200", memory_bytes=141e9, memory_bytes_per_s=4.8e12, peak_flops_per_s={"bf16": 989e12, "fp8": 1979e12})
    link = Link(name="nvlink-4", bytes_per_s=450e9, latency_s=2e-6)
    before = Cluster(device=device, gpus_per_node=8, num_nodes=2, intra=link, inter=link, sources={"intra": "catalogue"})
    after = measured_cluster(before, GPU)
    assert after.host_bytes_per_s == 55e9
    assert after.device.peak_flops_per_s["fp8"] == 1979e12
    assert after.device.peak_flops_per_s["bf16"] != 989e12
    assert after.device.memory_bytes == 141e9
    assert after.sources == {
        "intra": "catalogue",
        "peak_flops_per_s": "measured",
        "memory_bytes_per_s": "measured",
        "host_bytes_per_s": "measured",
    }


def test_a_gpu_is_not_taken_for_a_cpu():
    with pytest.raises(AdvisorError, match="CPU"):
        cpu_device(GPU)


def test_this_cpu_can_be_measured(here: Measurements):
    assert here.device_kind == "cpu"
    assert here.warnings == ()
    assert {r.dtype for r in here.matmul} == {"fp32", "bf16"}
    for r in here.matmul:
        assert r.achieved_flops_per_s == pytest.approx(2 * r.m * r.n * r.k / r.seconds)
    assert 1e8 < here.memory_copy_bytes_per_s < 1e13
    assert 1e-8 < here.launch_s < 1e-2
    assert here.host_to_device_pinned_bytes_per_s > 0
    assert Measurements.from_toml(here.to_toml()) == here


def test_this_cpu_becomes_a_device(here: Measurements):
    device = cpu_device(here)
    assert (device.name, device.family) == ("cpu", "cpu")
    assert device.peak_flops_per_s["fp32"] > max(r.achieved_flops_per_s for r in here.matmul if r.dtype == "fp32" and r.m >= 1024)


def test_a_child_that_takes_too_long_is_ended():
    with pytest.raises(AdvisorError, match="did not end within"):
        measure_device(device="cpu", timeout_s=0.05)


def test_a_missing_cuda_device_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(AdvisorError, match="failed with status 1") as caught:
        measure_device(device="cuda")
    assert "Traceback" not in str(caught.value)


def test_a_broken_accelerator_leaves_the_cpu_and_a_warning(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def child(module: str, arguments: list[str], limit_s: float, progress: object) -> dict[str, object]:
        asked.append(arguments[0])
        if arguments[0] == "auto":
            raise AdvisorError("The driver hung.")
        return {**dataclasses.asdict(GPU), "device_kind": "cpu", "warnings": ["slow"]}

    monkeypatch.setattr(microbench, "_child_result", child)
    found = measure_device()
    assert asked == ["auto", "cpu"]
    assert found.device_kind == "cpu"
    assert found.warnings == ("the accelerator could not be measured, the CPU was: The driver hung.", "slow")


def test_collectives_between_two_processes():
    said: list[str] = []
    rates = measure_collectives("gloo", 2, progress=said.append)
    assert {r.operation for r in rates} == {"all_reduce", "all_gather", "reduce_scatter"}
    for r in rates:
        share = 1.0 if r.operation == "all_reduce" else 0.5
        assert r.bus_bytes_per_s == pytest.approx(r.message_bytes / r.seconds * share)
    assert said == ["gloo collectives between 2 processes"]


@pytest.mark.parametrize(("backend", "nproc", "message"), [("gloo", 1, "at least two"), ("mpi", 2, 'not "mpi"')])
def test_impossible_groups_are_refused(backend: str, nproc: int, message: str):
    with pytest.raises(AdvisorError, match=message):
        measure_collectives(backend, nproc)


def test_nccl_without_gpus_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(AdvisorError, match="The measurement failed") as caught:
        measure_collectives("nccl", 2)
    assert "Traceback" not in str(caught.value)
