"""A small and a large transformer, two clusters."""

import pytest

from cost_models import TransformerShape, transformer_workload
from cost_models.types import Cluster, Device, Link

A100 = Device(
    name="a100-test", memory_bytes=80e9, memory_bytes_per_s=2.0e12, num_multiprocessors=108, family="ampere",
    peak_flops_per_s={"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12},
)  # fmt: skip
H100 = Device(
    name="h100-test", memory_bytes=80e9, memory_bytes_per_s=3.35e12, num_multiprocessors=132, family="hopper",
    peak_flops_per_s={"fp32": 67e12, "tf32": 495e12, "fp16": 989e12, "bf16": 989e12, "fp8": 1979e12},
)  # fmt: skip


def make_cluster(device=A100, *, nodes=4, gpus_per_node=8, intra_bytes_per_s=300e9, inter_bytes_per_s=200e9, latency_s=5e-6):
    return Cluster(
        device=device, gpus_per_node=gpus_per_node, num_nodes=nodes, host_memory_bytes=1e12,
        intra=Link(name="nvlink", bytes_per_s=intra_bytes_per_s, latency_s=latency_s, kind="nvlink"),
        inter=Link(name="ib", bytes_per_s=inter_bytes_per_s, latency_s=latency_s, kind="infiniband"),
    )  # fmt: skip


@pytest.fixture(scope="session")
def a100():
    return A100


@pytest.fixture(scope="session")
def h100():
    return H100


@pytest.fixture(scope="session")
def cluster_of():
    """Makes clusters: cluster_of(device, nodes=..., inter_bytes_per_s=...)."""
    return make_cluster


@pytest.fixture(scope="session")
def cluster():
    return make_cluster()


@pytest.fixture(scope="session")
def llama8b():
    shape = TransformerShape(
        num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_size=14336, vocab_size=128256, seq_len=4096, gated=True,
        tied=False, rotary=True,
    )  # fmt: skip
    return transformer_workload(shape, name="llama-8b")


@pytest.fixture(scope="session")
def small_gpt():
    return transformer_workload(TransformerShape(num_layers=4, hidden_size=512, num_heads=8, vocab_size=50257, seq_len=512), name="small")
