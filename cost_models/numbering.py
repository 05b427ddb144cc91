"""Numbering of equal rows and joining of ranges, with arrays only."""

from __future__ import annotations

import numpy as np

from cost_models.types import IntArray

_TABLE_LIMIT = 1 << 22  # largest lookup table; beyond it rows are sorted


def distinct(*columns: IntArray) -> tuple[IntArray, IntArray]:
    """Distinct rows of integer columns, without sorting where the values are small.

    Returns:
        Index of one row for each distinct one, and for each row the number of its distinct one.
    """
    length = len(columns[0])
    code, size = np.zeros(length, dtype=np.int64), 1
    for column in columns:
        low, high = int(column.min()), int(column.max())
        if low == high:
            continue
        dense, span = _dense(column - low, high - low + 1)
        code, size = _dense(code * span + dense, size * span)
    first = np.empty(size, dtype=np.int64)
    first[code] = np.arange(length)
    return first, code


def _dense(code: IntArray, size: int) -> tuple[IntArray, int]:
    """Renumber codes below `size` to 0, 1, 2 ... without gaps."""
    if size <= 8:
        present = np.bincount(code, minlength=size) > 0
    elif size <= _TABLE_LIMIT:
        present = np.zeros(size, dtype=bool)
        present[code] = True
    else:
        values, inverse = np.unique(code, return_inverse=True)
        return inverse, len(values)
    count = int(present.sum())
    if count == size:
        return code, size
    return (np.cumsum(present) - 1)[code], count


def ragged(starts: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Concatenated ranges start, start + 1, ... of given lengths, and the number of the range each element is from."""
    owner = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - (ends - counts)[owner] + starts[owner], owner
