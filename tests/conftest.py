"""One option for all golden files, and the order of the tests.

`pytest --update-golden` rewrites golden files, then fails nothing; look at the diff before committing.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files under tests/golden from what the code gives now")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes first: they take longest, and short ones fill up what is left of both workers' time."""
    folder = Path(__file__).parent / "engines"
    items.sort(key=lambda item: item.path.parent != folder)


@pytest.fixture
def check_golden(request: pytest.FixtureRequest):
    """Compare a text with a file below tests/golden, or rewrite the file under --update-golden."""

    def check(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf8")
        assert path.is_file(), f"{name} is no golden file yet; run pytest --update-golden"
        assert text == path.read_text(encoding="utf8"), f"{name} changed; if that is meant, run pytest --update-golden"

    return check
