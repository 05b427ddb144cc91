"""Operators of a transformer, one entry per operator as an eager framework launches them, backward included."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cost_models.transformer_params import LATENT_HEAD, LATENT_RANK, LATENT_ROTARY, latent_products
from cost_models.types import BATCH_DIMS, OP_CLASSES, PHASES, PRICING_KINDS, TP_SPLITS, OpTable

if TYPE_CHECKING:
    from cost_models.transformer import TransformerShape

#: Under autocast norms, softmax and losses run in fp32 and weights and activations are cast: more traffic than 16-bit training.
_AUTOCAST_TRAFFIC = 1.6
#: torch.compile fuses chains of memory-bound operators: what it leaves of their traffic and launches.
_COMPILED_TRAFFIC = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    op_class: str = "matmul"
    kind: str = "gemm"
    phase: str = "forward"
    batch_dim: str = "m"
    tp_split: str = "none"
    m: float = 1.0
    n: float = 1.0
    k: float = 1.0
    batch: float = 1.0
    work_share: float = 1.0
    bytes_per_sample: float = 0.0
    bytes_fixed: float = 0.0
    num_kernels: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a framework runs what is not a matrix product."""

    traffic: float = 1.0  # bytes of memory-bound operators, against 2-byte activations in eager mode
    launches: float = 1.0  # of them, against eager mode
    quantized_bytes: float = 0.0  # per element quantised before a low-precision product: read, written, written transposed


def style_of(shape: TransformerShape, precision: str, element_bytes: float) -> Style:
    """How a precision and compilation change what moves memory."""
    traffic = _AUTOCAST_TRAFFIC if precision.startswith("amp") else element_bytes / 2
    fused = _COMPILED_TRAFFIC if shape.compiled else 1.0
    return Style(traffic=traffic * fused, launches=fused, quantized_bytes=4.0 if precision in ("fp8", "fp4") else 0.0)


@dataclass(slots=True)
class _Ops:
    """Collects operators with their backward."""

    train_weights: bool
    style: Style = Style()
    rows: list[_Op] = field(default_factory=list)

    def linear(self, rows: float, out: float, inner: float, split: str, *, experts: float = 1.0, weights: float = 1.0) -> None:
        """A product with a weight: forward, input gradient, weight gradient (and its accumulation: two more launches).

        `split` is "n" (column), "k" (row) or "none"; `weights` products of an eager model are priced as one, launched one by one.
        """
        turned = {"n": "k", "k": "n", "none": "none"}[split]
        if self.style.quantized_bytes:
            for phase, size, whole in (("forward", rows * inner, split != "k"), ("backward", rows * out, split != "n")):
                self.rows.append(_Op(op_class="elementwise", kind="memory", phase=phase, batch_dim="none", tp_split="none" if whole else "inner",
                                     bytes_per_sample=self.style.quantized_bytes * size * experts))  # fmt: skip
        weight_split = {"n": "m", "k": "n", "none": "none"}[split]
        self.rows.append(_Op(m=rows, n=out, k=inner, batch=experts, tp_split=split, num_kernels=weights))
        self.rows.append(_Op(m=rows, n=inner, k=out, batch=experts, tp_split=turned, phase="backward", num_kernels=weights))
        if self.train_weights:
            self.rows.append(_Op(m=out, n=inner, k=rows, batch=experts, tp_split=weight_split, batch_dim="k", phase="backward", num_kernels=3 * weights))  # fmt: skip

    def traffic(
        self, op_class: str, forward_bytes: float, backward_bytes: float, split: str, kernels: tuple[float, float] = (1, 1)
    ) -> None:
        """A memory-bound operator."""
        for phase, size, count in (("forward", forward_bytes, kernels[0]), ("backward", backward_bytes, kernels[1])):
            self.rows.append(_Op(op_class=op_class, kind="memory", phase=phase, batch_dim="none", tp_split=split, bytes_per_sample=size * self.style.traffic, num_kernels=count * self.style.launches))  # fmt: skip

    def table(self) -> OpTable:
        codes = {"op_class": OP_CLASSES, "kind": PRICING_KINDS, "phase": PHASES, "batch_dim": BATCH_DIMS, "tp_split": TP_SPLITS}
        return OpTable(**{f.name: _column(codes.get(f.name), (getattr(r, f.name) for r in self.rows)) for f in dataclasses.fields(_Op)})


def _column(codes: tuple[str, ...] | None, values: Iterable[object]) -> np.ndarray:
    if codes is None:
        return np.array(list(values), dtype=np.float64)
    return np.array([codes.index(str(v)) for v in values], dtype=np.int64)


def _attention(ops: _Ops, shape: TransformerShape) -> None:
    s, heads, size = shape.seq_len, float(shape.num_heads), shape.attention_head_size
    keys = s if not shape.window else (s + min(s, 2 * shape.window)) / 2
    if shape.flash:
        flow = 2.0 * s * (4 * heads * size if shape.latent_attention else 2 * shape.query_size + 2 * shape.kv_size)
        common = {"op_class": "attention", "kind": "attention", "batch_dim": "batch", "tp_split": "batch", "m": s, "n": keys, "k": size,
                  "batch": heads, "work_share": 0.5 if shape.causal else 1.0}  # fmt: skip
        ops.rows.append(_Op(**common, bytes_per_sample=flow))  # type: ignore[arg-type]
        ops.rows.append(_Op(**common, bytes_per_sample=2 * flow, phase="backward", num_kernels=3.0))  # type: ignore[arg-type]
        return
    product = {"op_class": "attention", "batch_dim": "batch", "tp_split": "batch", "batch": heads}
    for phase, count in (("forward", 1), ("backward", 2)):
        for _ in range(count):
            ops.rows.append(_Op(**product, m=s, n=s, k=size, phase=phase))  # type: ignore[arg-type]
            ops.rows.append(_Op(**product, m=s, n=size, k=s, phase=phase))  # type: ignore[arg-type]
    scores = heads * s * s  # scale + mask, softmax, dropout: 22 bytes per score forward and backward
    ops.traffic("attention", 8.8 * scores, 13.2 * scores, "batch", (4, 5))


def block_ops(shape: TransformerShape, style: Style, *, experts: bool) -> OpTable:
    """One layer, for one sample; with a bank of experts in place of the feed-forward part if `experts`."""
    ops = _Ops(train_weights=shape.trainable_share >= 0.5, style=style)
    s, h, q, kv = shape.seq_len, shape.hidden_size, shape.query_size, shape.kv_size
    modern = shape.rotary  # RMSNorm written out, separate q, k, v and rotary embedding, as in eager Llama code; else GPT-2 with biases
    ops.traffic("normalization", 8.0 * s * h, 12.0 * s * h, "sequence", (16, 24) if modern else (2, 4))
    if shape.latent_attention:
        _latent_projections(ops, shape)
    else:
        ops.linear(s, q + 2 * kv, h, "n", weights=3.0 if modern else 1.0)
        if modern:
            ops.traffic("elementwise", 4.0 * s * (q + kv), 4.0 * s * (q + kv), "inner", (10, 12))
    _attention(ops, shape)
    ops.linear(s, h, shape.num_heads * LATENT_HEAD if shape.latent_attention else q, "k")
    ops.traffic("elementwise", 12.0 * s * h, 12.0 * s * h, "sequence", (2, 2) if modern else (4, 4))
    if experts:
        topk, num = float(shape.num_active_experts), float(shape.num_experts)
        ops.linear(s, num, h, "none")
        # route; permute by rank, then by expert, and both back: four kernels that read and write each copy
        ops.traffic("other", 16.0 * s * topk * h, 16.0 * s * topk * h, "none", (90, 90))
        _mlp(ops, shape, s * topk / num, shape.expert_ffn_size, num)
    ffn = shape.shared_ffn_size if experts else shape.ffn_width
    if ffn:
        _mlp(ops, shape, s, ffn, 1.0)
    return ops.table()


def _latent_projections(ops: _Ops, shape: TransformerShape) -> None:
    """Down, norm and up again; rotation and the joining of both parts of queries and keys, which copies each once."""
    s, ranks = shape.seq_len, shape.latent_query_rank + LATENT_RANK
    for outputs, inputs, split in latent_products(shape)[:-1]:
        ops.linear(s, outputs, inputs, split or "none")
    ops.traffic("normalization", 8.0 * s * ranks, 12.0 * s * ranks, "none", (16, 24))
    joined = 2 * shape.num_heads * (LATENT_HEAD + LATENT_ROTARY)
    ops.traffic("elementwise", 4.0 * s * joined, 4.0 * s * joined, "inner", (14, 16))


def _mlp(ops: _Ops, shape: TransformerShape, rows: float, ffn: float, experts: float) -> None:
    ops.linear(rows, (2.0 if shape.gated else 1.0) * ffn, shape.hidden_size, "n", experts=experts, weights=2.0 if shape.gated else 1.0)
    elements = rows * experts * ffn
    ops.traffic("elementwise", (6.0 if shape.gated else 4.0) * elements, (10.0 if shape.gated else 6.0) * elements, "inner", (2, 2))
    ops.linear(rows, shape.hidden_size, ffn, "k", experts=experts)


def embedding_ops(shape: TransformerShape, style: Style) -> OpTable:
    """Looking up one sample's tokens."""
    ops = _Ops(train_weights=True, style=style)
    size = shape.seq_len * shape.hidden_size
    ops.traffic("embedding", 4.0 * size, 8.0 * size if shape.trainable_share >= 0.5 else 0.0, "none", (2, 3))
    return ops.table()


def head_ops(shape: TransformerShape) -> OpTable:
    """Final norm, product with the vocabulary, cross-entropy on fp32 logits (14 bytes per logit each way)."""
    ops = _Ops(train_weights=shape.trainable_share >= 0.5)
    s, h, vocab = shape.seq_len * shape.head_share, shape.hidden_size, shape.vocab_size
    if not s:
        return ops.table()
    ops.traffic("normalization", 4.0 * s * h, 6.0 * s * h, "sequence", (1, 2))
    ops.linear(s, vocab, h, "n")
    ops.traffic("reduction", 14.0 * s * vocab, 14.0 * s * vocab, "inner", (4, 4))
    return ops.table()
