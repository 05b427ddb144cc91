"""Workload of a transformer from its hyper-parameters: what published runs, `advise predict` and tests have instead of a script.

Operators are listed as an eager framework launches them, one entry per operator (backward included), so that this and a traced
script are priced alike. Bytes are operands read and written in 2-byte precision. Ignored: biases, position tables, loss of padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from cost_models.terms.memory_traits import MemoryTraits, memory_traits
from cost_models.transformer_memory import BlockShape, block_bytes, embedding_saved_bytes, loss_bytes
from cost_models.transformer_params import (
    LATENT_HEAD,
    LATENT_RANK,
    LATENT_ROTARY,
    block_params,
    block_shapes,
    divided_rows,
    latent_products,
    norm,
)
from cost_models.types import BATCH_DIMS, OP_CLASSES, PHASES, PRICING_KINDS, TP_SPLITS, LayerGroup, OpTable, OptimizerSpec, Workload

#: Under autocast norms, softmax and losses run in fp32 and weights and activations are cast: more traffic than 16-bit training.
_AUTOCAST_TRAFFIC = 1.6
#: torch.compile fuses chains of memory-bound operators: what it leaves of their traffic and launches.
_COMPILED_TRAFFIC = 0.5
#: Optimizer states per trainable parameter on the device; paged ones lie in memory that the driver moves to the host.
_STATE_BYTES = {
    "adamw": 8.0, "adam": 8.0, "sgd": 4.0, "adafactor": 0.1, "adamw8bit": 2.0, "paged_adamw": 0.0, "paged_adamw8bit": 0.0,
}  # fmt: skip
#: Bytes per weight in 4-bit NormalFloat: half a byte, and an fp32 scale for every 64 (Dettmers et al. 2023, without double quantisation).
_NF4_BYTES = 0.5 + 4.0 / 64.0
_PRECISIONS = {  # compute dtype, bytes per element of working copy, master copy, gradients
    "fp32": ("fp32", 4.0, 0.0, 4.0), "tf32": ("tf32", 4.0, 0.0, 4.0), "fp16": ("fp16", 2.0, 4.0, 2.0), "bf16": ("bf16", 2.0, 4.0, 2.0),
    "amp": ("bf16", 4.0, 0.0, 4.0), "amp16": ("fp16", 4.0, 0.0, 4.0), "fp8": ("fp8", 2.0, 4.0, 4.0), "fp4": ("fp4", 2.0, 4.0, 4.0),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """Hyper-parameters of a decoder or encoder stack."""

    num_layers: int
    hidden_size: float
    num_heads: int
    vocab_size: float
    seq_len: float
    num_kv_heads: int = 0  # 0: as many as heads
    head_size: float = 0.0  # 0: hidden_size / num_heads
    ffn_size: float = 0.0  # 0: 4 x hidden_size
    gated: bool = False  # SwiGLU-like MLP with three weights
    tied: bool = True  # head shares the embedding
    causal: bool = True
    flash: bool = True  # fused attention; else scores are written to memory
    rotary: bool = False
    dropout: bool = False
    num_experts: int = 0
    num_active_experts: int = 0
    routed_share: float = 1.0  # of the experts that one token may choose from (DeepSeek-V3: 4 of 8 groups)
    expert_ffn_size: float = 0.0
    shared_ffn_size: float = 0.0  # ffn of the experts every token takes
    num_dense_layers: int = 0  # layers without experts, first ones
    head_share: float = 1.0  # of the positions that get logits: 1 language model, about 0.15 masked, 0 classifiers
    latent_attention: bool = False  # DeepSeek's compressed keys and values
    latent_query_rank: float = 1536.0  # of its compressed queries; 0: they are not compressed
    compiled: bool = False  # torch.compile
    window: float = 0.0  # sliding attention window in half of the layers; 0 none
    fused_loss: bool | None = None  # the loss is compiled, fused with the head or computed in chunks; None: as the runtime does
    quantized: bool = False  # frozen weights of the blocks in 4 bits (QLoRA)
    trainable_share: float = 1.0  # of the parameters; below 1 only small adapters are trained and weights get no gradient

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.hidden_size, self.num_heads, self.vocab_size, self.seq_len)
        if min(sizes) <= 0:
            raise ValueError(f"layers, hidden size, heads, vocabulary and sequence length must be positive, not {sizes}")

    @property
    def query_size(self) -> float:
        return self.num_heads * (self.head_size or self.hidden_size / self.num_heads)

    @property
    def attention_head_size(self) -> float:
        """Mean of the sizes that scores and their product with the values run over."""
        if self.latent_attention:
            return LATENT_HEAD + LATENT_ROTARY / 2
        return self.head_size or self.hidden_size / self.num_heads

    @property
    def ffn_width(self) -> float:
        return self.ffn_size or 4.0 * self.hidden_size

    @property
    def kv_size(self) -> float:
        return (self.num_kv_heads or self.num_heads) * (self.head_size or self.hidden_size / self.num_heads)


def transformer_workload(
    shape: TransformerShape,
    *,
    name: str = "transformer",
    precision: str = "bf16",
    optimizer: str = "adamw",
    grad_bytes: float | None = None,
    runtime: str = "torch",
) -> Workload:
    """A Workload priced and searched like one traced from a script.

    Args:
        shape: hyper-parameters.
        name: shown in reports.
        precision: fp32, tf32, fp16, bf16 (16-bit weights with an fp32 master copy), amp or amp16 (fp32 weights), fp8 or fp4.
        optimizer: a name of _STATE_BYTES.
        grad_bytes: bytes per gradient element, by default the precision's.
        runtime: whose habits decide which activations are kept (`cost_models.terms.memory_traits`).

    Raises:
        ValueError: unknown precision or optimizer.
    """
    if precision not in _PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; known: {', '.join(_PRECISIONS)}")
    if optimizer not in _STATE_BYTES:
        raise ValueError(f"unknown optimizer {optimizer!r}; known: {', '.join(_STATE_BYTES)}")
    dtype, param_bytes, master_bytes, default_grad_bytes = _PRECISIONS[precision]
    traits = memory_traits(runtime)
    element_bytes = 4.0 if dtype in ("fp32", "tf32") else 2.0
    groups = _groups(shape, traits, element_bytes, _style(shape, precision, element_bytes))
    num_params = sum(g.num_params * g.num_repeats for g in groups)
    vocab_params = shape.vocab_size * shape.hidden_size
    if shape.quantized:
        in_blocks = sum(g.num_params * g.num_repeats for g in groups if g.can_recompute) / num_params
        param_bytes += in_blocks * (_NF4_BYTES - param_bytes)
    fused_loss = traits.fuses_loss if shape.fused_loss is None else shape.fused_loss
    return Workload(
        name=name, groups=groups, num_params=num_params, num_trainable_params=sum(g.num_trainable_params * g.num_repeats for g in groups),
        optimizer=OptimizerSpec(name=optimizer, state_bytes_per_param=_STATE_BYTES[optimizer], num_kernels=20.0),
        compute_dtype=dtype, param_bytes=param_bytes, master_bytes=master_bytes,
        grad_bytes=default_grad_bytes if grad_bytes is None else grad_bytes, tokens_per_sample=shape.seq_len, sample_unit="tokens",
        seq_len=shape.seq_len, hidden_size=shape.hidden_size, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads or shape.num_heads,
        vocab_size=shape.vocab_size, num_experts=shape.num_experts, num_active_experts=shape.num_active_experts, routed_share=shape.routed_share,
        tied_params=vocab_params if shape.tied else 0.0, logits_bytes=shape.head_share * loss_bytes(shape.vocab_size, shape.seq_len, traits, fused=fused_loss), input_bytes=16.0 * shape.seq_len,
        model_flops=_model_flops(shape), can_tensor_parallel=True, can_pipeline=True,
    )  # fmt: skip


def _groups(shape: TransformerShape, traits: MemoryTraits, element_bytes: float, style: _Style) -> tuple[LayerGroup, ...]:
    s, h, vocab = shape.seq_len, shape.hidden_size, shape.vocab_size
    embedding, head = vocab * h, h + (0.0 if shape.tied else vocab * h)
    share = shape.trainable_share
    num_dense = shape.num_layers if not shape.num_experts else min(shape.num_dense_layers, shape.num_layers)
    memory = _memory_shape(shape, element_bytes, experts=False)
    prefix = LayerGroup(
        name="embedding", num_repeats=1, ops=_embedding_ops(shape, style), num_params=embedding, num_trainable_params=embedding * share,
        num_tp_params=embedding, boundary_bytes=element_bytes * s * h, num_tp_collectives=1.0, param_shapes=(divided_rows(vocab, h, shape),),
        saved_sequence_bytes=embedding_saved_bytes(memory),
    )  # fmt: skip
    suffix = LayerGroup(
        name="head", num_repeats=1, ops=_head_ops(shape), num_params=head, num_trainable_params=head * share, num_tp_params=head - h,
        saved_sequence_bytes=2.0 * element_bytes * s * h,
        param_shapes=(norm(shape), *([] if shape.tied else [divided_rows(vocab, h, shape)])),
    )  # fmt: skip
    counts = ((num_dense, False), (shape.num_layers - num_dense, True))
    blocks = [_block(shape, n, _memory_shape(shape, element_bytes, experts=e), traits, style, experts=e) for n, e in counts if n]
    return (prefix, *blocks, suffix)


def _memory_shape(shape: TransformerShape, element_bytes: float, *, experts: bool) -> BlockShape:
    return BlockShape(
        hidden=shape.hidden_size, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads or shape.num_heads, ffn=shape.ffn_width,
        seq_len=shape.seq_len, gated=shape.gated, head_dim=shape.head_size, dropout=shape.dropout, flash=shape.flash,
        num_active_experts=shape.num_active_experts if experts else 0.0, expert_ffn=shape.expert_ffn_size if experts else 0.0,
        shared_ffn=shape.shared_ffn_size if experts else 0.0, latent_attention=shape.latent_attention, compiled=shape.compiled,
        quantized=shape.quantized, element_bytes=element_bytes,
    )  # fmt: skip


def _block(shape: TransformerShape, repeats: int, memory: BlockShape, traits: MemoryTraits, style: _Style, *, experts: bool) -> LayerGroup:
    split, bank, replicated = block_params(shape, experts=experts)
    saved = block_bytes(memory, traits)
    return LayerGroup(
        name="moe_layers.*" if experts else "layers.*", num_repeats=repeats, ops=_block_ops(shape, style, experts=experts),
        num_params=split + replicated, num_trainable_params=(split + replicated) * shape.trainable_share, num_tp_params=split,
        num_expert_params=bank, num_tp_collectives=2.0, can_recompute=True, can_cut=True, param_shapes=block_shapes(shape, experts=experts),
        **{f.name: getattr(saved, f.name) for f in dataclasses.fields(saved)},
    )  # fmt: skip


def _model_flops(shape: TransformerShape) -> float:
    """6 per active weight and token plus 12 x layers x query size x sequence of attention, causal not halved (PaLM, appendix B).

    Frozen weights get no gradient: 4 instead of 6.
    """
    h, matrices = shape.hidden_size, 3.0 if shape.gated else 2.0
    split, _, replicated = block_params(shape, experts=False)
    weights = shape.num_layers * (split + replicated) + shape.vocab_size * h
    if shape.num_experts:
        split, bank, replicated = block_params(shape, experts=True)
        active = split - bank + replicated + shape.num_active_experts * matrices * h * shape.expert_ffn_size
        dense = min(shape.num_dense_layers, shape.num_layers)
        weights = (weights - shape.vocab_size * h) * dense / shape.num_layers + (shape.num_layers - dense) * active + shape.vocab_size * h
    per_weight = 6.0 if shape.trainable_share >= 0.5 else 4.0
    return per_weight * weights * shape.seq_len + 12.0 * shape.num_layers * shape.num_heads * shape.attention_head_size * shape.seq_len**2


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
class _Style:
    """How a framework runs what is not a matrix product."""

    traffic: float = 1.0  # bytes of memory-bound operators, against 2-byte activations in eager mode
    launches: float = 1.0  # of them, against eager mode
    quantized_bytes: float = 0.0  # per element quantised before a low-precision product: read, written, written transposed


def _style(shape: TransformerShape, precision: str, element_bytes: float) -> _Style:
    traffic = _AUTOCAST_TRAFFIC if precision.startswith("amp") else element_bytes / 2
    fused = _COMPILED_TRAFFIC if shape.compiled else 1.0
    return _Style(traffic=traffic * fused, launches=fused, quantized_bytes=4.0 if precision in ("fp8", "fp4") else 0.0)


@dataclass(slots=True)
class _Ops:
    """Collects operators with their backward."""

    train_weights: bool
    style: _Style = _Style()
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


def _block_ops(shape: TransformerShape, style: _Style, *, experts: bool) -> OpTable:
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


def _embedding_ops(shape: TransformerShape, style: _Style) -> OpTable:
    ops = _Ops(train_weights=True, style=style)
    size = shape.seq_len * shape.hidden_size
    ops.traffic("embedding", 4.0 * size, 8.0 * size if shape.trainable_share >= 0.5 else 0.0, "none", (2, 3))
    return ops.table()


def _head_ops(shape: TransformerShape) -> OpTable:
    """Final norm, product with the vocabulary, cross-entropy on fp32 logits (14 bytes per logit each way)."""
    ops = _Ops(train_weights=shape.trainable_share >= 0.5)
    s, h, vocab = shape.seq_len * shape.head_share, shape.hidden_size, shape.vocab_size
    if not s:
        return ops.table()
    ops.traffic("normalization", 4.0 * s * h, 6.0 * s * h, "sequence", (1, 2))
    ops.linear(s, vocab, h, "n")
    ops.traffic("reduction", 14.0 * s * vocab, 14.0 * s * vocab, "inner", (4, 4))
    return ops.table()
