"""Renumbering of plans."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.numbering import distinct, ragged

columns = st.integers(1, 40).flatmap(lambda n: st.lists(st.lists(st.integers(0, 10**6), min_size=n, max_size=n), min_size=1, max_size=4))


@settings(deadline=None)
@given(columns)
def test_distinct_numbers_equal_rows_alike(values):
    arrays = [np.array(v, dtype=np.int64) for v in values]
    first, code = distinct(*arrays)
    rows = list(zip(*values, strict=True))
    assert len(first) == len(set(rows)) == code.max() + 1
    for i, row in enumerate(rows):
        assert rows[first[code[i]]] == row
    assert first.tolist() == sorted({rows.index(row) for row in rows})


def test_no_rows_are_no_distinct_rows():
    first, code = distinct(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert len(first) == len(code) == 0


def test_ragged_joins_ranges():
    values, owner = ragged(np.array([5, 0, 2]), np.array([2, 0, 3]))
    assert values.tolist() == [5, 6, 2, 3, 4]
    assert owner.tolist() == [0, 0, 2, 2, 2]
