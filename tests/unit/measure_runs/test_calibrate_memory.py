"""Refitting the memory table on a user's own runs: it learns, it needs no step times, and it never makes unseen runs worse."""

import numpy as np
import pandas as pd
import pytest

from advisor.errors import AdvisorError
from advisor.measure.calibrate import calibrate_runs
from advisor.measure.evaluate import evaluate_runs
from advisor.measure.predict import predict_runs
from cost_models import Calibration, calibration_toml, load_calibration
from cost_models.terms.memory_traits import MemoryConstants

ROW = {"model_name": "llama3-8B", "seq_len": 4096, "gpu": "H100", "gpu_mem_gb": 80, "n_gpus": 8, "gpus_per_node": 8, "framework": "my trainer",
       "dp": 8, "tp": 1, "pp": 1, "zero_stage": 3, "precision": "bf16", "flash_attention": 1}  # fmt: skip


def table(constants: dict[str, float] | None = None) -> pd.DataFrame:
    """Runs whose memory is what the model says with these constants, and no step times."""
    frame = pd.DataFrame(
        [{**ROW, "micro_batch": b, "global_batch": 8 * b, "activation_ckpt": c} for b in (1, 2, 3) for c in ("none", "full")]
    )
    shipped = load_calibration()
    truth = Calibration(
        name="truth", constants=shipped.constants, memory=constants or {}, by_runtime=shipped.by_runtime, by_family=shipped.by_family
    )
    return frame.assign(peak_mem_gib=predict_runs(frame, calibration=truth)["predicted_peak_mem_gib"])


def test_own_memory_figures_move_the_memory_table_only(tmp_path):
    frame = table({"activation_scale": 1.3})
    result = calibrate_runs(frame)
    assert result.calibration.memory["activation_scale"] > 1.15
    assert result.error_after["memory_median_error_share"] < result.error_before["memory_median_error_share"]
    assert "median_error_share" not in result.error_after
    assert result.calibration.constants == load_calibration().constants
    assert result.moved["kind"].tolist() == ["memory"] * len(result.moved)
    assert "activation_scale" in result.moved["constant"].tolist()

    (tmp_path / "own.toml").write_text(calibration_toml(result.calibration))
    before, after = (evaluate_runs(frame, calibration=c).memory for c in (None, load_calibration(tmp_path / "own.toml")))
    assert after["median_error_share"] < 0.5 * before["median_error_share"]


def test_figures_that_agree_change_nothing():
    result = calibrate_runs(table())
    assert not result.calibration.memory
    assert result.error_before["memory_median_error_share"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_five_odd_figures_ruin_nothing(seed):
    """Noise of a factor of up to three either way on five runs: predictions of other runs stay within 10% of the shipped ones."""
    frame = table()
    factor = np.exp(np.random.default_rng(seed).uniform(-1.1, 1.1, len(frame)))
    noisy = frame.assign(peak_mem_gib=frame["peak_mem_gib"] * factor).drop(index=0)
    refit = calibrate_runs(noisy).calibration
    moved = predict_runs(frame, calibration=refit)["predicted_peak_mem_gib"] / frame["peak_mem_gib"]
    assert np.abs(moved - 1).max() < 0.1


def test_one_figure_is_too_few():
    frame = table().iloc[:1]
    assert not calibrate_runs(frame.assign(peak_mem_gib=frame["peak_mem_gib"] * 1.5)).calibration.memory


def test_times_and_memory_are_refitted_together():
    frame = table({"activation_scale": 1.3})
    frame = frame.assign(step_time_s=predict_runs(frame)["predicted_step_time_s"] * 1.3)
    result = calibrate_runs(frame)
    assert {"median_error_share", "memory_median_error_share"} <= result.error_after.keys()
    assert result.num_runs == len(frame)
    assert {"memory", "runtime"} <= set(result.moved["kind"])
    MemoryConstants.from_mapping(result.calibration.memory)


def test_nothing_measured_is_refused():
    with pytest.raises(AdvisorError, match="step time or memory"):
        calibrate_runs(table().drop(columns="peak_mem_gib"))
