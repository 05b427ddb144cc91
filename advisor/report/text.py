"""The pieces that a report's blocks are made of, and how a number tells where it comes from.

`blocks` composes them, `terminal` and `html` draw them. A number carries its provenance by a sign as well as by a style, since
colours are lost in pipes, on paper and on some eyes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from advisor.report.format import MISSING

#: Where a number may come from: the sign before and behind it, and what the legend says.
PROVENANCES: Mapping[str, tuple[str, str, str]] = {
    "measured": ("", "*", "measured"),
    "traced": ("", "", "traced, given or data sheet"),
    "modelled": ("~", "", "modelled"),
    "assumed": ("", "?", "assumed"),
}
#: A space that no line is broken at.
TIE = "\u00a0"
#: Other words for them, as the stages use them.
_SYNONYMS = {"catalogue": "traced", "given": "traced", "imported": "measured", "fitted": "modelled"}


@dataclass(frozen=True, slots=True)
class Number:
    """A number ready to show, with its unit unless the column says it."""

    text: str
    source: str = "modelled"  # a key of PROVENANCES

    @property
    def marked(self) -> str:
        """The text with the sign of its provenance; a bound such as "<0.1%" takes none before it."""
        before, behind, _ = PROVENANCES[self.source]
        return self.text if self.text == MISSING else f"{'' if self.text.startswith('<') else before}{self.text}{behind}"


Piece = str | Number
Line = tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table."""

    title: str
    numeric: bool = False  # aligned to the right
    stretches: bool = False  # takes the width that is left, wraps
    explains: str = ""  # tooltip of the heading in HTML


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Line, ...], ...]
    caption: str = ""
    has_total: bool = False  # the last row is the sum of the others
    num_more: int = 0  # rows left out here; they are in the files


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A line to paste."""

    text: str
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block of the report. The terminal shows lines, commands and table; HTML the details as well."""

    key: str
    title: str
    how_to_read: str
    headline: str = ""
    lines: tuple[Line, ...] = ()
    commands: tuple[Command, ...] = ()
    table: Table | None = None
    details: tuple[Table, ...] = ()


def provenance(source: object, otherwise: str = "traced") -> str:
    """The provenance that a stage's own word for it means."""
    word = _SYNONYMS.get(str(source), str(source))
    return word if word in PROVENANCES else otherwise


def joined(lines: Sequence[Line], separator: str = " · ") -> Line:
    """Several short lines as one, separated; empty ones are left out."""
    pieces: list[Piece] = []
    for line in lines:
        if line:
            pieces += [separator, *line] if pieces else [*line]
    return tuple(pieces)


def plain_text(line: Line) -> str:
    """A line as text with its signs."""
    return "".join(piece if isinstance(piece, str) else piece.marked for piece in line)


def legend() -> Line:
    """What the signs mean, said in numbers of each kind."""
    examples: list[Line] = [(Number("1.23", source), f"{TIE}{meaning}") for source, (_, _, meaning) in PROVENANCES.items()]
    return ("numbers: ", *joined(examples))


def pasteable(command: str, width: int) -> list[str]:
    """A command in rows of at most `width` columns where its words allow it, joined by backslashes so that it still pastes."""
    rows: list[str] = []
    row = ""
    for word in re.findall(r"(?:[^\s\"']|\"[^\"]*\"|'[^']*'|[\"'])+", command):
        if row and len(row) + 1 + len(word) + 2 > width:
            rows.append(f"{row} \\")
            row = f"    {word}"
        else:
            row = f"{row} {word}" if row else word
    return [*rows, row] if row else rows
