"""Parameters of a transformer from its hyper-parameters: how many, and the tensors they come in. Biases are ignored."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from cost_models.types import ParamShape

if TYPE_CHECKING:
    from cost_models.transformer import TransformerShape


#: Sizes of latent attention in DeepSeek-V2, V3 and what follows them (Kimi K2, Moonlight): of compressed keys and values, of a head's keys
#: without rotation and of its values, and of the part that is rotated.
LATENT_RANK, LATENT_HEAD, LATENT_ROTARY = 512.0, 128.0, 64.0


def block_params(shape: TransformerShape, *, experts: bool) -> tuple[float, float, float]:
    """Parameters of one block: split by tensor parallelism, in experts, replicated."""
    h, matrices = shape.hidden_size, 3.0 if shape.gated else 2.0
    attention, compressing = h * (shape.query_size + 2 * shape.kv_size) + shape.query_size * h, 0.0
    if shape.latent_attention:
        products = latent_products(shape)
        attention = sum(out * inner for out, inner, split in products if split)
        compressing = sum(out * inner for out, inner, split in products if not split)
    bank = shape.num_experts * matrices * h * shape.expert_ffn_size if experts else 0.0
    mlp = matrices * h * (shape.shared_ffn_size if experts else shape.ffn_width)
    return attention + mlp + bank, bank, compressing + 2 * h + (h * shape.num_experts if experts else 0.0)


def latent_products(shape: TransformerShape) -> tuple[tuple[float, float, str], ...]:
    """Outputs, inputs and tensor-parallel split of the weights of attention with compressed queries, keys and values.

    Queries (where they are compressed) and keys and values go down to their ranks, with the keys' shared rotary part, and up to the heads.
    Tensor parallelism leaves what compresses whole. Source: DeepSeek-V2 (2024), section 2.1; megatron/core/transformer/multi_latent_attention.py.
    """
    h, heads, rank = shape.hidden_size, float(shape.num_heads), shape.latent_query_rank
    queries = heads * (LATENT_HEAD + LATENT_ROTARY)
    up = ((rank, h, ""), (queries, rank, "n")) if rank else ((queries, h, "n"),)
    return (*up, (LATENT_RANK + LATENT_ROTARY, h, ""), (heads * 2 * LATENT_HEAD, LATENT_RANK, "n"), (h, heads * LATENT_HEAD, "k"))


def divided_rows(outputs: float, inputs: float, shape: TransformerShape) -> ParamShape:
    """A weight that tensor parallelism divides by its output side."""
    return ParamShape(rows=outputs, num_elements=outputs * inputs, trainable=shape.trainable_share >= 0.5, tp_split="rows")


def _columns(outputs: float, inputs: float, shape: TransformerShape) -> ParamShape:
    return dataclasses.replace(divided_rows(outputs, inputs, shape), tp_split="columns")


def _latent_weight(shape: TransformerShape, outputs: float, inputs: float, split: str) -> ParamShape:
    weight = _columns(outputs, inputs, shape) if split == "k" else divided_rows(outputs, inputs, shape)
    return weight if split else dataclasses.replace(weight, tp_split="none")


def norm(shape: TransformerShape) -> ParamShape:
    """The scale of a normalisation."""
    return ParamShape(rows=shape.hidden_size, num_elements=shape.hidden_size, trainable=shape.trainable_share >= 0.5)


def block_shapes(shape: TransformerShape, *, experts: bool) -> tuple[ParamShape, ...]:
    """Parameters of one block in order of use."""
    h, q, kv = shape.hidden_size, shape.query_size, shape.kv_size
    first = 2 if shape.gated else 1  # weights that read an MLP's input
    weights = [*(divided_rows(width, h, shape) for width in (q, kv, kv)), _columns(h, q, shape)]
    if shape.latent_attention:
        weights = [_latent_weight(shape, *product) for product in latent_products(shape)]
    attention = [norm(shape), *weights, norm(shape)]
    mlps = [shape.shared_ffn_size] + int(shape.num_experts) * [shape.expert_ffn_size] if experts else [shape.ffn_width]
    router = [dataclasses.replace(divided_rows(shape.num_experts, h, shape), tp_split="none")] if experts else []
    products = [w for width in mlps if width for w in (*(divided_rows(width, h, shape) for _ in range(first)), _columns(h, width, shape))]
    return (*attention, *router, *products)
