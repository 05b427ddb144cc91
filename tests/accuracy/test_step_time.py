"""Held-out errors of the step-time model must not get worse than the committed baseline by more than noise."""

import json

import numpy as np
import pytest

from advisor.measure.fit import fit, to_calibration
from cost_models import load_calibration
from tests.accuracy import folds

SLACK = {"share": 0.005, "p90": 0.02}  # of a share: what rounding of the stored constants and library versions may move


@pytest.fixture(scope="module")
def runs():
    return folds.load_runs()


@pytest.fixture(scope="module")
def problem_and_parameters(runs):
    return folds.load_problem(runs)


@pytest.fixture(scope="module")
def stored():
    return json.loads((folds.HERE / "fold_constants.json").read_text(encoding="utf8"))


@pytest.fixture(scope="module")
def held_out(runs, problem_and_parameters, stored):
    problem, params = problem_and_parameters
    return folds.held_out_s(problem, params, runs, stored["folds"])


@pytest.fixture(scope="module")
def baseline():
    return json.loads((folds.HERE / "baseline.json").read_text(encoding="utf8"))


def test_nearly_every_published_run_is_priced():
    frame = folds.pd.read_csv(folds.HERE / "runs.csv", low_memory=False)
    stated = frame[["n_layers", "hidden", "n_gpus"]].notna().all(axis=1) & frame[["micro_batch", "global_batch"]].notna().any(axis=1)
    table = folds.read_runs(frame[stated])
    assert len(table) >= 0.99 * stated.sum()


@pytest.mark.parametrize("kind", ["M", "S"])
def test_held_out_errors_stay_at_the_baseline(runs, held_out, baseline, kind):
    now = folds.figures(runs, held_out[kind])
    for name, before in baseline[kind].items():
        slack = SLACK["p90"] if "p90" in name or "regret" in name else SLACK["share"]
        if name in ("bias",):
            assert abs(now[name]) < 0.1
        elif name in ("median_spearman", "within_20_percent_share"):
            assert now[name] > before - 0.01, f"{kind} {name}: {now[name]:.4f}, baseline {before:.4f}"
        else:
            assert now[name] < before + slack, f"{kind} {name}: {now[name]:.4f}, baseline {before:.4f}"


def test_the_stored_constants_were_fitted_without_the_runs_they_price(runs, problem_and_parameters, stored):
    """Refit one fold: its held-out predictions must be what the stored constants give."""
    problem, params = problem_and_parameters
    name, mask = "M3", folds.fold_of_run(runs)["M"] == "M3"
    start = np.array(stored["folds"]["all"])
    again = to_calibration(problem, params, fit(problem, params, train=~mask, start=start, max_steps=8))
    kept = to_calibration(problem, params, np.array(stored["folds"][name]))
    off = np.abs(problem.log_predicted(again) - problem.log_predicted(kept))[mask]
    assert np.median(off) < 0.01


def test_stored_constants_belong_to_these_parameters(problem_and_parameters, stored):
    assert stored["parameters"] == folds.parameter_names(problem_and_parameters[1])


def test_intervals_hold_four_of_five_unseen_runs(runs, held_out):
    interval = load_calibration().interval
    for kind, factor in (("M", interval["known_runtime_factor"]), ("S", interval["unknown_runtime_factor"])):
        inside = np.abs(np.log(held_out[kind] / runs.step_time_s)) <= np.log(factor)
        source = runs.column("source_repo_or_doc").astype(str)
        share = inside.mean() if kind == "M" else np.mean([inside[source == s].mean() for s in set(source)])
        assert 0.75 < share < 0.88, f"{kind}: {share:.3f}"


def test_the_shipped_calibration_is_the_fit_of_all_runs(runs, problem_and_parameters, stored):
    problem, params = problem_and_parameters
    fitted = to_calibration(problem, params, np.array(stored["folds"]["all"]))
    off = np.abs(problem.log_predicted(fitted) - problem.log_predicted(load_calibration()))
    assert np.quantile(off, 0.95) < 0.02
