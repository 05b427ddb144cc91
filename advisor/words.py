"""Small words for sentences that are put together from figures, and how they are written where the encoding lacks a sign."""

from __future__ import annotations

import codecs
import io
import sys

#: Signs that the reports like, in ASCII.
ASCII_SIGNS = {
    "×": "x", "·": "-", "→": "->", "✗": "x", "─": "-", "±": "+-", "µ": "u", "–": "-", "’": "'", "…": "...", "≥": ">=", "≤": "<=",
    "\u00a0": " ",
}  # fmt: skip
_HISSING = ("s", "x", "z", "ch", "sh")


def counted(number: float, noun: str) -> str:
    """A whole number with its noun in the right form: "1 GPU", "8 GPUs", "2 batches", "1,024 processes"."""
    return f"{number:,.0f} {noun if round(number) == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """The plural of a regular English noun; of several words the last one changes."""
    if noun.endswith(_HISSING):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def make_streams_readable() -> None:
    """Let standard output and error write ASCII for signs that their encoding lacks, where Python would raise an error."""
    codecs.register_error("advisor.readable", _readable)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="advisor.readable")


def _readable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(ASCII_SIGNS.get(sign, "?") for sign in error.object[error.start : error.end]), error.end
