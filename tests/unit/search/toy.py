"""Hand-made workloads and clusters for search tests."""

from __future__ import annotations

import numpy as np

from cost_models.types import Cluster, Device, LayerGroup, Link, OpTable, OptimizerSpec, Workload


def linear_ops(tokens: int, width: int, out: int) -> OpTable:
    """Forward, input-gradient and weight-gradient of one linear layer, column-parallel."""
    one, zero = np.ones(3), np.zeros(3)
    return OpTable(
        op_class=np.array([1, 1, 1]),
        kind=np.array([0, 0, 0]),
        phase=np.array([0, 1, 1]),
        batch_dim=np.array([1, 1, 3]),
        tp_split=np.array([2, 3, 2]),
        m=np.array([tokens, tokens, width], float),
        n=np.array([out, width, out], float),
        k=np.array([width, out, tokens], float),
        batch=one,
        work_share=one,
        bytes_per_sample=one * 2 * tokens * (width + out),
        bytes_fixed=one * 2 * width * out,
        num_kernels=one + zero,
    )


def chain(*, layers: int = 24, width: int = 1024, heads: int = 16, tokens: int = 1024, vocab: int = 50000) -> Workload:
    """A decoder-like chain: embedding, equal blocks, head."""
    block = LayerGroup(
        name="blocks.*", num_repeats=layers, ops=linear_ops(tokens, width, 12 * width), num_params=12.0 * width * width,
        num_trainable_params=12.0 * width * width, num_tp_params=12.0 * width * width, saved_inner_bytes=20.0 * tokens * width,
        saved_sequence_bytes=12.0 * tokens * width, selective_inner_bytes=8.0 * tokens * width, selective_sequence_bytes=6.0 * tokens * width,
        boundary_bytes=2.0 * tokens * width, temporary_bytes=16.0 * tokens * width, num_tp_collectives=2, can_recompute=True, can_cut=True,
    )  # fmt: skip
    head = LayerGroup(
        name="head", num_repeats=1, ops=linear_ops(tokens, width, vocab), num_params=float(vocab * width),
        num_trainable_params=float(vocab * width), num_tp_params=float(vocab * width), saved_other_bytes=2.0 * tokens * width,
    )  # fmt: skip
    total = block.num_params * layers + head.num_params
    return Workload(
        name="chain", groups=(block, head), num_params=total, num_trainable_params=total,
        optimizer=OptimizerSpec(name="adamw", state_bytes_per_param=8), tokens_per_sample=tokens, sample_unit="tokens", seq_len=tokens,
        hidden_size=width, num_heads=heads, num_kv_heads=heads, vocab_size=vocab, logits_bytes=12.0 * tokens * vocab,
        model_flops=6.0 * total * tokens, can_tensor_parallel=True, can_pipeline=True,
    )  # fmt: skip


def cluster(*, gpus_per_node: int = 8, num_nodes: int = 1, memory_bytes: float = 80e9) -> Cluster:
    device = Device(
        name="test-gpu", memory_bytes=memory_bytes, memory_bytes_per_s=2e12, family="ampere",
        peak_flops_per_s={"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12},
    )  # fmt: skip
    return Cluster(
        device=device, gpus_per_node=gpus_per_node, num_nodes=num_nodes,
        intra=Link(name="nvlink-3", bytes_per_s=300e9, latency_s=5e-6, kind="nvlink"),
        inter=Link(name="ib-hdr-4x", bytes_per_s=100e9, latency_s=10e-6, kind="infiniband"),
    )  # fmt: skip
