"""Whether a generated file calls PyTorch with the arguments that the plan needs: none misspelt, missing, wrong or too many."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping

#: An argument that must be given, whatever its value.
ANY = ""
_POSITIONAL = "argument "


def problems(name: str, text: str, wanted: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What is wrong with a file's calls.

    Args:
        name: of the file, for the messages.
        text: its content, which must parse.
        wanted: by called name the keyword arguments with their expressions as `ast.unparse` writes them, or ANY; "argument 2" is the
            second positional one, and those that aren't wanted may be given.
    """
    found = list(_calls(ast.parse(text)))
    messages = [f"{name} doesn't call {called}" for called in wanted if called not in {other for other, _ in found}]
    for called, given in found:
        if called in wanted:
            messages += [f"{name}: {called} {complaint}" for complaint in _compare(given, wanted[called])]
    return messages


def _calls(tree: ast.AST) -> Iterator[tuple[str, dict[str, str]]]:
    """Called names with their arguments; `functools.partial(f, ...)` is a call of f."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function: ast.AST = node.func
            if ast.unparse(function) == "functools.partial" and node.args:
                function = node.args[0]
            positional = {f"{_POSITIONAL}{i}": ast.unparse(value) for i, value in enumerate(node.args, start=1)}
            yield ast.unparse(function), positional | {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg}


def _compare(given: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    for key, value in given.items():
        if key not in wanted and not key.startswith(_POSITIONAL):
            near = difflib.get_close_matches(key, list(wanted), n=1)
            yield f"is given {key}" + (f", did you mean {near[0]}?" if near else ", which the plan doesn't need")
        elif wanted.get(key, ANY) not in {ANY, value}:
            yield f"has {key}={value}, the plan needs {wanted[key]}"
    for key in wanted:
        if key not in given:
            yield f"lacks {key}"
