"""The report in a terminal: 100 columns, readable in narrow ones, plain text in pipes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from advisor.report.blocks import MOST_ROWS, blocks, footer
from advisor.report.heading import header
from advisor.report.report import Report
from advisor.report.text import TIE, Block, Column, Command, Line, Table, joined, legend, pasteable, plain_text
from advisor.words import ASCII_SIGNS

#: Nothing is set wider than this, however wide the terminal: long lines are hard to read.
MAX_WIDTH = 100
#: Below this a table becomes a list.
_NARROW_WIDTH = 80
_TITLE_WIDTH = 27
_INDENT = 3
_STYLES = {"measured": "bold green", "traced": "", "modelled": "cyan", "assumed": "yellow"}
#: For encodings that lack the signs the report likes; before lines are broken, since some get longer.
_ASCII = str.maketrans(ASCII_SIGNS)
#: Stands for TIE while rich breaks lines, since it breaks at every kind of space.
_UNBROKEN = "\ue000"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def report_console(file: TextIO | None = None) -> Console:
    """A console for the report: a terminal's own width and colours, 100 plain columns in a pipe unless COLUMNS says otherwise.

    Args:
        file: where to print; standard output by default.
    """
    console = Console(file=file)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = MAX_WIDTH
    return console


def render_terminal(report: Report, console: Console) -> None:
    """Print the report.

    Args:
        report: what to print.
        console: decides width, colours and encoding; a pipe gets plain text.
    """
    page = _Page(console)
    for line in (*header(report), legend()):
        page.paragraph(line, indent=1, style="dim" if line == legend() else "")
    for block in blocks(report, MOST_ROWS):
        page.block(block)
    page.blank()
    for line in footer(report):
        page.paragraph(line, indent=1)


def print_blocks(shown: Sequence[Block], console: Console) -> None:
    """Print blocks alone, as the report has them."""
    page = _Page(console)
    for block in shown:
        page.block(block)


class _Page:
    """Sets pieces on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._width = min(console.width, MAX_WIDTH)
        self._ascii = not console.encoding.lower().startswith("utf")

    def blank(self) -> None:
        self._console.print()

    def paragraph(self, line: Line, indent: int, style: str = "") -> None:
        """Print a line, wrapped; what follows the first row hangs two columns in."""
        text = self._text(line, style)
        text.plain = text.plain.replace(TIE, _UNBROKEN)
        for i, row in enumerate(text.wrap(self._console, max(self._width - indent - 2, 10))):
            row.rstrip()
            row.plain = row.plain.replace(_UNBROKEN, " ")
            self._print(Text(" " * (indent + (2 if i else 0))) + row)

    def block(self, block: Block) -> None:
        self.blank()
        self._title(block)
        if block.headline:
            self.paragraph((block.headline,), _INDENT, "bold")
        for line in block.lines:
            self.paragraph(line, _INDENT)
        for command in block.commands:
            self._command(command)
        if block.table:
            self._table(block.table)

    def _title(self, block: Block) -> None:
        title = f" {block.title.ljust(_TITLE_WIDTH)} "
        hint = f"── {block.how_to_read}"
        if len(title) + len(hint) <= self._width:
            self._print(Text.assemble((title, "bold"), (self._safe(hint), "dim")))
        else:
            self._print(Text(title.rstrip(), "bold"))
            self.paragraph((hint,), 1, "dim")

    def _command(self, command: Command) -> None:
        """Print a line to paste; broken with backslashes, so that it still pastes."""
        label = f"{command.label}: " if command.label else ""
        if label and _INDENT + len(label) + len(command.text) > self._width:
            self.paragraph((label,), _INDENT)
            label = ""
        for i, row in enumerate(pasteable(self._safe(command.text), self._width - _INDENT - len(label))):
            self._print(Text.assemble(" " * _INDENT, "" if i else label, (row, "bold")))

    def _table(self, table: Table) -> None:
        if self._width < _NARROW_WIDTH:
            self._list(table)
        else:
            self._grid(table)
        if table.num_more:
            self.paragraph((f"{table.num_more} more in report.html and report.json",), _INDENT, "dim")

    def _grid(self, table: Table) -> None:
        grid = Grid(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for i, column in enumerate(table.columns):
            grid.add_column(self._safe(column.title), justify="right" if column.numeric else "left", no_wrap=not column.stretches,
                            ratio=_ratio(column, last=i == len(table.columns) - 1), overflow="fold")  # fmt: skip
        for row in table.rows:
            grid.add_row(*(self._cell(cell) for cell in row))
        self._console.print(Padding(grid, (0, 0, 0, _INDENT)), width=self._width)

    def _cell(self, line: Line) -> Text:
        text = self._text(line)
        text.plain = text.plain.replace(TIE, " ")
        return text

    def _list(self, table: Table) -> None:
        """Each row as a paragraph: its name (two cells, if the second is no figure), then the figures with their titles, then the text."""
        columns = table.columns
        num_names, num_texts = 1 if columns[1].numeric else 2, 0 if columns[-1].numeric else 1
        inner = slice(num_names, len(columns) - num_texts)
        for row in table.rows:
            self.paragraph((plain_text(row[0]), *(("  ", *row[1]) if num_names > 1 else ())), _INDENT, "bold")
            figures = [(f"{c.title} ", *cell) for c, cell in zip(columns[inner], row[inner], strict=True) if plain_text(cell) != "-"]
            for figure in (joined(figures), *(row[-1:] if num_texts else ())):
                if figure:
                    self.paragraph(figure, _INDENT + 3)

    def _print(self, text: Text) -> None:
        self._console.print(text, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)

    def _text(self, line: Line, style: str = "") -> Text:
        text = Text(style=style)
        for piece in line:
            if isinstance(piece, str):
                text.append(self._safe(piece))
            else:
                text.append(self._safe(piece.marked.replace(" ", TIE)), _STYLES[piece.source])
        return text

    def _safe(self, words: str) -> str:
        """Words, some from the user's code, without control characters and within the encoding."""
        words = _CONTROL.sub("", words).encode("utf8", "backslashreplace").decode("utf8")
        if not self._ascii:
            return words
        return words.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def _ratio(column: Column, *, last: bool) -> int | None:
    return (3 if last else 2) if column.stretches else None
