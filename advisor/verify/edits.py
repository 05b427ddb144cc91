"""Carries what the user changed in a plan's files over to those of the shrunk plan: a three-way merge by lines."""

from __future__ import annotations

from difflib import SequenceMatcher


def carried_over(written: str, edited: str, shrunk: str) -> str | None:
    """The text of the shrunk plan with the user's changes.

    Args:
        written: as the advisor writes it for the plan.
        edited: as it lies in the plan's folder.
        shrunk: as the advisor writes it for the shrunk plan.

    Returns:
        None where a change touches lines in which the two plans differ.
    """
    base, mine, theirs = (text.splitlines(keepends=True) for text in (written, edited, shrunk))
    merged: list[str] = []
    taken = 0  # lines of the shrunk text that are in
    for tag, first, last, begin, end in SequenceMatcher(None, base, mine, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        place = _place(base, theirs, first, last)
        if place is None or place[0] < taken:
            return None
        merged += theirs[taken : place[0]] + mine[begin:end]
        taken = place[1]
    return "".join(merged + theirs[taken:])


def _place(base: list[str], theirs: list[str], first: int, last: int) -> tuple[int, int] | None:
    """Where lines `first` to `last` of the base stand in the other text; None where they aren't there unchanged."""
    for begin, other, size in SequenceMatcher(None, base, theirs, autojunk=False).get_matching_blocks():
        if begin <= first and last <= begin + size and (first < last or size):
            return other + first - begin, other + last - begin
    return None
