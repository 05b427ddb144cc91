"""What a model's repeated blocks are made of, for engines that build the model anew or name its layers by class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from advisor.workload.records import Parameter, Tree


def architecture(tree: Tree, block_paths: Sequence[str]) -> dict[str, Any]:
    """Classes of the blocks; and, where all blocks are alike, names, shapes and classes inside one and of what lies outside.

    Returns:
        `block_classes`; `block_parameters` (shapes by name relative to the block), `block_modules` (classes of the modules that own them),
        `outer_parameters` and `outer_modules` (the same outside the blocks), empty where blocks differ or there are none; and
        `causal_attention`, None where no fused attention was seen.
    """
    inside = [_relative(tree.params_below[path], path) for path in block_paths]
    alike = bool(inside) and all(one == inside[0] for one in inside)
    outside = [p for p in tree.params_below[""] if not any(p.name.startswith(f"{path}.") for path in block_paths)] if alike else []
    first = block_paths[0] if alike else ""
    attention = [op.causal for op in tree.ops if op.phase == "forward" and op.op_class == "attention"]
    return {
        "block_classes": list(dict.fromkeys(tree.modules[path].class_name for path in block_paths)),
        "block_parameters": inside[0] if alike else {},
        "block_modules": {p.module.removeprefix(f"{first}."): tree.modules[p.module].class_name for p in tree.params_below[first]} if alike else {},
        "outer_parameters": {p.name: list(p.shape) for p in outside},
        "causal_attention": all(attention) if attention else None,
        "outer_modules": {p.module: tree.modules[p.module].class_name for p in outside if p.module in tree.modules},
    }  # fmt: skip


def _relative(parameters: Iterable[Parameter], path: str) -> dict[str, list[int]]:
    return {p.name.removeprefix(f"{path}."): list(p.shape) for p in parameters}
