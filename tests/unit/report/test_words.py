import io
import sys

import pytest

from advisor.words import counted, make_streams_readable


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(1, "GPU", "1 GPU"), (0, "row", "0 rows"), (2, "batch", "2 batches"), (1024, "process", "1,024 processes"), (3, "class", "3 classes"),
     (2, "copy", "2 copies"), (2, "day", "2 days"), (1, "more rule", "1 more rule"), (5, "more rule", "5 more rules")],
)  # fmt: skip
def test_a_noun_agrees_with_its_number(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text


@pytest.mark.parametrize(
    ("encoding", "text"), [("ascii", "2 x 3 - 4 -> ? [b]"), ("latin-1", "2 × 3 · 4 -> ? [b]"), ("utf-8", "2 × 3 · 4 → 猫 [b]")]
)
def test_signs_an_encoding_lacks_become_ascii(encoding: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    make_streams_readable()
    print("2 × 3 · 4 → 猫 [b]", end="", flush=True)
    assert raw.getvalue().decode(encoding) == text
