"""Every generated file, word by word; and that it is what a careful engineer would commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engine_plans import CASES, REPOSITORY

from advisor.engines import plan_files

FOLDER = Path("advice/plan-1")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)  # scripts are named as a user there would name them


@pytest.mark.parametrize("case", CASES)
def test_files_are_as_committed(case: str, check_golden) -> None:
    texts = plan_files(CASES[case], FOLDER)
    for name, text in texts.items():
        check_golden(f"engines/{case}/{name}", text)
    folder = REPOSITORY / "tests/golden/engines" / case
    committed = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert committed == set(texts)


@pytest.mark.parametrize("case", CASES)
def test_python_is_clean(case: str, tmp_path: Path) -> None:
    for name, text in plan_files(CASES[case], FOLDER).items():
        if name.endswith(".py"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
    settings = ["--config", str(REPOSITORY / "pyproject.toml")]
    # folders of a plan have these libraries' names
    settings += ["--config", 'lint.isort.known-third-party = ["accelerate", "colossalai", "lightning", "torchtitan", "transformers"]']
    settings += ["--config", 'src = [".", "lightning"]']
    # docstrings, prints and the shell of others' code apart, the repository's own rules
    check = [sys.executable, "-m", "ruff", "check", *settings, "--ignore", "D,S,T20", "."]
    shape = [sys.executable, "-m", "ruff", "format", "--diff", *settings, "."]
    for command in (check, shape):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
