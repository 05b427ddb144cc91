"""Rows with cells that make no run: priced by a named default, or left out with a reason, and no other row with them."""

import numpy as np
import pandas as pd
import pytest

from advisor.measure.runs import read_runs

GOOD = {"model_name": "llama2-7b", "gpu": "A100", "n_gpus": 8, "micro_batch": 1, "global_batch": 64, "tp": 1, "pp": 1, "precision": "bf16"}


def read(**changed):
    table = read_runs(pd.DataFrame([GOOD, GOOD | changed], dtype=object))
    assert 0 in table.row  # the row beside it is priced whatever this one says
    return table


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"n_gpus": 1e30}, "number of GPUs is 1e+30"), ({"n_gpus": "eight"}, "number of GPUs is eight"), ({"n_gpus": None}, "not stated"),
        ({"global_batch": 1e300}, "samples"), ({"zero_stage": 5}, "no ZeRO stage 5"), ({"pp": 64, "n_gpus": 64}, "64 pipeline stages for"),
        ({"model_name": "resnet50", "tp": 2}, "nothing to divide"),
    ],
)  # fmt: skip
def test_no_run_is_left_out_with_the_reason(changed, reason):
    assert reason in read(**changed).skipped[1]


@pytest.mark.parametrize("changed", [{"seq_len": "abc"}, {"seq_len": -5}, {"precision": "int8"}])
def test_what_cannot_be_read_is_named_beside_the_default(changed):
    table, (name, text) = read(**changed), next(iter(changed.items()))
    assert any(field.startswith(name) and str(text) in field for field in table.assumed[1])


def test_words_for_yes_and_no_count():
    table = read(compile="yes", flash_attention="False")
    assert not {"compile", "flash_attention"} & set(table.assumed[1])


def test_a_comma_too_many_shifts_no_column(tmp_path):
    (tmp_path / "runs.csv").write_text("model_name,gpu,n_gpus,micro_batch\nllama2-7b,a100-sxm-80gb,8,2,\n")
    table = read_runs(tmp_path / "runs.csv")
    assert table.column("model_name").tolist() == ["llama2-7b"]
    assert table.plans.micro_batch.tolist() == [2]


def test_memory_below_zero_was_not_measured():
    assert np.isnan(read(peak_mem_gib=-3.0).peak_mem_gib[1])
