"""Shape of a decoder of which only the parameter count is known. What is presumed is named in `assumed`.

Hidden size = 128 x layers, the proportion of GPT-3 and of Megatron-LM's large models, so that P = 12 layers x hidden^2 gives
hidden = (128 P / 12)^(1/3), rounded to a multiple of 128; layers make up the rest of P, as many on each pipeline stage if that is within
10%. A gated feed-forward part of 8/3 the hidden size has as many weights as a plain one of four times.
"""

from __future__ import annotations

import re

from advisor.measure.run_values import Fields, Record
from advisor.zoo.names import find_network

GPT_VOCAB = 51200.0  # GPT-2's, padded
_SIZE = re.compile(r"(?i)(?<![a-z0-9.])(\d+(?:\.\d+)?)([bt])(?:-?a(\d+(?:\.\d+)?)b)?(?![a-z0-9])")
#: Usual in decoders of 2023 and later.
_VOCAB, _ACTIVE_EXPERTS = 128256.0, 8
_RECENT = {"n_kv_heads": 8.0, "vocab": _VOCAB, "gated_mlp": 1.0, "tied_embeddings": 0.0}


def presumed_shape(row: Fields) -> Record:
    """Shape of a plain GPT with a stated parameter count, or of a decoder whose name says its billions ("-13B", "-120B-A12B"); else empty.

    Ignored: that small models are deeper for their width.
    """
    if row.number("hidden") is not None:
        return {}
    params_b, words = row.number("params_b"), f"{row.text('model_family')} {row.text('model_name')}".lower()
    if params_b and "gpt" in words and "moe" not in words:
        row.assumed += ["n_layers", "hidden"]
        return _sizes(params_b, GPT_VOCAB, row.number("pp") or 1.0)
    named = _SIZE.search(row.text("model_name").replace("_", "-"))
    if not named or find_network(row.text("model_name")) is not None or "t5" in words:
        return {}
    row.assumed.append("shape (a decoder of its size)")
    total_b = params_b or float(named[1]) * (1000.0 if named[2].lower() == "t" else 1.0)
    active_b = float(named[3] or 0)
    if 0 < active_b < total_b:
        return _with_experts(total_b, active_b, row.number("pp") or 1.0)
    sizes = _sizes(total_b, _VOCAB, row.number("pp") or 1.0)
    return {**_RECENT, **sizes, "ffn_hidden": 128.0 * round(sizes["hidden"] / 48)}


def _sizes(params_b: float, vocab: float, stages: float) -> dict[str, float]:
    hidden = max(128.0, 128.0 * round((128 * params_b * 1e9 / 12) ** (1 / 3) / 128))
    layers = max((params_b * 1e9 - vocab * hidden) / (12 * hidden**2), 1.0)
    even = stages * round(layers / stages)
    return {"hidden": hidden, "n_layers": even if 0.9 < even / layers < 1.1 else max(1.0, float(round(layers)))}


def _with_experts(total_b: float, active_b: float, stages: float) -> Record:
    """Half of the active weights are attention's, so that layers and width are those of a plain model of as many; the rest are experts.

    Half is what Qwen3's have (30B-A3B, 235B-A22B); DeepSeek-V3 has a third, gpt-oss a quarter.
    """
    sizes = _sizes(active_b, 0.0, stages)
    matrices = 3.0 * sizes["hidden"] * sizes["n_layers"]
    width = max(64.0, 64.0 * round(active_b / 2 * 1e9 / (_ACTIVE_EXPERTS * matrices) / 64))
    num_experts = max(_ACTIVE_EXPERTS, 32 * round((total_b - active_b / 2) * 1e9 / (width * matrices) / 32))
    return {**_RECENT, **sizes, "ffn_hidden": width, "moe": f"{num_experts} experts topk {_ACTIVE_EXPERTS} moe_ffn {width:.0f}"}
