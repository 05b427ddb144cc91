"""Parameters of a transformer from its hyper-parameters: how many, and the tensors they come in. Biases are ignored."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from cost_models.types import ParamShape

if TYPE_CHECKING:
    from cost_models.transformer import TransformerShape


def block_params(shape: TransformerShape, *, experts: bool) -> tuple[float, float, float]:
    """Parameters of one block: split by tensor parallelism, in experts, replicated."""
    h, matrices = shape.hidden_size, 3.0 if shape.gated else 2.0
    attention = h * (shape.query_size + 2 * shape.kv_size) + shape.query_size * h
    bank = shape.num_experts * matrices * h * shape.expert_ffn_size if experts else 0.0
    mlp = matrices * h * (shape.shared_ffn_size if experts else shape.ffn_width)
    return attention + mlp + bank, bank, 2 * h + (h * shape.num_experts if experts else 0.0)


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
    h, q, kv = shape.hidden_size, shape.query_size, shape.kv_size
    first = 2 if shape.gated else 1  # weights that read an MLP's input
    attention = [norm(shape), *(divided_rows(width, h, shape) for width in (q, kv, kv)), _columns(h, q, shape), norm(shape)]
    mlps = [shape.shared_ffn_size] + int(shape.num_experts) * [shape.expert_ffn_size] if experts else [shape.ffn_width]
    router = [dataclasses.replace(divided_rows(shape.num_experts, h, shape), tp_split="none")] if experts else []
    products = [w for width in mlps if width for w in (*(divided_rows(width, h, shape) for _ in range(first)), _columns(h, width, shape))]
    return (*attention, *router, *products)
