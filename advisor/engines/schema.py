"""Strict checks of configurations against recorded tables: names, types and choices that a library takes, taken from it once.

The libraries themselves need not be installed, and several of them ignore what they don't know.
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

#: JSON types by their names in the tables.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "dict": (dict,), "list": (list, tuple), "none": (type(None),),
    "any": (object,), "flag": (),
}  # fmt: skip


@functools.cache
def table(name: str) -> Mapping[str, Any]:
    """A recorded table of `advisor/engines/tables`, by its name."""
    found: dict[str, Any] = json.loads((files("advisor.engines") / "tables" / f"{name}.json").read_text(encoding="utf8"))
    return found


def unknown(name: str, known: Iterable[str]) -> str:
    """A sentence part on a name that isn't known, with the nearest that is."""
    near = difflib.get_close_matches(name.rpartition(".")[2], list(known), n=1)
    return f"unknown key {name}" + (f" (did you mean {near[0]}?)" if near else "")


def check_section(values: Mapping[str, Any], allowed: Mapping[str, Mapping[str, Any]], path: str = "") -> list[str]:
    """Unknown keys, wrong types and values that are none of the choices.

    Args:
        values: a section of a configuration.
        allowed: by key {"types": [...], "choices": [...]}, the latter where they are few.
        path: of the section, with a dot at its end.
    """
    found = []
    for key, value in values.items():
        if key not in allowed:
            found.append(unknown(path + key, allowed))
            continue
        types, choices = allowed[key]["types"], allowed[key].get("choices")
        if not any(_is(value, name) for name in types):
            found.append(f"{path}{key} is {value!r}, which is no {' or '.join(types)}")
        elif choices and value is not None and value not in choices:
            found.append(f"{path}{key} is {value!r}, not one of {', '.join(map(str, choices))}")
    return found


def _is(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name in {"bool", "any", "flag"}
    return isinstance(value, _TYPES[name])


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any], path: str = "") -> list[str]:
    """Where a valid configuration isn't the plan's."""
    told = []
    for key in dict.fromkeys((*wanted, *found)):
        where, mine, plans = path + key, found.get(key, "missing"), wanted.get(key, "none")
        if isinstance(mine, Mapping) and isinstance(plans, Mapping):
            told += differences(mine, plans, f"{where}.")
        elif mine != plans or isinstance(mine, bool) != isinstance(plans, bool):
            told.append(f"{where} is {mine}, the plan needs {plans}")
    return told


def calls(text: str) -> dict[str, dict[str, Any]]:
    """Keyword arguments by called name of a Python text, and dicts by the name they are given; what is no literal as its text.

    Raises:
        SyntaxError: the text is no Python.
    """
    found: dict[str, dict[str, Any]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.keywords:
            found[node.func.id] = {k.arg: _literal(k.value) for k in node.keywords if k.arg}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            pairs = zip(node.value.keys, node.value.values, strict=True)
            found[ast.unparse(target)] = {str(_literal(key)): _literal(value) for key, value in pairs if key}
    return found


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
