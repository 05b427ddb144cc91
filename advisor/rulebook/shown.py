"""Facts as people read them: each unit written in one way, three significant digits."""

from __future__ import annotations

import string
from collections.abc import Mapping

from advisor.words import plural

_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def fill(sentence: str, facts: Mapping[str, float | str | bool]) -> str:
    """A sentence with its `{facts}` replaced by what they are; `{fact:noun}` adds the noun in the right form, "1 GPU", "8 GPUs".

    Raises:
        KeyError: a fact is missing; rules are only filled in when all are known.
    """
    from advisor.rulebook.facts import FACTS

    parts = []
    for text, name, noun, _ in string.Formatter().parse(sentence):
        parts.append(text)
        if name:
            value = shown(facts[name], FACTS[name].unit)
            parts.append(f"{value} {noun if value == '1' else plural(noun)}" if noun else value)
    return "".join(parts)


def shown(value: float | str | bool, unit: str) -> str:
    """A value in its unit, e.g. 0.63 "share" -> "63%", 6.4e10 "bytes" -> "59.6 GiB"."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if unit == "share":
        return f"{100 * value:.1f}%" if 0 < abs(value) < 0.1 else f"{100 * value:.0f}%"
    if unit == "bytes":
        return _sized(value)
    if unit == "bytes/s":
        return f"{_digits(value / 1e9)} GB/s"
    if unit == "s":
        return _duration(value)
    if unit == "params":
        return next((f"{_digits(value / size)} {name}" for size, name in _COUNTS if abs(value) >= size), f"{value:.0f}")
    if unit == "count":
        return f"{value:,.0f}"
    return _digits(value)


def _sized(value: float) -> str:
    return next((f"{_digits(value / size)} {name}" for size, name in _SIZES if abs(value) >= size), f"{value:.0f} B")


def _duration(value: float) -> str:
    if abs(value) >= 1 or value == 0:
        return f"{_digits(value)} s"
    return f"{_digits(value * 1e3)} ms" if abs(value) >= 1e-3 else f"{_digits(value * 1e6)} µs"


def _digits(value: float) -> str:
    """Three significant digits, never in exponent form."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
