"""Which checkpoints a train file deletes, and which never."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from engine_plans import CASES

from advisor.engines import plan_files


@pytest.fixture(scope="module")
def helpers(tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("helpers") / "train_helpers.py"
    file.write_text(plan_files(CASES["zero3-functions"], Path("advice/plan-1"))["train_helpers.py"])
    spec = importlib.util.spec_from_file_location("train_helpers", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("keep", "kept"), [(0, [1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4])])
def test_only_the_newest_that_were_written_here_are_kept(helpers, keep: int, kept: list[int], tmp_path: Path) -> None:
    for other in ("step-0", "best"):  # of somebody else, or left incomplete
        (tmp_path / other).mkdir()
    for step in range(1, 5):
        (tmp_path / f"step-{step}").mkdir()
        helpers.mark_newest(str(tmp_path), f"step-{step}", keep)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == sorted(["best", "step-0", *(f"step-{i}" for i in kept)])
    assert (tmp_path / "latest").read_text() == "step-4"


def test_a_checkpoint_that_is_written_again_is_the_newest(helpers, tmp_path: Path) -> None:
    for step in (1, 2, 1, 3):
        (tmp_path / f"step-{step}").mkdir(exist_ok=True)
        helpers.mark_newest(str(tmp_path), f"step-{step}", 2)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-1", "step-3"]
