"""Typed access to one row of a table of runs; every default taken is remembered."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]


class Skip(Exception):  # noqa: N818 - not an error: the reason why a row is left out
    """A row that can't be priced, with the reason."""


@dataclass(slots=True)
class Fields:
    """Typed access to a row; remembers which fields were assumed."""

    record: Record
    assumed: list[str] = field(default_factory=list)

    def text(self, name: str) -> str:
        value = self.record.get(name)
        return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value).strip()

    def number(self, name: str) -> float | None:
        try:
            value = float(self.record.get(name, math.nan))
        except (TypeError, ValueError):
            return None
        return value if math.isfinite(value) and value >= 0 else None

    def or_default(self, name: str, default: float) -> float:
        value = self.number(name)
        if value is None:
            self.assumed.append(name)
            return default
        return value


def is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)
