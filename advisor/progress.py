"""What a command is doing, on standard error: a spinner on a terminal; a pipe gets a line for each stage, or nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[str], None]


def quiet(_: str) -> None:
    """The progress of a program that shows none."""


@contextlib.contextmanager
def shown(*, lines: bool = False) -> Iterator[Progress]:
    """Show what is being done for as long as the context lasts.

    Args:
        lines: whether a stderr that is no terminal gets a line each time; otherwise nothing.
    """
    if sys.stderr is None or not sys.stderr.isatty():  # None: it was closed
        yield (lambda text: print(f"advise: {text}", file=sys.stderr, flush=True)) if lines and sys.stderr else quiet
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(Text(text))  # names of scripts and models are no markup
