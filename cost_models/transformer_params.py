"""Parameters of a transformer from its hyper-parameters: how many, and the tensors they come in. Biases are ignored."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from cost_models.types import ParamShape

if TYPE_CHECKING:
    from cost_models.transformer import TransformerShape


#: Latent attention of DeepSeek-V2 and V3: ranks of the compressed query and of keys and values, the rotary part of a key, and a head's parts.
_QUERY_RANK, _KV_RANK, _ROTARY = 1536.0, 512.0, 64.0
_QUERY_HEAD, _KEY_VALUE_HEAD, _VALUE_HEAD = 128.0 + 64.0, 128.0 + 128.0, 128.0


def block_params(shape: TransformerShape, *, experts: bool) -> tuple[float, float, float]:
    """Parameters of one block: split by tensor parallelism, in experts, replicated."""
    h, matrices = shape.hidden_size, 3.0 if shape.gated else 2.0
    attention = h * (shape.query_size + 2 * shape.kv_size) + shape.query_size * h
    compressed = 0.0
    if shape.latent_attention:
        heads = shape.num_heads
        attention = heads * (_QUERY_RANK * _QUERY_HEAD + _KV_RANK * _KEY_VALUE_HEAD + _VALUE_HEAD * h)
        compressed = h * (_QUERY_RANK + _KV_RANK + _ROTARY)
    bank = shape.num_experts * matrices * h * shape.expert_ffn_size if experts else 0.0
    mlp = matrices * h * (shape.shared_ffn_size if experts else shape.ffn_width)
    return attention + mlp + bank, bank, 2 * h + compressed + (h * shape.num_experts if experts else 0.0)


def divided_rows(outputs: float, inputs: float, shape: TransformerShape) -> ParamShape:
    """A weight that tensor parallelism divides by its output side."""
    return ParamShape(rows=outputs, num_elements=outputs * inputs, trainable=shape.trainable_share >= 0.5, tp_split="rows")


def _columns(outputs: float, inputs: float, shape: TransformerShape) -> ParamShape:
    return dataclasses.replace(divided_rows(outputs, inputs, shape), tp_split="columns")


def norm(shape: TransformerShape) -> ParamShape:
    """The scale of a normalisation."""
    return ParamShape(rows=shape.hidden_size, num_elements=shape.hidden_size, trainable=shape.trainable_share >= 0.5)


def block_shapes(shape: TransformerShape, *, experts: bool) -> tuple[ParamShape, ...]:
    """Parameters of one block in order of use."""
    h = shape.hidden_size
    first = 2 if shape.gated else 1  # weights that read an MLP's input
    attention = [norm(shape), *_attention_shapes(shape), norm(shape)]
    mlps = [shape.shared_ffn_size] + int(shape.num_experts) * [shape.expert_ffn_size] if experts else [shape.ffn_width]
    router = [dataclasses.replace(divided_rows(shape.num_experts, h, shape), tp_split="none")] if experts else []
    products = [w for width in mlps if width for w in (*(divided_rows(width, h, shape) for _ in range(first)), _columns(h, width, shape))]
    return (*attention, *router, *products)


def _attention_shapes(shape: TransformerShape) -> tuple[ParamShape, ...]:
    h, q, kv = shape.hidden_size, shape.query_size, shape.kv_size
    if not shape.latent_attention:
        return (*(divided_rows(width, h, shape) for width in (q, kv, kv)), _columns(h, q, shape))
    heads = shape.num_heads
    down = (dataclasses.replace(divided_rows(rank, h, shape), tp_split="none") for rank in (_QUERY_RANK, _KV_RANK + _ROTARY))
    up = (divided_rows(heads * size, rank, shape) for size, rank in ((_QUERY_HEAD, _QUERY_RANK), (_KEY_VALUE_HEAD, _KV_RANK)))
    return (*down, *up, _columns(h, heads * _VALUE_HEAD, shape))
