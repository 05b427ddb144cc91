"""What the tests of the framework engines share: model facts, golden files, clean Python, and mistakes made in a file's values."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine_plans import REPOSITORY

FOLDER = Path("advice/plan-1")
LLAMA_8B = {
    "class": "LlamaForCausalLM", "block_classes": ["LlamaDecoderLayer"], "tied": [], "hidden_size": 4096.0, "num_heads": 32, "num_kv_heads": 8,
    "seq_len": 8192, "vocab_size": 128256,
    "block_parameters": {
        "self_attn.q_proj.weight": [4096, 4096], "self_attn.k_proj.weight": [1024, 4096], "self_attn.v_proj.weight": [1024, 4096],
        "self_attn.o_proj.weight": [4096, 4096], "mlp.gate_proj.weight": [14336, 4096], "mlp.up_proj.weight": [14336, 4096],
        "mlp.down_proj.weight": [4096, 14336], "input_layernorm.weight": [4096], "post_attention_layernorm.weight": [4096],
    },
    "block_modules": {
        **{f"self_attn.{n}_proj": "Linear" for n in "qkvo"}, **{f"mlp.{n}_proj": "Linear" for n in ("gate", "up", "down")},
        "input_layernorm": "LlamaRMSNorm", "post_attention_layernorm": "LlamaRMSNorm",
    },
    "outer_parameters": {"model.embed_tokens.weight": [128256, 4096], "model.norm.weight": [4096], "lm_head.weight": [128256, 4096]},
    "outer_modules": {"model.embed_tokens": "Embedding", "model.norm": "LlamaRMSNorm", "lm_head": "Linear"},
}  # fmt: skip
GPT2_SMALL = {
    "class": "GPT2", "block_classes": ["Block"], "tied": [["tokens.weight", "head.weight"]], "hidden_size": 768.0, "num_heads": 12,
    "num_kv_heads": 12, "seq_len": 1024, "vocab_size": 50257,
    "block_parameters": {
        "norm_1.weight": [768], "norm_1.bias": [768], "attention.qkv.weight": [2304, 768], "attention.qkv.bias": [2304],
        "attention.proj.weight": [768, 768], "attention.proj.bias": [768], "norm_2.weight": [768], "norm_2.bias": [768],
        "mlp.0.weight": [3072, 768], "mlp.0.bias": [3072], "mlp.2.weight": [768, 3072], "mlp.2.bias": [768],
    },
    "block_modules": {"norm_1": "LayerNorm", "attention.qkv": "Linear", "attention.proj": "Linear", "norm_2": "LayerNorm", "mlp.0": "Linear",
                      "mlp.2": "Linear"},
    "outer_parameters": {"tokens.weight": [50257, 768], "positions.weight": [1024, 768], "norm.weight": [768], "norm.bias": [768]},
    "outer_modules": {"tokens": "Embedding", "positions": "Embedding", "norm": "LayerNorm"},
}  # fmt: skip
BOTTLENECKS = {"class": "ResNet", "block_classes": ["Bottleneck"]}


def with_model(inp, facts: Mapping[str, Any], **more):
    """The input with more facts on its model."""
    return dataclasses.replace(inp, model={**inp.model, **facts}, **more)


def tool(name: str):
    """A module of tests/tools."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / f"tests/tools/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(engine, inp) -> dict[str, str]:
    return engine.files(inp, f"../../../{inp.script}")


def python_problems(texts: Mapping[str, str], folder: Path) -> str:
    """What ruff says of the Python files; nothing where they are clean."""
    for name, text in texts.items():
        if name.endswith(".py"):
            (folder / name).write_text(text)
    settings = ["--config", str(REPOSITORY / "pyproject.toml")]
    check = ["check", *settings, "--ignore", "D,S,T20", "."]
    told = [subprocess.run([sys.executable, "-m", "ruff", *command], cwd=folder, capture_output=True, text=True, check=False)
            for command in (check, ["format", "--diff", *settings, "."])]  # fmt: skip
    return "".join(done.stdout + done.stderr for done in told if done.returncode)


def mistakes(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each key misspelt, with a wrong value and with a wrong type, by a name that tells which."""
    for key, value in values.items():
        where = ".".join((*path, key))
        if isinstance(value, dict):
            for name, changed in mistakes(value, (*path, key)):
                yield name, {**values, key: changed}
        renamed = {(k + "x" if k == key else k): v for k, v in values.items()}
        yield f"{where} misspelt", renamed
        yield f"{where} of another type", {**copy.deepcopy(dict(values)), key: ["no", "such"]}
        if not isinstance(value, dict):
            yield f"{where} of another value", {**values, key: another(value)}


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 3
    return f"{value}_not"
