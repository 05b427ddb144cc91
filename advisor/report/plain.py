"""Values that JSON can hold, as they are kept (frozen, hashable) and as they are written (dicts and lists)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Set
from pathlib import PurePath
from typing import Any, NoReturn


class FrozenDict(dict[str, Any]):
    """A dict that cannot change and can be hashed; equal to a dict of the same content."""

    __slots__ = ()

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise TypeError("a report is frozen; use dataclasses.replace")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        return FrozenDict, (dict(self),)

    def __deepcopy__(self, _memo: dict[int, Any]) -> FrozenDict:
        return self


def frozen(value: Any, name: str = "value") -> Any:
    """The value in frozen, JSON-safe form: FrozenDict, tuple, str, int, float, bool or None.

    NumPy scalars and arrays become Python's; numbers that are not finite become None, since JSON has no word for them.

    Raises:
        TypeError: something JSON cannot hold; the message names where it was.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, int):
        return int(value)
    if isinstance(value, PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return frozen({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, name)
    if isinstance(value, Mapping):
        return FrozenDict({str(key): frozen(item, f"{name}.{key}") for key, item in value.items()})
    if isinstance(value, Set):
        return tuple(sorted(frozen(item, name) for item in value))
    if hasattr(value, "tolist"):  # numpy scalars and arrays, pandas series
        return frozen(value.tolist(), name)
    if isinstance(value, (list, tuple)):
        return tuple(frozen(item, f"{name}[{i}]") for i, item in enumerate(value))
    raise TypeError(f"{name} is a {type(value).__name__}, which report.json cannot hold")


def thawed(value: Any) -> Any:
    """A frozen value as fresh dicts and lists, what `json.loads` would give back."""
    if isinstance(value, Mapping):
        return {key: thawed(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [thawed(item) for item in value]
    return value
