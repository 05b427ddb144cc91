"""A profile taken once by each worker for its end-to-end tests: the children that run user code dominate their time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import advisor
from advisor import cli
from advisor.profiling.schema import StepProfile, save_profile

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL_GPT2 = ("--layers", "3", "--width", "64", "--heads", "4", "--seq", "64", "--batch", "4", "--vocab", "512")


@pytest.fixture(scope="session")
def small_gpt2() -> StepProfile:
    return advisor.profile(EXAMPLES / "gpt2.py", args=SMALL_GPT2, capture="traced")


@pytest.fixture(scope="session")
def small_gpt2_folder(small_gpt2, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    save_profile(small_gpt2, folder)
    return folder


@pytest.fixture
def advise(monkeypatch, capsys):
    """Run `advise` in this process; gives exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["advise", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as done:
            code = int(done.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run
