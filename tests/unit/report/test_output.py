import errno
import json
import os
from pathlib import Path

import pytest

from advisor.errors import OutputError, ScriptError
from advisor.report import output
from advisor.report.output import MARKER, check_output, write_advice
from advisor.report.report import Report


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def plans(*files: str):
    def write(stage: Path) -> list[str]:
        for name in files:
            path = stage / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        return list(files)

    return write


def failing(error: BaseException):
    def write(stage: Path) -> list[str]:
        plans("plan-1/train.py")(stage)
        raise error

    return write


def test_report_files_are_written_and_listed(sample: Report, tmp_path: Path) -> None:
    written = write_advice(sample, tmp_path / "advice", plans("plan-1/train.py", "plan-1/README.md"))
    assert written.files == ("report.html", "report.json", "plan-1/train.py", "plan-1/README.md")
    assert set(tree(tmp_path / "advice")) == {*written.files, MARKER}
    data = json.loads((tmp_path / "advice" / "report.json").read_text(encoding="utf8"))
    assert Report.from_json(data) == written
    assert data["files"] == list(written.files)
    assert names(tmp_path) == ["advice"]


def test_an_earlier_advice_is_replaced_as_a_whole(sample: Report, tmp_path: Path) -> None:
    folder = tmp_path / "advice"
    write_advice(sample, folder, plans("plan-1/a.py", "plan-2/b.py"))
    (folder / "plan-1" / "__pycache__").mkdir()
    (folder / "plan-1" / "__pycache__" / "a.pyc").write_text("left by a run")
    write_advice(sample, folder, plans("plan-1/c.py"))
    assert set(tree(folder)) == {"report.html", "report.json", "plan-1/c.py", MARKER}
    assert names(tmp_path) == ["advice"]


def test_parents_are_made_and_an_empty_folder_is_used(sample: Report, tmp_path: Path) -> None:
    write_advice(sample, tmp_path / "a" / "b" / "advice")
    assert (tmp_path / "a" / "b" / "advice" / "report.json").is_file()
    (tmp_path / "empty").mkdir()
    write_advice(sample, tmp_path / "empty")
    assert (tmp_path / "empty" / "report.json").is_file()


def _their_folder(tmp: Path) -> Path:
    (tmp / "out").mkdir()
    (tmp / "out" / "thesis.tex").write_text("years of work")
    return tmp / "out"


def _folder_of_folders(tmp: Path) -> Path:
    (tmp / "out" / "empty").mkdir(parents=True)
    return tmp / "out"


def _file(tmp: Path) -> Path:
    (tmp / "out").write_text("a file")
    return tmp / "out"


def _link(tmp: Path) -> Path:
    (tmp / "elsewhere").mkdir()
    (tmp / "out").symlink_to(tmp / "elsewhere")
    return tmp / "out"


def _dangling_link(tmp: Path) -> Path:
    (tmp / "out").symlink_to(tmp / "nowhere")
    return tmp / "out"


def _below_a_file(tmp: Path) -> Path:
    return _file(tmp) / "advice"


@pytest.mark.parametrize("make", [_their_folder, _folder_of_folders, _file, _link, _dangling_link, _below_a_file])
def test_what_is_not_ours_is_not_touched(sample: Report, tmp_path: Path, make) -> None:
    folder = make(tmp_path)
    before, paths = tree(tmp_path), sorted(map(str, tmp_path.rglob("*")))
    with pytest.raises(OutputError) as caught:
        write_advice(sample, folder, plans("plan-1/a.py"))
    assert caught.value.hint
    assert (tree(tmp_path), sorted(map(str, tmp_path.rglob("*")))) == (before, paths)


def test_files_that_people_added_to_an_advice_are_kept(sample: Report, tmp_path: Path) -> None:
    folder = tmp_path / "advice"
    write_advice(sample, folder, plans("plan-1/a.py"))
    (folder / "plan-1" / "checkpoint.pt").write_text("weights")
    before = tree(folder)
    with pytest.raises(OutputError, match=r"plan-1/checkpoint\.pt"):
        write_advice(sample, folder)
    assert tree(folder) == before


@pytest.mark.parametrize("where", [".", "..", "sub/.."])
def test_the_current_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    here = tmp_path / "empty" / "sub"
    here.mkdir(parents=True)
    monkeypatch.chdir(here.parent if where == "sub/.." else here)
    with pytest.raises(OutputError):
        check_output(Path(where))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ScriptError("no", hint="yes"), RuntimeError("a bug")])
@pytest.mark.parametrize("earlier", [False, True])
def test_interruptions_leave_everything_as_it_was(sample: Report, tmp_path: Path, error: BaseException, earlier: bool) -> None:
    folder = tmp_path / "made" / "advice"
    if earlier:
        write_advice(sample, folder, plans("plan-1/old.py"))
    before = tree(tmp_path)
    with pytest.raises(type(error)):
        write_advice(sample, folder, failing(error))
    assert tree(tmp_path) == before
    assert names(tmp_path) == (["made"] if earlier else [])
    assert not earlier or names(tmp_path / "made") == ["advice"]


def test_a_full_disk_is_one_sentence(sample: Report, tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OutputError, match="no space left on device") as caught:
        write_advice(sample, tmp_path / "advice", failing(full))
    assert "Nothing was changed" in caught.value.hint
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(errno.EBUSY, "busy"), KeyboardInterrupt()])
def test_a_swap_that_fails_half_way_brings_the_old_advice_back(
    sample: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    folder = tmp_path / "advice"
    write_advice(sample, folder, plans("plan-1/old.py"))
    before, rename = tree(folder), Path.rename

    def second_fails(self: Path, target: Path) -> Path:
        if self.suffix == ".tmp":
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises((OutputError, KeyboardInterrupt)):
        write_advice(sample, folder, plans("plan-1/new.py"))
    assert tree(folder) == before
    assert names(tmp_path) == ["advice"]


def test_a_parent_without_permission_is_told_before_anything_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.os, "access", lambda *_: False)
    with pytest.raises(OutputError, match="no permission in"):
        check_output(tmp_path / "advice")


def test_a_broken_marker_protects(sample: Report, tmp_path: Path) -> None:
    folder = tmp_path / "advice"
    write_advice(sample, folder)
    (folder / MARKER).write_text("{")
    with pytest.raises(OutputError):
        write_advice(sample, folder)


def test_odd_file_names_can_be_written(hostile: Report, tmp_path: Path) -> None:
    write_advice(hostile, tmp_path / "advice")
    data = json.loads((tmp_path / "advice" / "report.json").read_text(encoding="utf8"))
    assert data["inputs"]["script"] == hostile.inputs["script"]


def test_others_may_read_the_advice(sample: Report, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    write_advice(sample, tmp_path / "advice")
    assert (tmp_path / "advice").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_edited_file_of_an_earlier_advice_is_not_lost(tmp_path, sample):
    folder = tmp_path / "advice"
    write_advice(sample, folder)
    check_output(folder)
    (folder / "report.html").write_text("my notes")
    with pytest.raises(OutputError, match=r"edited files in it, such as report\.html"):
        write_advice(sample, folder)
    assert (folder / "report.html").read_text() == "my notes"
