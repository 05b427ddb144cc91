"""What a run's notes and name say of fields that its own columns leave blank: layers, attention kernel, dropout, experts, vocabulary.

Megatron's tests and BigScience's tables put such settings into free text. Nothing measured is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]
#: Sources whose models pad the vocabulary to a multiple of 128 per tensor-parallel rank, tie the head and drop out by default.
_MEGATRON_TESTS, _BIGSCIENCE = "NVIDIA/Megatron-LM CI", "bigscience-workshop/bigscience"
#: Trainable part of the parameters where only low-rank adapters are trained.
_ADAPTER_SHARE = 0.01
#: Day from which BigScience's tuning runs used the bf16 optimizer that accumulates gradients in an unsharded fp32 buffer.
_FP32_ACCUMULATION = "run date 02-28"
_GPT2_VOCAB, _BLOOM_VOCAB = 50257.0, 250000.0


def with_notes(record: Record) -> dict[str, Any]:
    """The record with blank fields filled from its text; stated values stay (but for the attention kernel of Megatron's tests).

    Besides the columns of `runs.csv` it may get `trainable_share`, `dropout`, `gated_mlp`, `tied_embeddings` (0 or 1), `moe` (as in `arch.csv`),
    `layers_from_params` (1 where the number of layers was worked out) and `runtime` (a file of `cost_models/runtimes`).
    """
    out = dict(record)
    notes, name, source = (_text(record, k) for k in ("notes", "model_name", "source_repo_or_doc"))
    found: dict[str, Any] = {"trainable_share": _ADAPTER_SHARE} if re.match(r"q?lora\b", notes, re.IGNORECASE) else {}
    if source.startswith(_MEGATRON_TESTS):
        found |= _megatron_test(notes, name)
        out["flash_attention"] = None  # the column tells flash attention from cuDNN's fused one, which stores no scores either
    if source.startswith(_BIGSCIENCE):
        found |= {"tied_embeddings": 1.0, "gated_mlp": 0.0, "dropout": float("tr3m" in name)}
        if _FP32_ACCUMULATION in notes and _text(record, "precision") == "bf16":
            found["runtime"] = "megatron-deepspeed-bf16"
    if source.startswith((_MEGATRON_TESTS, _BIGSCIENCE)):
        vocab = _number(record, "vocab") or (_BLOOM_VOCAB if "h14400" in name else _GPT2_VOCAB)
        multiple = 128.0 * (_number(record, "tp") or 1.0)
        out["vocab"] = math.ceil(vocab / multiple) * multiple
    layers = _layers(out)
    if layers:
        found |= {"n_layers": layers, "layers_from_params": 1.0}
    return out | {key: value for key, value in found.items() if _is_blank(out.get(key))}


def _megatron_test(notes: str, name: str) -> dict[str, Any]:
    """Settings of Megatron-LM's functional tests, whose arguments and test name are quoted in the notes."""
    backend = re.search(r"attention-backend (\w+)", notes)
    test = re.search(r"test ([^;]+);", notes)
    engine = backend[1] if backend else ""
    plain = engine in {"unfused", "local"} or ("_te_" not in (test[1] if test else "") and not re.search(r"L32|nemotron", name))
    out: dict[str, Any] = {
        "flash_attention": float(not plain), "vp": 1.0, "dropout": 1.0, "tied_embeddings": 1.0, "gated_mlp": float("swiglu" in notes),
    }  # fmt: skip
    experts, active = re.search(r"experts (\d+)", notes), re.search(r"topk (\d+)", notes)
    if experts:
        width = re.search(r"moe_ffn (\d+)", notes)
        out["moe"] = f"{experts[1]} experts topk {active[1] if active else 2}" + (f" moe_ffn {width[1]}" if width else "")
    return out


def _layers(record: Record) -> float | None:
    """Layers of a plain GPT from its parameter count, where only that is stated: P = 12 L h^2 + V h."""
    params, hidden, vocab = (_number(record, k) for k in ("params_b", "hidden", "vocab"))
    if not _is_blank(record.get("n_layers")) or not params or not hidden or "GPT" not in _text(record, "model_family"):
        return None
    return float(round((params * 1e9 - (vocab or _GPT2_VOCAB) * hidden) / (12 * hidden**2))) or None


def _is_blank(value: object) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _text(record: Record, name: str) -> str:
    value = record.get(name)
    return "" if _is_blank(value) else str(value)


def _number(record: Record, name: str) -> float | None:
    try:
        value = float(record.get(name, math.nan))
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
