"""Workload of a transformer from its hyper-parameters: what published runs, `advise predict` and tests have instead of a script.

Operators are listed as an eager framework launches them, one entry per operator (backward included), so that this and a traced
script are priced alike. Bytes are operands read and written in 2-byte precision. Ignored: biases, position tables, loss of padding.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cost_models.terms.memory_traits import MemoryTraits, memory_traits
from cost_models.transformer_memory import BlockShape, block_bytes, embedding_saved_bytes, loss_bytes
from cost_models.transformer_ops import Style, block_ops, embedding_ops, head_ops, style_of
from cost_models.transformer_params import (
    LATENT_HEAD,
    LATENT_ROTARY,
    block_params,
    block_shapes,
    divided_rows,
    norm,
)
from cost_models.types import LayerGroup, OptimizerSpec, Workload

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
    groups = _groups(shape, traits, element_bytes, style_of(shape, precision, element_bytes))
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


def _groups(shape: TransformerShape, traits: MemoryTraits, element_bytes: float, style: Style) -> tuple[LayerGroup, ...]:
    s, h, vocab = shape.seq_len, shape.hidden_size, shape.vocab_size
    embedding, head = vocab * h, h + (0.0 if shape.tied else vocab * h)
    share = shape.trainable_share
    num_dense = shape.num_layers if not shape.num_experts else min(shape.num_dense_layers, shape.num_layers)
    memory = _memory_shape(shape, element_bytes, experts=False)
    prefix = LayerGroup(
        name="embedding", num_repeats=1, ops=embedding_ops(shape, style), num_params=embedding, num_trainable_params=embedding * share,
        num_tp_params=embedding, boundary_bytes=element_bytes * s * h, num_tp_collectives=1.0, param_shapes=(divided_rows(vocab, h, shape),),
        saved_sequence_bytes=embedding_saved_bytes(memory),
    )  # fmt: skip
    suffix = LayerGroup(
        name="head", num_repeats=1, ops=head_ops(shape), num_params=head, num_trainable_params=head * share, num_tp_params=head - h,
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


def _block(shape: TransformerShape, repeats: int, memory: BlockShape, traits: MemoryTraits, style: Style, *, experts: bool) -> LayerGroup:
    split, bank, replicated = block_params(shape, experts=experts)
    saved = block_bytes(memory, traits)
    return LayerGroup(
        name="moe_layers.*" if experts else "layers.*", num_repeats=repeats, ops=block_ops(shape, style, experts=experts),
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
