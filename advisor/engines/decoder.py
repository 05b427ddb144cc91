"""What a decoder is made of (GPT- and Llama-like models), read from its parameters' shapes, for engines that build the model anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Ends of the names of transformers' decoders.
_CAUSAL = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Sizes and kinds of a decoder-only transformer."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    seq_len: int  # positions of a sample
    num_positions: int  # learned positions; 0 where they are rotary
    gated: bool  # three weights in the feed-forward part, as in SwiGLU
    rms_norm: bool  # else LayerNorm
    biases: bool  # in all linear layers of a block
    tied: bool  # the head shares the embedding's weight


def decoder(model: Mapping[str, Any]) -> Decoder:
    """The model as a decoder.

    Raises:
        ValueError: it is none, or its sizes can't be told; the reason follows "it builds the model anew, and".
    """
    inside: Mapping[str, list[int]] = model.get("block_parameters") or {}
    outside: Mapping[str, list[int]] = model.get("outer_parameters") or {}
    sizes = {key: int(model.get(key) or 0) for key in ("hidden_size", "num_heads", "num_kv_heads", "vocab_size", "seq_len")}
    missing = [key for key, value in sizes.items() if not value]
    if not inside or not outside:
        raise ValueError("no equal layers with known weights are seen")
    if missing:
        raise ValueError(f"{' and '.join(missing)} {'isn' if len(missing) == 1 else 'aren'}'t known")
    if model.get("causal_attention") is False and not str(model.get("class")).endswith(_CAUSAL):  # transformers masks by a tensor
        raise ValueError("its attention sees later positions, so it is no decoder")
    hidden, num_heads = sizes["hidden_size"], sizes["num_heads"]
    kv_size = sizes["num_kv_heads"] * (hidden // num_heads)
    ffn = _feed_forward(inside, hidden, kv_size)
    block, outer = _norms(model.get("block_modules") or {}), _norms(model.get("outer_modules") or {})
    linear_biases = _biases(inside, block)
    embeddings = [name for name, kind in (model.get("outer_modules") or {}).items() if kind == "Embedding"]
    num_linear = sum(len(shape) == 2 for shape in inside.values())
    checks = (
        (hidden % num_heads != 0, f"{num_heads} heads don't divide {hidden}"),
        (len(block) != 2 or len(outer) != 1, "its norms aren't two in a layer and one behind the last"),
        (len({*block.values(), *outer.values()}) > 1, "its norms are of several kinds"),
        (linear_biases not in {0, num_linear}, "only some of its linear layers have biases"),
        (not 1 <= len(embeddings) <= 2, "its embeddings aren't of tokens, or of tokens and positions"),
        (any(name.endswith("bias") and len(shape) == 1 and shape[0] == sizes["vocab_size"] for name, shape in outside.items()),
         "its head has a bias"),
    )  # fmt: skip
    if reason := next((text for wrong, text in checks if wrong), ""):
        raise ValueError(reason)
    positions = [outside[f"{name}.weight"][0] for name in embeddings if outside.get(f"{name}.weight", [0])[0] != sizes["vocab_size"]]
    return Decoder(
        num_layers=len(model["block_paths"]), ffn_size=ffn[0], gated=ffn[1], num_positions=positions[0] if positions else 0,
        rms_norm="RMS" in next(iter(block.values())), biases=linear_biases > 0, tied=bool(model.get("tied")), **sizes,
    )  # fmt: skip


def _feed_forward(inside: Mapping[str, list[int]], hidden: int, kv_size: int) -> tuple[int, bool]:
    """Inner size of the feed-forward part and whether it is gated; whichever way round weights are stored."""
    attention_sizes = {hidden, kv_size, hidden + 2 * kv_size, 2 * kv_size}
    matrices = [shape for shape in inside.values() if len(shape) == 2]
    others = [next((n for n in shape if n not in attention_sizes), hidden) for shape in matrices]
    inner = sorted({n for n in others if n != hidden})
    if any(len(shape) > 2 for shape in inside.values()) or len(inner) != 1 or any(hidden not in shape for shape in matrices):
        raise ValueError("its layers aren't one attention and one feed-forward part (experts, adapters or equal sizes?)")
    num_ffn = sum(n == inner[0] for n in others)
    attention = sum(shape[0] * shape[1] for shape, n in zip(matrices, others, strict=True) if n != inner[0])
    if num_ffn not in {2, 3} or attention != 2 * hidden * (hidden + kv_size):
        raise ValueError("its layers' weights aren't those of q, k, v, output and a feed-forward part of two or three")
    return inner[0], num_ffn == 3


def _norms(modules: Mapping[str, str]) -> dict[str, str]:
    return {name: kind for name, kind in modules.items() if "Norm" in kind}


def _biases(inside: Mapping[str, list[int]], norms: Mapping[str, str]) -> int:
    return sum(name.endswith(".bias") and name.removesuffix(".bias") not in norms for name in inside)
