"""What the engines' files have in common: names, batch arithmetic, blocks, imports and launch lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from advisor.engines.types import EngineInput
from cost_models.terms.volumes import MIN_UNIT_PARAMS
from cost_models.types import Plan

ABOUT_PARALLELIZE = "`parallelize(model)` for your own loop: short, PyTorch only, made to be read"
ABOUT_TRAIN = "runs your script's training as the plan says"


def block_patterns(model: Mapping[str, Any]) -> tuple[str, ...]:
    """Regular expressions for the module paths of the repeated layers: what varies between paths of one form becomes a number."""
    forms: dict[tuple[str, ...], list[list[str]]] = {}
    for path in model.get("block_paths") or []:
        parts = path.split(".")
        forms.setdefault(tuple("#" if p.isdigit() else p for p in parts), []).append(parts)
    return tuple(r"\.".join(_position(column) for column in zip(*paths, strict=True)) for paths in forms.values())


def _position(column: tuple[str, ...]) -> str:
    return re.escape(column[0]) if len(set(column)) == 1 else r"\d+"


def half_dtype(inp: EngineInput) -> str:
    """16-bit dtype of the products that parallelize.py must bring about ("" when the script does it by itself)."""
    name = {"bf16": "bfloat16", "fp16": "float16"}.get(inp.precision, "")
    return name if inp.meta.param_dtype == "fp32" else ""


#: Without repeated layers: about this many sharding units, none smaller than a million parameters (small gathers are all latency).
_NUM_UNITS = 16


def unit_params(num_params: int) -> int:
    """Parameters from which on a module is sharded by itself, in a model without repeated layers."""
    return max(MIN_UNIT_PARAMS, num_params // _NUM_UNITS)


def arithmetic(plan: Plan) -> str:
    """How the global batch comes about, in words."""
    text = f"{plan.dp_degree} x {plan.micro_batch}"
    if plan.num_microbatches > 1:
        text += f" x {plan.num_microbatches}"
    text += f" = {plan.global_batch} samples: data ranks x micro-batch"
    return text + (" x accumulation" if plan.num_microbatches > 1 else "")


def why_not_recompute(plan: Plan, model: Mapping[str, Any]) -> str:
    """Why the plan's recomputation can't be had; empty when it can."""
    return "" if plan.recompute == "none" or block_patterns(model) else "no repeated layers are known that could be recomputed"


def checkpointed(module: str, recompute: str) -> str:
    """Expression for a layer's forward that is run again in backward."""
    policy = ", context_fn=keep_every_second_product" if recompute == "selective" else ""
    return f"functools.partial(checkpoint, {module}.forward, use_reentrant=False{policy})"


#: Parts of names of weights that hold several products side by side.
_FUSED = ("qkv", "c_attn", "query_key_value", "in_proj", "gate_up")


def is_fused(name: str) -> bool:
    """Whether a weight's name says that it holds several products side by side: a contiguous cut would mix them."""
    return any(part in name for part in _FUSED)


def unused_parameters(model: Mapping[str, Any]) -> list[str]:
    """Trainable parameters that got no gradient in the profiled step."""
    return list(model.get("unused_parameters") or [])


def named(names: list[str], most: int = 2) -> str:
    """A few names and how many more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_python(name: str, text: str) -> list[str]:
    """Empty when the text compiles."""
    try:
        compile(text, name, "exec")
    except SyntaxError as error:
        return [f"{name} line {error.lineno}: {error.msg}"]
    return []


def check_constants(name: str, text: str, expected: Mapping[str, int]) -> list[str]:
    """Compare `NAME = number` and `A, B = 1, 2` lines at the top level with what the plan says."""
    found: dict[str, object] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            pairs = (
                zip(target.elts, value.elts, strict=False)
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                else [(target, value)]
            )
            found |= {t.id: v.value for t, v in pairs if isinstance(t, ast.Name) and isinstance(v, ast.Constant)}
    return [
        f"{name}: {key} is {found.get(key, 'missing')}, the plan says {value}" for key, value in expected.items() if found.get(key) != value
    ]


def check_literals(name: str, text: str, expected: Mapping[str, str]) -> list[str]:
    """Compare what names are assigned at the top level with expressions, however either is laid out."""
    assigned = {
        node.targets[0].id: node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return [
        f"{name}: {key} is not {value}"
        for key, value in expected.items()
        if key not in assigned or ast.dump(assigned[key]) != ast.dump(ast.parse(value, mode="eval").body)
    ]
