"""Bytes that a transformer block and its loss keep for the backward pass, from the block's shape.

Counted tensor by tensor for 16-bit activations (Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
models", section 4, extended by gated MLPs, grouped queries, experts and latent attention). fp32 activations are twice as large.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.terms.memory_traits import MemoryTraits

#: Under torch.compile fused norms, gates and casts keep less (fitted on published torchtitan runs).
COMPILED_SHARE = 0.85
#: Short-lived tensors of a layer's backward, as a multiple of its widest tensors (input and gradient of each).
TEMPORARY_FACTOR = 2.0
# Latent attention of DeepSeek-V2/V3: query rank 1536, key-value rank 512, head dims 128 + 64 (query, key) and 128 (value)
_LATENT_INNER, _LATENT_SEQUENCE, _LATENT_OUTPUT = 1024.0, 8448.0, 256.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Sizes of one transformer block, in elements."""

    hidden: float
    num_heads: float
    num_kv_heads: float
    ffn: float  # of the dense MLP
    seq_len: float
    gated: bool = True
    head_dim: float = 0.0  # 0: hidden / num_heads
    dropout: bool = False
    flash: bool = True  # False: the score matrix is stored
    num_active_experts: float = 0.0  # 0: dense block
    expert_ffn: float = 0.0
    shared_ffn: float = 0.0
    latent_attention: bool = False
    compiled: bool = False
    quantized: bool = False  # frozen weights in 4 bits
    element_bytes: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """Bytes per sample, named as in LayerGroup: divided by tensor, by sequence parallelism, or by neither."""

    saved_inner_bytes: float
    saved_sequence_bytes: float
    saved_other_bytes: float
    selective_inner_bytes: float
    selective_sequence_bytes: float
    selective_other_bytes: float
    temporary_bytes: float
    boundary_bytes: float


def block_bytes(shape: BlockShape, traits: MemoryTraits) -> BlockBytes:
    """Bytes kept for backward by one block and one sample.

    Per token, in units of 16-bit elements: two residual inputs, two normed inputs (which feed query-key-value and MLP), query, key,
    value, attention's output, and per MLP element the up projection, gate and product. Ignores rotary tables, softmax statistics and
    the router's small tensors.
    """
    h, heads, kv_share = shape.hidden, shape.num_heads, shape.num_kv_heads / max(shape.num_heads, 1)
    width = heads * shape.head_dim if shape.head_dim else h  # query width; differs from hidden in a few models
    drop, active = float(shape.dropout), shape.num_active_experts
    sequence = (4 + traits.norm_bytes + 2 * drop) * h + 4 * h
    inner = (2 + 4 * kv_share) * width + 2 * width
    if shape.latent_attention:
        inner = heads * (_LATENT_INNER + _LATENT_OUTPUT)
        sequence += _LATENT_SEQUENCE
    scores = 0.0 if shape.flash else (2 + 3 * drop) * heads * shape.seq_len
    per_ffn = (8.0 if traits.saves_gate else 6.0) if shape.gated else 4.0
    mlp_width = active * shape.expert_ffn + shape.shared_ffn if active else shape.ffn
    inner += per_ffn * mlp_width
    sequence += 6 * h * active  # routed copies of the tokens
    kept_inner, kept_sequence = inner, sequence
    if traits.selective == "matmul":
        kept_inner, kept_sequence = (4 + 2 * kv_share) * width + 2 * shape.ffn, 4 * h
    widest = (4 if shape.gated else 2) * (active * shape.expert_ffn if active else shape.ffn) + 4 * h
    per_token = shape.element_bytes / 2 * shape.seq_len
    scale = per_token * (COMPILED_SHARE if shape.compiled else 1.0) * (traits.quantized_activations if shape.quantized else 1.0)
    return BlockBytes(
        saved_inner_bytes=scale * (inner + scores),
        saved_sequence_bytes=scale * sequence,
        saved_other_bytes=0.0,
        selective_inner_bytes=scale * kept_inner,
        selective_sequence_bytes=scale * kept_sequence,
        selective_other_bytes=0.0,
        temporary_bytes=per_token * TEMPORARY_FACTOR * widest,
        boundary_bytes=per_token * 2 * h,
    )


def loss_bytes(vocab_size: float, seq_len: float, traits: MemoryTraits, *, fused: bool = False) -> float:
    """Bytes of logits and loss temporaries alive at once for one sample.

    torch's cross-entropy on fp32 logits holds 12 bytes per logit (16-bit logits, fp32 copy, log-softmax and its gradient), in place 8,
    Megatron's vocabulary-parallel loss 6; a compiled or chunked loss less.

    Args:
        vocab_size: logits per token.
        seq_len: tokens per sample.
        traits: of the runtime.
        fused: the loss is compiled, fused with the head or computed in chunks.
    """
    return vocab_size * seq_len * (traits.fused_logit_bytes if fused else traits.logit_bytes)


def embedding_saved_bytes(shape: BlockShape) -> float:
    """Bytes per sample that the embedding layer keeps: its output, which the first block also reads, and a dropout mask."""
    return shape.seq_len * (shape.element_bytes + float(shape.dropout)) * shape.hidden
