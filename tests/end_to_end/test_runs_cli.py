"""Tables of measured runs on the command line: predict, evaluate, calibrate on good tables and on junk."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

COLUMNS = [
    "predicted_step_time_s", "predicted_low_s", "predicted_high_s", "predicted_samples_per_s", "predicted_peak_mem_gib", "predicted_fits", "predicted_mfu",
    "predicted_breakdown", "assumed", "skipped_reason",
]  # fmt: skip
HEADER = "model_name,gpu,n_gpus,seq_len,dp,tp,pp,zero_stage,micro_batch,global_batch,precision,step_time_s,peak_mem_gib,sweep_id"
GOOD = [f"llama3-8B,A100,8,4096,8,1,1,3,{b},{8 * b},bf16,{1.5 * b + 0.4},{18 + 8 * b},sweep" for b in (1, 2, 3, 4, 6)]


@pytest.fixture
def runs(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEADER, *GOOD]) + "\n")
    return path


def test_predictions_are_added_to_every_row_in_order(advise, runs, tmp_path):
    code, text, _ = advise("predict", runs, "-o", tmp_path / "pred.csv")
    got = pd.read_csv(tmp_path / "pred.csv")
    assert code == 0
    assert text.startswith("5 of 5 rows predicted")
    assert list(got.columns) == HEADER.split(",") + COLUMNS
    assert got["micro_batch"].tolist() == [1, 2, 3, 4, 6]
    assert (np.diff(got["predicted_step_time_s"]) > 0).all()
    assert (got["predicted_low_s"] < got["predicted_step_time_s"]).all()
    assert (got["predicted_step_time_s"] < got["predicted_high_s"]).all()
    assert got["skipped_reason"].isna().all()
    for row in got.itertuples():
        assert sum(json.loads(row.predicted_breakdown).values()) == pytest.approx(row.predicted_step_time_s, rel=1e-4)


def test_measured_columns_do_not_matter_to_predict(advise, runs, tmp_path):
    blind = tmp_path / "blind.csv"
    pd.read_csv(runs).drop(columns=["step_time_s", "peak_mem_gib"]).to_csv(blind, index=False)
    advise("predict", runs, "-o", tmp_path / "one.csv")
    advise("predict", blind, "-o", tmp_path / "two.csv")
    one, two = (pd.read_csv(tmp_path / name)[COLUMNS] for name in ("one.csv", "two.csv"))
    pd.testing.assert_frame_equal(one, two)


def test_one_row_is_enough_for_all_three_commands(advise, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\n{GOOD[0]}\n")
    assert advise("predict", path, "-o", tmp_path / "pred.csv")[0] == 0
    code, text, _ = advise("evaluate", path, "--json")
    assert code == 0
    assert json.loads(text)["overall"]["num_measured"] == 1
    assert advise("calibrate", path, "-o", tmp_path / "own.toml")[0] == 0


def test_an_evaluation_says_how_far_off_and_ranks_the_sweep(advise, runs):
    code, text, _ = advise("evaluate", runs)
    assert code == 0
    for word in ("median error", "1 sweep: picked plan slower than the best by", "BY SOURCE", "BY GPU", "BY LAYOUT", "PEAK MEMORY"):
        assert word in text
    assert "In-sample" not in text
    got = json.loads(advise("evaluate", runs, "--json")[1])
    assert {"overall", "by_source", "by_gpu", "by_layout", "sweeps", "memory"} == got.keys()
    assert got["overall"]["median_spearman"] == pytest.approx(1.0)


def test_an_evaluation_says_what_was_not_measured_in_a_sentence(advise, runs, tmp_path):
    table, part = pd.read_csv(runs), tmp_path / "part.csv"
    table.drop(columns=["peak_mem_gib", "sweep_id"]).to_csv(part, index=False)
    text = advise("evaluate", part)[1]
    assert "No row has a measured peak memory" in text
    assert "no ranking was judged" in text
    table.drop(columns=["step_time_s"]).to_csv(part, index=False)
    text = advise("evaluate", part)[1]
    assert "No row has a measured step time, so only memory was compared." in text
    assert not {"Empty DataFrame", "nan", "BY SOURCE"} & {*text.split(), *text.splitlines()}


def test_an_evaluation_shows_every_row_of_its_tables_at_any_width(advise, runs, tmp_path, monkeypatch):
    many = tmp_path / "many.csv"
    table = pd.concat([pd.read_csv(runs).assign(source_repo_or_doc=f"team/source-{i:03}", sweep_id=f"sweep-{i:03}") for i in range(70)])
    table.to_csv(many, index=False)
    for columns in ("100", "40"):
        monkeypatch.setenv("COLUMNS", columns)
        text = advise("evaluate", many)[1]
        assert all(f"team/source-{i:03}" in text and f"sweep-{i:03}" in text for i in range(70))
        assert max(map(len, text.splitlines())) <= int(columns)
        assert "..." not in text


def test_an_evaluation_says_which_errors_flatter(advise, runs, tmp_path):
    fitted = tmp_path / "fitted.csv"
    table = pd.read_csv(runs)
    table.assign(source_repo_or_doc="pytorch/torchtitan").to_csv(fitted, index=False)
    text = " ".join(advise("evaluate", fitted)[1].split())
    assert "In-sample: All of these runs are of sources that the constants were fitted on" in text
    table.assign(source_repo_or_doc=["pytorch/torchtitan", *["own"] * 4]).to_csv(fitted, index=False)
    text = " ".join(advise("evaluate", fitted)[1].split())
    assert "In-sample: 1 of these runs is of sources that the constants were fitted on" in text
    overall = json.loads(advise("evaluate", fitted, "--json")[1])["overall"]
    assert overall["num_fitted_source_runs"] == 1
    alone = tmp_path / "alone.csv"
    table[1:].to_csv(alone, index=False)
    assert overall["other_median_error_share"] == json.loads(advise("evaluate", alone, "--json")[1])["overall"]["median_error_share"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_alone(advise, runs, tmp_path, monkeypatch, is_terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    code, _, err = advise("predict", runs, "-o", tmp_path / "pred.csv")
    assert code == 0
    assert bool(err) == is_terminal


def test_a_model_name_is_no_markup_to_the_progress(advise, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\n{GOOD[0].replace('llama3-8B', '[/bold]')}\n")
    code, text, _ = advise("predict", path, "-o", tmp_path / "pred.csv")
    assert code == 0
    assert "[/bold]" in text


def test_a_calibration_serves_the_other_commands(advise, runs, tmp_path):
    own = tmp_path / "own.toml"
    code, text, _ = advise("calibrate", runs, "-o", own)
    assert code == 0
    assert "before" in text
    assert "left out" in text
    before, after = (
        json.loads(advise("evaluate", runs, "--json", *extra)[1])["overall"]["median_error_share"] for extra in ((), ("--calibration", own))
    )
    assert after < before


def test_a_report_names_the_calibration_and_its_runs(advise, runs, small_gpt2_folder, tmp_path):
    own, out = tmp_path / "own.toml", tmp_path / "advice"
    advise("calibrate", runs, "-o", own)
    text = " ".join(advise("plan", small_gpt2_folder, "--gpu", "a100", "--plans", 1, "--calibration", own, "--out", out)[1].split())
    assert re.search(r"own.toml, refitted on 5 runs of yours on \d{4}-\d\d-\d\d \(left out in turn: median error", text)
    report = json.loads((out / "report.json").read_text())
    assert report["accuracy"]["file"] == report["inputs"]["options"]["calibration"] == str(own)
    assert report["accuracy"]["num_own_runs"] == 5
    assert 0 < report["accuracy"]["own_runs_median_share"] < 1
    assert "refitted on 5 runs of yours" in (out / "report.html").read_text()


def test_a_shape_table_names_what_is_not_built_in(advise, tmp_path):
    runs, arch = tmp_path / "runs.csv", tmp_path / "arch.csv"
    runs.write_text(f"{HEADER}\n{GOOD[0].replace('llama3-8B', 'house-model')}\n")
    arch.write_text("model_name,n_layers,hidden,n_heads,vocab\nhouse-model,8,1024,16,32000\n")
    _, text, _ = advise("predict", runs, "-o", tmp_path / "pred.csv")
    assert "0 of 1 rows predicted" in text
    assert "house-model" in text
    assert advise("predict", runs, "--arch", arch, "-o", tmp_path / "pred.csv")[1].startswith("1 of 1 rows predicted")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "runs.csv"),
        (b"", "runs.csv"),
        (b"\n\n", "runs.csv"),
        (b"alpha,beta\n1,2\n", "model_name"),
        (b"\x80\x81\xfe\x00", "runs.csv"),
    ],
)
@pytest.mark.parametrize("command", ["predict", "evaluate", "calibrate"])
def test_what_is_no_table_of_runs_is_one_sentence(advise, tmp_path, command, content, says):
    path, out = tmp_path / "runs.csv", tmp_path / "out"
    if content is not None:
        path.write_bytes(content)
    code, text, err = advise(command, path, *(() if command == "evaluate" else ("-o", out)))
    assert code == 2
    assert says in err
    assert "Traceback" not in text + err
    assert not out.exists()


JUNK = [
    "llama3-8B,A100,eight,4096,8,1,1,3,1,8,bf16,2.0,40,",
    "llama3-8B,A100,8,many,8,1,1,3,1,8,bf16,fast,lots,",
    "llama3-8B,A100,8,0,8,1,1,3,1,8,bf16,2.0,40,",
    "llama3-8B,A100,-8,4096,8,1,1,3,1,8,bf16,2.0,40,",
    "llama3-8B,A100,8,4096,0,0,0,9,1,8,bf16,2.0,40,",
    "llama3-8B,A100,8,4096,8,1,1,3,nan,inf,bf16,-1,-5,",
    "llama3-8B,A100,8,4096,8,1,500,3,1,8,bf16,2.0,40,",
    "llama3-8B,A100,8,4096,8,1,1,3,0.25,8,elephant,2.0,40,",
    "llama3-8B,A100,1e12,1e9,1e12,1,1,3,1e9,1e30,bf16,1e-300,1e300,",
    ",,,,,,,,,,,,,",
    '"quoted, ""name""",H100,8,4096,8,1,1,3,1,8,bf16,2.0,40,',
]


def test_junk_in_a_row_skips_or_prices_that_row_only(advise, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEADER, GOOD[0], *JUNK]) + "\n")
    code, _, err = advise("predict", path, "-o", tmp_path / "pred.csv")
    assert code == 0, err
    got = pd.read_csv(tmp_path / "pred.csv")
    assert len(got) == 1 + len(JUNK)
    assert np.isfinite(got["predicted_step_time_s"][0])
    priced = got["skipped_reason"].isna()
    assert np.isfinite(got["predicted_step_time_s"][priced]).all()
    assert (got["predicted_step_time_s"][priced] > 0).all()
    assert got["predicted_step_time_s"][~priced].isna().all()
    assert got["skipped_reason"][1].startswith("the number of GPUs")
    alone = tmp_path / "alone.csv"
    alone.write_text(f"{HEADER}\n{GOOD[0]}\n")
    advise("predict", alone, "-o", tmp_path / "alone_pred.csv")
    assert pd.read_csv(tmp_path / "alone_pred.csv")["predicted_step_time_s"][0] == got["predicted_step_time_s"][0]


@pytest.mark.parametrize("command", ["evaluate", "calibrate"])
def test_a_table_without_a_measurement_is_refused(advise, runs, tmp_path, command):
    pd.read_csv(runs).drop(columns=["step_time_s", "peak_mem_gib"]).to_csv(runs, index=False)
    code, _, err = advise(command, runs, *(() if command == "evaluate" else ("-o", tmp_path / "own.toml")))
    assert code == 2
    assert "measure" in err
    assert not (tmp_path / "own.toml").exists()


@pytest.mark.parametrize("command", ["predict", "calibrate"])
@pytest.mark.parametrize("out", ["", ".", "{runs}", "{shapes}"])
def test_nothing_is_written_over_a_folder_or_what_is_read(advise, runs, tmp_path, command, out):
    shapes = tmp_path / "shapes.csv"
    shapes.write_text("model_name,hidden,n_layers\nmine,64,2\n")
    before = (Path(runs).read_text(), shapes.read_text())
    code, _, err = advise(command, runs, "--arch", shapes, "-o", out.format(runs=runs, shapes=shapes))
    assert code == 2
    assert "Choose another file with -o." in err
    assert (Path(runs).read_text(), shapes.read_text()) == before


def test_the_output_is_not_half_written(advise, runs, tmp_path):
    code, _, err = advise("predict", runs, "-o", tmp_path / "no" / "such" / "folder.csv")
    assert code == 2
    assert "Traceback" not in err
    code, _, err = advise("predict", runs, "-o", tmp_path / "pred.csv", "--calibration", tmp_path / "none.toml")
    assert code == 2
    assert not (tmp_path / "pred.csv").exists()


def test_devices_and_links_are_written_to_and_not_replaced(advise, runs, tmp_path):
    pipe, real, link = tmp_path / "pipe", tmp_path / "real.csv", tmp_path / "link.csv"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: seen.append(pipe.read_text()))
    seen: list[str] = []
    reader.start()
    assert advise("predict", runs, "-o", pipe)[0] == 0
    reader.join(timeout=60)
    assert pipe.is_fifo()
    assert seen[0].startswith("model_name,")
    real.write_text("old")
    link.symlink_to(real)
    assert advise("predict", runs, "-o", link)[0] == 0
    assert link.is_symlink()
    assert real.read_text() == seen[0]


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda text: text.replace(",", ";"),
        lambda text: text.replace(",", "\t"),
        lambda text: text.replace(",", " , "),
        lambda text: text.replace("\n", ",,,\n"),
        lambda text: "\ufeff" + text.replace("\n", "\r\n"),
        lambda text: text.replace(",4096,", ',"4,096",').replace(",1.9,", ',"1.9",'),
    ],
)
def test_tables_as_spreadsheets_write_them_are_read(advise, runs, tmp_path, rewrite):
    odd = tmp_path / "odd.csv"
    odd.write_text(rewrite(runs.read_text()), newline="")
    expected, (code, text, err) = advise("evaluate", runs, "--json")[1], advise("evaluate", odd, "--json")
    assert (code, err) == (0, "")
    assert text == expected


def test_thousands_are_read_and_other_commas_are_no_numbers(advise, tmp_path):
    path = tmp_path / "runs.csv"
    row = GOOD[0].replace(",A100,8,", ',A100,"{gpus}",').replace(",1.9,", ',"{seconds}",')
    rows = [row.format(gpus="1,024", seconds="1,900.5"), row.format(gpus="1,5", seconds="1.9")]
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    assert advise("predict", path, "-o", tmp_path / "pred.csv")[0] == 0
    got = pd.read_csv(tmp_path / "pred.csv")
    assert got["skipped_reason"].fillna("").tolist() == ["", "the number of GPUs is 1,5"]
    overall = json.loads(advise("evaluate", path, "--json")[1])["overall"]
    assert overall["num_measured"] == 1


def test_missing_columns_are_said_beside_those_that_are_there(advise, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("MODEL_NAME,GPU\nllama3-8B,A100\n")
    code, _, err = advise("evaluate", path)
    assert code == 2
    assert "has no column model_name, gpu, n_gpus; it has MODEL_NAME, GPU." in err
