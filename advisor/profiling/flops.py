"""Flops of an operator call: torch's own formulas, and those that it lacks.

A multiply-add counts as 2 (of complex numbers as 8). Attention counts the full square of positions, causal or not (the `causal` column says which).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import flop_counter

_counter: Any = flop_counter


def count(packet: Any, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> int:
    """Flops of one call; 0 for operators that only move bytes."""
    own = _OWN.get(name)
    try:
        if own is not None:
            return int(own(args))
        formula: Any = _counter.flop_registry.get(packet)
        if formula is None:
            return 0
        return int(formula(*args, **kwargs, out_val=out)) * (4 if isinstance(out, torch.Tensor) and out.is_complex() else 1)
    except (TypeError, ValueError, AttributeError, AssertionError, IndexError):
        return 0


def _attention(args: Any) -> int:
    return int(_counter.sdpa_flop_count(_queries(args[0], args[0]), _queries(args[1], args[0]), _queries(args[2], args[0])))


def _attention_backward(args: Any) -> int:
    grad, q, k, v = args[:4]
    return int(_counter.sdpa_backward_flop_count(tuple(grad.shape), _queries(q, q), _queries(k, q), _queries(v, q)))


def _queries(tensor: Any, query: Any) -> tuple[int, ...]:
    """Shape with the heads of the query: grouped keys and values work once per query head."""
    b, _, s, d = tensor.shape
    return (b, query.shape[1], s, d)


def _grouped(args: Any) -> int:
    a, b = args[:2]
    rows = math.prod(a.shape[:-1])
    return 2 * int(rows) * int(a.shape[-1]) * int(b.shape[-1])


def _convolution_backward(args: Any) -> int:
    """Each gradient takes the forward's flops. torch's own formula forgets that a group's weight sees only its own channels."""
    grad, x, weight, transposed, wanted = args[0], args[1], args[2], bool(args[7]), args[10]
    forward = _counter.conv_flop_count(list(x.shape), list(weight.shape), list(grad.shape), transposed=transposed)
    return int(forward) * (int(wanted[0]) + int(wanted[1]))


def _recurrent_layer(args: Any) -> int:
    steps = math.prod(args[0].shape[:-1])
    return 2 * int(steps) * int(args[1].numel() + args[2].numel())


_OWN: dict[str, Callable[[Any], int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten.convolution_backward": _convolution_backward,
    "aten.mv": lambda args: 2 * math.prod(args[0].shape),
    "aten.dot": lambda args: 2 * args[0].numel(),
    "aten.addmv": lambda args: 2 * math.prod(args[1].shape),
    "aten._grouped_mm": _grouped,
    "aten.mkldnn_rnn_layer": _recurrent_layer,
    "aten.mkldnn_rnn_layer_backward": lambda args: 2 * _recurrent_layer(args),
}
