"""Shape of a row's transformer: from the row, else from a table of named models, else documented defaults."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import pandas as pd

from advisor.measure.presumed_shapes import GPT_VOCAB
from advisor.measure.run_era import presumed_flash
from advisor.measure.run_values import Fields, Record, Skip, is_number
from cost_models.traits import Runtime
from cost_models.transformer import TransformerShape

_GATED = ("llama", "qwen", "deepseek", "mixtral", "mistral", "gpt-oss", "kimi", "internlm", "kempner", "gemma")
_UNTIED = ("llama2", "llama3", "qwen", "8.86b", "80b", "70.6b", "deepseek", "nemotron", "mixtral", "mistral", "gpt-oss", "kimi")
#: Last words of a name that say how a model was tuned, not how large it is.
_TUNED = re.compile(r"(?i)hf|it|chat|base|instruct|pretrain|sft|q?lora|uncased|cased|\d+k|v\d+(\.\d+)?")
#: What else tables put beside a name: remarks in brackets, and how the model was trained.
_REMARKS = re.compile(
    r"(?i)\([^)]*\)|\b(pre-?training|fine-?tuning|training|phase ?[12]|squad( ?v?\d\.\d)?|mrpc|lamb|(sequence|seq)[ _-]?(len(gth)?)? ?=? ?\d+)\b"
)
#: Tokens of BERT's sequences by what is said of its training, and where nothing is.
_ENCODER_TOKENS = (("phase ?2", 512.0), ("phase ?1", 128.0), ("squad|fine-?tun", 384.0), ("", 512.0))


@functools.cache
def known_shapes() -> pd.DataFrame:
    """Built-in shapes of well-known models, with the columns of `arch.csv`."""
    with (resources.files("cost_models") / "calibration" / "known_shapes.csv").open("r", encoding="utf8") as text:
        return pd.read_csv(text)


def plain_name(name: str) -> str:
    """A model's name as it is compared: letters, digits and the point."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def find_shape(name: str, shapes: Mapping[str, Record]) -> Record:
    """Shape of a named model; whose it is ("meta-llama/", "litgpt-") and how it was tuned ("-hf", "-Instruct") don't matter.

    Args:
        name: as a table of runs spells it.
        shapes: rows of tables like `arch.csv` by plain name.

    Returns:
        The row, empty for a name that isn't known.
    """
    words = re.split(r"[-_ ]+", _REMARKS.sub(" ", name.rpartition("/")[2]).strip(" -_,:"))
    while words:
        for start in range(len(words)):
            found = shapes.get(plain_name("-".join(words[start:])))
            if found:
                return found
        if not _TUNED.fullmatch(words.pop()):
            break
    return {}


def transformer_shape(row: Fields, arch: Record, runtime: Runtime, *, recent: bool = False) -> TransformerShape:
    """Shape of a row.

    Args:
        row: whose values come first.
        arch: row of the table of named models, empty where the model isn't there.
        runtime: whose habits are presumed where the row doesn't say.
        recent: the GPU came out when frameworks had fused attention.

    Raises:
        Skip: no layers or no hidden size.
    """
    name = row.text("model_name").lower()

    def size(column: str, default: float) -> float:
        value = row.number(column)
        if value is None and is_number(arch.get(column)):
            return float(arch[column])
        return row.or_default(column, default) if value is None else value

    def flag(column: str, default: bool) -> bool:
        stated = row.number(column)
        return bool(stated) if stated is not None else bool(arch[column]) if is_number(arch.get(column)) else default

    hidden, layers = size("hidden", 0), size("n_layers", 0)
    if not hidden or not layers:
        raise Skip("layers and hidden size are neither stated nor known")
    if row.number("layers_from_params"):
        row.assumed.append("n_layers")
    seq_len, heads = (
        size("seq_len", _usual_tokens(row) if "bert" in name else 2048.0),
        size("n_heads", max(1.0, hidden // (128 if hidden > 2048 else 64))),
    )
    gated, encoder, ffn = flag("gated_mlp", any(w in name for w in _GATED)), "bert" in name, size("ffn_hidden", 4 * hidden)
    is_flash = (
        flag("flash_attention", True)
        if row.number("flash_attention") is not None
        else presumed_flash(row, runtime, recent=recent, gated=gated)
    )
    bank = row.text("moe") or str(arch.get("moe", "") or "")
    if "hybrid" in bank:
        row.assumed.append("attention in place of recurrent layers")
    experts = _experts(bank, ffn)
    head_size = row.number("head_dim") or (float(arch["head_dim"]) if is_number(arch.get("head_dim")) else 0.0)
    return TransformerShape(
        num_layers=int(layers), hidden_size=hidden, num_heads=int(heads), vocab_size=size("vocab", GPT_VOCAB), seq_len=seq_len,
        num_kv_heads=int(size("n_kv_heads", heads)), ffn_size=ffn, gated=gated, causal=not encoder, rotary=gated,
        tied=flag("tied_embeddings", not any(w in name for w in _UNTIED)), dropout=flag("dropout", False),
        flash=is_flash, compiled=flag("compile", runtime.compiled),
        head_share=_head_share(row, encoder), trainable_share=row.number("trainable_share") or 1.0,
        quantized=flag("quantized", False), fused_loss=None if row.number("fused_loss") is None else bool(row.number("fused_loss")),
        **({"head_size": head_size} | experts),
    )  # fmt: skip


def _head_share(row: Fields, encoder: bool) -> float:
    """Positions with logits: all of a language model, one in seven of BERT's pre-training, none of its question answering (SQuAD)."""
    if not encoder:
        return 1.0
    is_tuned = re.search("squad|fine-?tun", _about_training(row))
    return 0.0 if is_tuned or row.text("source_repo_or_doc").startswith("lambdal") else 0.15


def _about_training(row: Fields) -> str:
    return " ".join(row.text(column).lower() for column in ("model_name", "source_path_or_table", "notes")).replace("_", " ")


def _usual_tokens(row: Fields) -> float:
    """Tokens of an encoder's sequences where the row doesn't state them."""
    said = _about_training(row)
    return next(tokens for words, tokens in _ENCODER_TOKENS if re.search(words, said))


def _experts(text: str, ffn: float) -> dict[str, Any]:
    """Expert sizes from text like "128 experts topk 8 moe_ffn 768 shared 2048 dense_layers 1 window 128 MLA groups 4/8"; an expert is a whole MLP unless
    said, and a token may choose from all groups of experts.
    """
    found = re.match(r"(\d+) experts topk (\d+)", text)
    if not found:
        return {}

    def after(word: str) -> float:
        hit = re.search(rf"{word} (?:(\d+)x)?(\d+)", text)
        return float(hit[2]) * float(hit[1] or 1) if hit else 0.0

    out: dict[str, Any] = {
        "num_experts": int(found[1]), "num_active_experts": int(found[2]), "expert_ffn_size": after("moe_ffn") or ffn,
        "shared_ffn_size": after("shared"), "num_dense_layers": int(after("dense_layers")), "window": after("window"),
    }  # fmt: skip
    groups = re.search(r"groups (\d+)/(\d+)", text)
    if groups:
        out["routed_share"] = min(int(groups[1]) / max(int(groups[2]), 1), 1.0)
    if "MLA" in text:
        rank = re.search(r"q_lora (\d+)", text)
        out |= {"latent_attention": True, "head_size": 128.0} | ({"latent_query_rank": float(rank[1])} if rank else {})
    return out
