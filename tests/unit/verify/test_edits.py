"""A user's changes of a plan's file are carried over to the file of the shrunk plan."""

from __future__ import annotations

from advisor.verify.edits import carried_over

WRITTEN = "import torch\nWORLD_SIZE = 64\n\n\ndef step(loss):\n    loss.backward()\n    optimizer.step()\n"
SHRUNK = "import torch\nWORLD_SIZE = 2\n\n\ndef step(loss):\n    loss.backward()\n    optimizer.step()\n"


def test_what_is_unchanged_stays() -> None:
    assert carried_over(WRITTEN, WRITTEN, SHRUNK) == SHRUNK


def test_changed_added_and_removed_lines_are_carried_over() -> None:
    edited = WRITTEN.replace("loss.backward()", "(loss * 2).backward()") + "print('done')\n"
    assert carried_over(WRITTEN, edited, SHRUNK) == SHRUNK.replace("loss.backward()", "(loss * 2).backward()") + "print('done')\n"
    assert carried_over(WRITTEN, WRITTEN.replace("    optimizer.step()\n", ""), SHRUNK) == SHRUNK.replace("    optimizer.step()\n", "")


def test_a_change_of_what_the_size_decides_can_t_be() -> None:
    assert carried_over(WRITTEN, WRITTEN.replace("64", "32"), SHRUNK) is None
