"""Tables of runs: reading, predicting, evaluating, refitting."""

import json

import numpy as np
import pandas as pd
import pytest

from advisor.errors import AdvisorError
from advisor.measure.calibrate import calibrate_runs
from advisor.measure.evaluate import evaluate_runs, sweep_table
from advisor.measure.predict import PREDICTED_COLUMNS, predict_runs
from advisor.measure.runs import MEASURED_COLUMNS, read_runs
from cost_models import load_calibration

ROW = {
    "id": "own-1", "source_repo_or_doc": "own", "model_name": "llama3-8B", "seq_len": 4096, "gpu": "A100", "gpu_mem_gb": 80, "n_gpus": 8,
    "gpus_per_node": 8, "framework": "my trainer", "dp": 8, "tp": 1, "pp": 1, "zero_stage": 3, "micro_batch": 2, "global_batch": 16,
    "precision": "bf16", "activation_ckpt": "none", "flash_attention": 1, "step_time_s": 3.0,
}  # fmt: skip


def table(*changes):
    return pd.DataFrame([{**ROW, **change} for change in changes or ({},)])


def test_shapes_come_from_the_row_then_the_table_given_then_the_built_in_one(tmp_path):
    arch = tmp_path / "arch.csv"
    pd.DataFrame([{"model_name": "mine", "n_layers": 2, "hidden": 512, "n_heads": 8, "vocab": 1000}]).to_csv(arch, index=False)
    runs = read_runs(table({}, {"model_name": "mine"}, {"n_layers": 16}), arch)
    repeats = [w.groups[1].num_repeats for w in runs.workloads]
    assert repeats == [32, 2, 16]
    assert runs.workloads[0].num_params == 8_030_261_248


def test_whatever_is_presumed_is_named():
    runs = read_runs(table({"flash_attention": None, "precision": None, "global_batch": None}))
    assert {"flash_attention", "precision", "global_batch", "intra_link"} <= set(runs.assumed[0])
    assert "micro_batch" not in runs.assumed[0]


@pytest.mark.parametrize(
    ("change", "word"),
    [({"gpu": "Voodoo 2"}, "Voodoo 2"), ({"n_gpus": None}, "GPUs"), ({"model_name": "secret-net"}, "secret-net"),
     ({"micro_batch": None, "global_batch": None}, "batch"), ({"micro_batch": -1}, "batch")],
)  # fmt: skip
def test_a_row_that_cannot_be_priced_says_why(change, word):
    out = predict_runs(table({}, change))
    assert word in out.skipped_reason[1] or np.isfinite(out.predicted_step_time_s[1])
    assert out.skipped_reason[0] == ""
    if out.skipped_reason[1]:
        assert np.isnan(out.predicted_step_time_s[1])


def test_measured_times_are_taken_or_derived():
    runs = read_runs(
        table(
            {},
            {"step_time_s": None, "tokens_per_s_per_gpu": 4096.0},
            {"step_time_s": None, "samples_per_s_total": 8.0},
            {"step_time_s": None},
        )
    )
    assert runs.step_time_s[:3].tolist() == [3.0, 2.0, 2.0]
    assert np.isnan(runs.step_time_s[3])


def test_measured_columns_never_reach_a_prediction():
    measured = table().assign(peak_mem_gib=70.0, mfu=0.9, tflops_per_gpu=280.0, tokens_per_s_per_gpu=1e4)
    blind = measured.drop(columns=[c for c in MEASURED_COLUMNS if c in measured])
    with_figures, without = predict_runs(measured), predict_runs(blind)
    pd.testing.assert_frame_equal(with_figures[list(PREDICTED_COLUMNS)], without[list(PREDICTED_COLUMNS)])


def test_a_prediction_is_whole():
    row = predict_runs(table()).iloc[0]
    assert row.predicted_low_s < row.predicted_step_time_s < row.predicted_high_s
    assert sum(json.loads(row.predicted_breakdown).values()) == pytest.approx(row.predicted_step_time_s, rel=1e-4)
    assert 10 < row.predicted_peak_mem_gib < 100
    assert 0.2 < row.predicted_mfu < 0.7
    assert row.predicted_fits in (True, False)


def test_convolutional_rows_are_priced():
    row = {
        "model_name": "resnet50-v1.5",
        "micro_batch": 256,
        "global_batch": 256,
        "dp": 1,
        "n_gpus": 1,
        "precision": "amp (fp16)",
        "seq_len": None,
    }
    assert 0.08 < predict_runs(table(row)).predicted_step_time_s[0] < 0.3


def test_anchoring_carries_one_gpu_to_many():
    bert = {
        "model_name": "bert-base",
        "seq_len": 384,
        "zero_stage": 0,
        "precision": "amp (fp16)",
        "framework": "PyTorch",
        "micro_batch": 64,
    }
    one, eight = {**bert, "n_gpus": 1, "dp": 1, "global_batch": 64, "step_time_s": 0.5}, {**bert, "global_batch": 512, "step_time_s": None}
    plain, anchored = (predict_runs(table(one, eight), anchor=a).predicted_step_time_s for a in (False, True))
    assert anchored[0] == plain[0]  # a run is not its own anchor
    assert anchored[1] > 1.5 * plain[1]
    assert 0.5 < anchored[1] < 0.7


def test_evaluation_counts_errors_and_ranks_sweeps():
    frame = table(*({"micro_batch": b, "global_batch": 8 * b, "sweep_id": "s"} for b in (1, 2, 4, 8)))
    frame["step_time_s"] = predict_runs(frame).predicted_step_time_s * 1.1
    got = evaluate_runs(frame)
    assert got.overall["median_error_share"] == pytest.approx(1 - 1 / 1.1)
    assert got.overall["interval_share"] == 1.0
    assert got.sweeps.loc["s"].tolist() == [4, 0.0, 1.0]
    assert got.by_source.num_runs.tolist() == [4]
    json.dumps(got.to_json())


def test_regret_is_the_price_of_trusting_the_model():
    got = sweep_table(np.array(["s"] * 4), np.array([1.0, 1.5, 2.0, 3.0]), np.array([2.0, 1.0, 3.0, 4.0]))
    assert got.regret["s"] == pytest.approx(0.5)


def test_calibration_learns_a_slow_cluster():
    frame = table(*({"micro_batch": b, "global_batch": 8 * b, "activation_ckpt": c} for b in (1, 2, 3, 4) for c in ("none", "full")))
    frame["step_time_s"] = predict_runs(frame).predicted_step_time_s * 1.3
    result = calibrate_runs(frame)
    assert result.error_before["median_error_share"] == pytest.approx(1 - 1 / 1.3, abs=0.01)
    assert result.error_after["median_error_share"] < 0.08
    after = evaluate_runs(frame, calibration=result.calibration)
    assert after.overall["median_error_share"] < 0.06


def test_one_absurd_run_does_not_ruin_the_rest():
    frame = table(*({"micro_batch": b, "global_batch": 8 * b} for b in (1, 2, 3, 4, 6)))
    frame["step_time_s"] = predict_runs(frame).predicted_step_time_s
    frame.loc[2, "step_time_s"] *= 20
    result = calibrate_runs(frame)
    shipped, refit = load_calibration().constants, result.calibration
    assert refit.constants == shipped  # generic values stay; only this runtime's and family's factors move
    good = frame.drop(index=2)
    assert evaluate_runs(good, calibration=refit).overall["median_error_share"] < 0.2


@pytest.mark.parametrize(
    ("frame", "word"),
    [(pd.DataFrame({"a": [1]}), "model_name"), (table({"gpu": "Voodoo 2"}), "row")],
)
def test_useless_tables_are_refused(frame, word):
    with pytest.raises(AdvisorError, match=word):
        evaluate_runs(frame)


def test_an_unreadable_file_is_refused(tmp_path):
    with pytest.raises(AdvisorError, match="nothing"):
        read_runs(tmp_path / "nothing.csv")
