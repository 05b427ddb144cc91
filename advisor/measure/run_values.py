"""Typed access to one row of a table of runs; every default taken is remembered."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d*)?")
_WORDS = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}


class Skip(Exception):  # noqa: N818 - not an error: the reason why a row is left out
    """A row that can't be priced, with the reason."""


@dataclass(slots=True)
class Fields:
    """Typed access to a row; remembers which fields were assumed."""

    record: Record
    assumed: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)

    def text(self, name: str) -> str:
        value = self.record.get(name)
        return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value).strip()

    def number(self, name: str) -> float | None:
        """A finite number, 0 or more; None where the cell is blank, or holds something else, which is then named among what was assumed."""
        text = self.text(name)
        try:
            value = _WORDS[text.lower()] if text.lower() in _WORDS else float(without_thousands(text))
        except ValueError:
            value = math.nan
        if math.isfinite(value) and value >= 0:
            return value
        if text and name not in self.unread:
            self.unread.add(name)
            self.assumed.append(f'{name} ("{text}" is no size)')
        return None

    def or_default(self, name: str, default: float) -> float:
        value = self.number(name)
        if value is None:
            self.assumed.append(name)
            return default
        return value


def without_thousands(text: str) -> str:
    """A number without the commas that part its thousands: "1,024" is "1024"; any other comma stays."""
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)
