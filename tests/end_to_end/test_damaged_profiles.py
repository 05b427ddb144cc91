"""A saved profile may come from anywhere: damage of any kind is one sentence, and a stranger's folder is never overwritten."""

from __future__ import annotations

import gzip
import json
import shutil

import pytest

import advisor
from advisor.errors import AdvisorError


def change_meta(folder, **values):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, **values}))


def change_column(folder, table, column, value):
    path = folder / f"{table}.json.gz"
    with gzip.open(path, "rt") as source:
        columns = json.load(source)
    columns[column] = [value] * len(columns[column])
    with gzip.open(path, "wt") as out:
        json.dump(columns, out)


DAMAGE = {
    "a missing table": lambda f: (f / "operators.json.gz").unlink(),
    "a cut file": lambda f: (f / "operators.json.gz").write_bytes((f / "operators.json.gz").read_bytes()[:500]),
    "no JSON": lambda f: (f / "meta.json").write_text("{"),
    "another version": lambda f: change_meta(f, schema_version=99),
    "an unknown field": lambda f: change_meta(f, colour="red"),
    "a word for a number": lambda f: change_meta(f, batch_size="lots"),
    "a negative time": lambda f: change_meta(f, step_time_s=-1.0),
    "hazards of another kind": lambda f: change_meta(f, hazards=[1]),
    "parameters that don't add up": lambda f: change_meta(f, num_params=7),
    "an unknown phase": lambda f: change_column(f, "operators", "phase", "sideways"),
    "an unknown class": lambda f: change_column(f, "operators", "op_class", "magic"),
    "negative flops": lambda f: change_column(f, "operators", "flops", -1),
    "flops in words": lambda f: change_column(f, "operators", "flops", "many"),
    "shapes of another kind": lambda f: change_column(f, "operators", "input_shapes", [["a"]]),
    "no operators": lambda f: empty_operators(f),
}


def empty_operators(folder):
    with gzip.open(folder / "operators.json.gz", "rt") as source:
        columns = json.load(source)
    with gzip.open(folder / "operators.json.gz", "wt") as out:
        json.dump({name: [] for name in columns}, out)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_sentence(small_gpt2_folder, tmp_path, kind):
    folder = tmp_path / "profile"
    shutil.copytree(small_gpt2_folder, folder)
    advisor.advise(folder, gpu="a100")
    DAMAGE[kind](folder)
    with pytest.raises(AdvisorError) as error:
        advisor.advise(folder, gpu="a100")
    assert error.value.hint


@pytest.mark.parametrize(
    "options",
    [{"nodes": 1.5}, {"nodes": "3"}, {"max_memory_share": "x"}, {"gpu": 7}, {"args": "--a b"}, {"global_batch": 2.5}, {"colour": 1}],
)
def test_options_of_the_wrong_kind_are_one_sentence(small_gpt2_folder, options):
    with pytest.raises(AdvisorError):
        advisor.advise(small_gpt2_folder, **options)


def test_a_strangers_folder_is_not_taken_for_a_profile(small_gpt2_folder, tmp_path, monkeypatch, capsys):
    import sys

    from advisor import cli

    (tmp_path / "meta.json").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["advise", "profile", "nothing.py", "-o", str(tmp_path)])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 2
    assert "no profile" in capsys.readouterr().err
    assert (tmp_path / "meta.json").read_text() == "mine"
