"""Numbering of equal rows and joining of ranges, with arrays only."""

from __future__ import annotations

import numpy as np

from cost_models.types import IntArray

_TABLE_LIMIT = 1 << 22  # largest lookup table; beyond it codes are sorted
_SPARSE = 100  # a table with so many entries per row is slower than sorting the rows
_FEW = 8  # gaps in a range this small are not worth closing


def distinct(*columns: IntArray) -> tuple[IntArray, IntArray]:
    """Distinct rows of integer columns in order of appearance, without sorting where the columns have few values.

    Returns:
        Index of the first of each distinct row, and for each row the number of its distinct one.
    """
    length = len(columns[0])
    code, size = np.zeros(length, dtype=np.int64), 1
    for column in columns if length else ():
        low, high = int(column.min()), int(column.max())
        if low == high:
            continue
        values, span = column - low, high - low + 1
        if span > _FEW:
            values, span = _dense(values, span)
        if size * span > _TABLE_LIMIT:
            code, size = _dense(code, size)
        code, size = code * span + values, size * span
    code, size = _dense(code, size)
    first = np.empty(size if length else 0, dtype=np.int64)
    first[code[::-1]] = np.arange(length - 1, -1, -1)
    is_first = np.zeros(length, dtype=bool)
    is_first[first] = True
    number = np.cumsum(is_first) - 1
    return np.flatnonzero(is_first), number.take(first).take(code)


def _dense(code: IntArray, size: int) -> tuple[IntArray, int]:
    """Renumber codes below `size` to 0, 1, 2 ... without gaps."""
    if size > min(_TABLE_LIMIT, _SPARSE * len(code)):
        values, inverse = np.unique(code, return_inverse=True)
        return inverse, len(values)
    present = np.zeros(size, dtype=bool)
    present[code] = True
    values = np.flatnonzero(present)
    if len(values) == size:
        return code, size
    number = np.empty(size, dtype=np.int64)
    number[values] = np.arange(len(values))
    return number.take(code), len(values)


def ragged(starts: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Concatenated ranges start, start + 1, ... of given lengths, and the number of the range each element is from."""
    owner = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - (ends - counts)[owner] + starts[owner], owner
