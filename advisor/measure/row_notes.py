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
#: Trainable part of the parameters where only low-rank adapters are trained: rank 8 on all products or 32 on two of them, of a 7B model.
_ADAPTER_SHARE = 0.003
#: Day from which BigScience's tuning runs used the bf16 optimizer that accumulates gradients in an unsharded fp32 buffer.
_FP32_ACCUMULATION = "run date 02-28"
#: Full fine-tuning on several GPUs in litgpt: FSDP with every block recomputed, gradients summed over a few micro-batches before a reduction.
_LITGPT_FULL = {"zero_stage": 3.0, "activation_ckpt": "full", "grad_accum": 4.0}
#: Year from which torchtitan compiles the loss with the model.
_TORCHTITAN_COMPILES_LOSS = 2025
_GPT2_VOCAB, _BLOOM_VOCAB, _BERT_VOCAB = 50257.0, 250000.0, 30522.0


def with_notes(record: Record) -> dict[str, Any]:
    """The record with blank fields filled from its text; stated values stay, but for a few that mean something else in their source.

    Besides the columns of `runs.csv` it may get `trainable_share`, `quantized`, `optimizer_name`, `optimizer_instances`, `offload`, `fused_loss`, `dropout`, `gated_mlp`, `tied_embeddings` (0 or 1), `moe` (as in `arch.csv`),
    `layers_from_params` (1 where the number of layers was worked out) and `runtime` (a file of `cost_models/runtimes`).
    """
    out = dict(record)
    notes, name, source = (_text(record, k) for k in ("notes", "model_name", "source_repo_or_doc"))
    found: dict[str, Any] = {"offload": 1.0} if re.search(r"offload opt=Y|cpu_offload=True", notes) else {}
    found |= _tuning(" ".join((notes, name, *(_text(record, k) for k in ("optimizer", "framework", "source_path_or_table")))))
    if source.startswith("pytorch/torchtitan") and int(_year(_text(record, "source_path_or_table"))) >= _TORCHTITAN_COMPILES_LOSS:
        found |= {"fused_loss": _number(record, "compile") or 0.0}
    if source.startswith(_MEGATRON_TESTS):
        found |= _megatron_test(notes, name)
        out["ep"] = _expert_ranks(record, notes)
        out["flash_attention"] = None  # the column tells flash attention from cuDNN's fused one, which stores no scores either
    if source.startswith("Lightning-AI/litgpt"):
        found |= {"tied_embeddings": 0.0}  # its models have a head of their own even where the published weights are shared
        if "trainable_share" not in found and (_number(record, "n_gpus") or 1.0) > 1:
            found |= _LITGPT_FULL
    if source.startswith(_BIGSCIENCE):
        found |= {"tied_embeddings": 1.0, "gated_mlp": 0.0, "dropout": float("tr3m" in name)}
        if _FP32_ACCUMULATION in notes and _text(record, "precision") == "bf16":
            found["runtime"] = "megatron-deepspeed-bf16"
    if source.startswith((_MEGATRON_TESTS, _BIGSCIENCE)):
        vocab = _number(record, "vocab") or (_BLOOM_VOCAB if "h14400" in name else _BERT_VOCAB if _is_t5(name) else _GPT2_VOCAB)
        multiple = 128.0 * (_number(record, "tp") or 1.0)
        out["vocab"] = math.ceil(vocab / multiple) * multiple
    stated_layers = _number(record, "n_layers")
    if _is_t5(name) and stated_layers:  # of encoder and decoder each; cross attention makes up for shorter targets
        out["n_layers"] = 2 * stated_layers
    layers = _layers(out)
    if layers:
        found |= {"n_layers": layers, "layers_from_params": 1.0}
    return out | {key: value for key, value in found.items() if _is_blank(out.get(key))}


def _tuning(text: str) -> dict[str, Any]:
    """Low-rank adapters, 4-bit weights under them, and optimizers that save memory, by their usual names."""
    adapter = re.search(r"(?<![a-z])(q?)lora(?![a-z])", text, re.IGNORECASE)
    out: dict[str, Any] = {"trainable_share": _ADAPTER_SHARE} if adapter else {}
    if adapter and adapter[1]:
        out["quantized"] = 1.0
    paged = "paged_" if re.search(r"paged[_ ]?adam", text, re.IGNORECASE) else ""
    if paged or re.search(r"8[- ]?bit[_ ]?(adam|optim)|adamw?[_ ]?8[- ]?bit", text, re.IGNORECASE):
        out["optimizer_name"] = f"{paged}adamw" + ("8bit" if re.search(r"8[- ]?bit", text, re.IGNORECASE) else "")
    return out


def _year(text: str) -> str:
    """Year in a dated file name ("llama3-8b_h200_202506_trainy.md"), "0" where there is none."""
    found = re.search(r"(?<!\d)(20\d\d)-?(0[1-9]|1[0-2])(?!\d)", text)
    return found[1] if found else "0"


def _megatron_test(notes: str, name: str) -> dict[str, Any]:
    """Settings of Megatron-LM's functional tests, whose arguments and test name are quoted in the notes."""
    backend = re.search(r"attention-backend (\w+)", notes)
    test = re.search(r"test ([^;]+);", notes)
    engine = backend[1] if backend else ""
    plain = engine in {"unfused", "local"} or ("_te_" not in (test[1] if test else "") and not re.search(r"L32|nemotron", name))
    out: dict[str, Any] = {
        "runtime": "megatron-core", "flash_attention": float(not plain), "vp": 1.0, "dropout": 1.0, "tied_embeddings": 1.0, "gated_mlp": float("swiglu" in notes),
    }  # fmt: skip
    if "multi_dist_optimizer_instances" in notes:
        out["optimizer_instances"] = 2.0  # the states are sharded among half of the data ranks
    if re.search(r"cross_entropy_loss_fusion|defer_embedding_wgrad", notes):
        out["fused_loss"] = 1.0  # both keep 4 more bytes per logit
    experts, active = re.search(r"experts (\d+)", notes), re.search(r"topk (\d+)", notes)
    if experts:
        width = re.search(r"moe_ffn (\d+)", notes)
        out["moe"] = f"{experts[1]} experts topk {active[1] if active else 2}" + (f" moe_ffn {width[1]}" if width else "")
    return out


def _expert_ranks(record: Record, notes: str) -> float | None:
    """Expert-parallel degree of experts that tensor parallelism divides too, where the test divides them among other numbers of ranks."""
    ep, tp, etp = _number(record, "ep"), _number(record, "tp"), re.search(r"_etp(\d+)", notes)
    return ep if not (ep and tp and etp) else max(ep * float(etp[1]) / tp, 1.0)


def _is_t5(name: str) -> bool:
    return re.search(r"(?<![a-z])t5(?![a-z\d])", name, re.IGNORECASE) is not None


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
