"""Command-line flags in generated shell scripts: how they are written, and how they are read back for checking."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any


def flag_lines(values: Mapping[str, Any], *, negated: bool = False) -> list[str]:
    """`--name value` per entry; a true one is `--name` alone, a false one left out, or `--section.no_name` where `negated`."""
    lines = []
    for name, value in values.items():
        if not isinstance(value, bool):
            lines.append(f"--{name} {value}")
        elif value:
            lines.append(f"--{name}")
        elif negated:
            section, _, last = name.rpartition(".")
            lines.append(f"--{section}.no_{last}")
    return lines


def read_flags(text: str, *, after: str) -> dict[str, Any]:
    """Flags by name of a shell command, from the word `after` on, or of a list; numbers as numbers, a flag without a value as true."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    words = words[words.index(after) + 1 :] if after in words else []
    words = words[: words.index(")")] if ")" in words else words  # the end of a list
    found: dict[str, Any] = {}
    for i, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, following = word.removeprefix("--"), words[i + 1] if i + 1 < len(words) else ""
        if following and not following.startswith(("--", "$")):
            found[name] = _value(following)
        elif ".no_" in name:
            found[name.replace(".no_", ".")] = False
        else:
            found[name] = True
    return found


def _value(word: str) -> int | float | str:
    try:
        return int(word)
    except ValueError:
        pass
    try:
        return float(word)
    except ValueError:
        return word
