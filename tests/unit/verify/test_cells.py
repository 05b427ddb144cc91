"""User code may crash, hang, exit, print and start processes: its cell says so, the next one runs, and nothing is left."""

from __future__ import annotations

import pytest

from advisor.verify.cells import run_cells

HANGS = "import time; print('waiting', flush=True); time.sleep(600)"
SCRIPTS = {
    "exits": "import os; print('last words', flush=True); os._exit(3)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "raises on one rank": f"import os\nif os.environ['RANK'] == '0':\n    raise ValueError('no')\n{HANGS}",
    "says why it stops": "raise SystemExit('this plan is for 64 processes')",
    "hangs": HANGS,
    "starts a process": "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)",
    "does well": "print('done')",
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("cells")
    cells = []
    for i, (name, text) in enumerate(SCRIPTS.items()):
        file = folder / f"script_{i}.py"
        file.write_text(text)
        cells.append({"name": name, "file": str(file), "args": [], "form": "functions", "script": str(file), "entry": "", "removed_blocks": [],
                      "num_steps": 1, "reference": "", "limit_s": 5.0 if name == "hangs" else 60.0})  # fmt: skip
    return {"folder": [{"path": folder}], **run_cells(cells, folder, num_processes=2)}


@pytest.mark.parametrize(("name", "code"), [("exits", 3), ("crashes", -11), ("does well", 0), ("starts a process", 0)])
def test_the_status_is_known(name: str, code: int, records: dict[str, list[dict]]) -> None:
    assert {rank["code"] for rank in records[name]} <= {code, -9}
    assert code in {rank["code"] for rank in records[name]}


def test_what_was_printed_is_kept(records: dict[str, list[dict]]) -> None:
    assert any("last words" in rank["output"] for rank in records["exits"])
    assert any("this plan is for 64 processes" in rank["output"] for rank in records["says why it stops"])


def test_a_rank_waits_only_shortly_for_one_that_failed(records: dict[str, list[dict]]) -> None:
    failed, waiting = records["raises on one rank"]
    assert "ValueError: no" in failed["output"]
    assert waiting["reason"] == "ended because another rank failed"


def test_a_hanging_run_is_ended_and_shows_where_it_hung(records: dict[str, list[dict]]) -> None:
    assert all(rank["code"] != 0 for rank in records["hangs"])
    assert "did not end within 5 s" in {rank["reason"] for rank in records["hangs"]}
    assert any("time.sleep" in rank["output"] or "script_4.py" in rank["output"] for rank in records["hangs"])


def test_no_process_is_left(records: dict[str, list[dict]]) -> None:
    from advisor.profiling import processes

    assert not processes.marked(str(records["folder"][0]["path"]))
