"""Held-out errors of the step-time model on published runs. `python -m tests.accuracy.folds` refits, and rewrites `baseline.json`,
`fold_constants.json` and the shipped calibration.

Two kinds of fold. M leaves out a whole model of every source at once (its runtime may be known from other models); S leaves out a
whole source, and prices it without the quirks that were read off its runs. `runs.csv` holds the published figures with their sources.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

import cost_models
from advisor.measure.evaluate import error_figures, error_table, sweep_table
from advisor.measure.fit import DEVICE_FACTORS, Parameter, Problem, fit, make_problem, parameters, to_calibration
from advisor.measure.runs import RunTable, read_runs
from advisor.zoo.names import find_network
from cost_models import calibration_toml, load_calibration

HERE = Path(__file__).parent
NUM_M_FOLDS = 12
_FEW_MODELS = 3  # sources with so few models are spread over the folds by source


def load_runs() -> RunTable:
    """Published runs with a measured step time."""
    frame = pd.read_csv(HERE / "runs.csv", low_memory=False)
    traced = frame["model_name"].map(lambda name: find_network(name) not in (None, "resnet50"))  # checked apart: nothing is fitted on them
    runs = read_runs(frame[~traced])
    return runs.take(np.flatnonzero(np.isfinite(runs.step_time_s) & runs.states_batch))


def load_problem(runs: RunTable) -> tuple[Problem, list[Parameter]]:
    """The runs packed for fitting from the priors: nothing fitted before reaches a fold."""
    base = dataclasses.replace(load_calibration(), by_runtime={}, by_family=dict(DEVICE_FACTORS))
    problem = make_problem(runs, base)
    return problem, parameters(problem)


def without_quirks(problem: Problem) -> Problem:
    runtimes = tuple(dataclasses.replace(r, quirks={}) for r in problem.packed.runtimes)
    return dataclasses.replace(problem, packed=dataclasses.replace(problem.packed, runtimes=runtimes))


def fold_of_run(runs: RunTable) -> dict[str, np.ndarray]:
    """Name of the fold that holds out each run, by kind."""
    source, model = runs.column("source_repo_or_doc").astype(str), runs.column("model_name").astype(str)
    m_fold = np.zeros(len(runs), dtype=np.int64)
    for i, s in enumerate(sorted(set(source))):
        models = sorted(set(model[source == s]))
        start = 3 * i + 2 if len(models) <= _FEW_MODELS else 0
        for j, name in enumerate(models):
            m_fold[(source == s) & (model == name)] = (j + start) % NUM_M_FOLDS
    return {"M": np.array([f"M{k}" for k in m_fold]), "S": source}


def fit_folds(problem: Problem, params: list[Parameter], runs: RunTable) -> dict[str, list[float]]:
    """Fitted logarithms per fold."""
    start = fit(problem, params, max_steps=25)
    out = {"all": start.round(5).tolist()}
    for folds in fold_of_run(runs).values():
        for name in sorted(set(folds)):
            out[str(name)] = fit(problem, params, train=folds != name, start=start, max_steps=8).round(5).tolist()
            print(name, file=sys.stderr)
    return out


def held_out_s(problem: Problem, params: list[Parameter], runs: RunTable, fitted: dict[str, list[float]]) -> dict[str, np.ndarray]:
    """Predicted seconds of every run by the constants of the fold that left it out."""
    out = {}
    for kind, folds in fold_of_run(runs).items():
        pricing = without_quirks(problem) if kind == "S" else problem
        out[kind] = np.full(len(runs), np.nan)
        for name in sorted(set(folds)):
            mask = folds == name
            out[kind][mask] = np.exp(pricing.log_predicted(to_calibration(pricing, params, np.array(fitted[str(name)]))))[mask]
    return out


def figures(runs: RunTable, predicted_s: np.ndarray) -> dict[str, float]:
    """The figures that the baseline holds, of one kind of fold."""
    source, gpus = runs.column("source_repo_or_doc").astype(str), runs.column("n_gpus").astype(float)
    error = np.abs(predicted_s / runs.step_time_s - 1)
    vtrain, nanotron = np.char.startswith(source, "VIA-Research/vTrain"), np.char.startswith(source, "huggingface/nanotron")
    sweeps = sweep_table(runs.column("sweep_id"), runs.step_time_s, predicted_s)
    return {
        **error_figures(error_table(runs, predicted_s)),
        "vtrain_many_nodes_mean_error_share": float(error[vtrain & (gpus > 8)].mean()),
        "vtrain_one_node_mean_error_share": float(error[vtrain & (gpus <= 8)].mean()),
        "nanotron_median_error_share": float(np.median(error[nanotron])), "nanotron_p90_error_share": float(np.quantile(error[nanotron], 0.9)),
        "mean_regret_share": float(sweeps.regret.mean()), "median_spearman": float(sweeps.spearman.median()),
    }  # fmt: skip


def interval_factors(runs: RunTable, held_out: dict[str, np.ndarray]) -> dict[str, float]:
    """Factors that hold 80% of unseen runs: of unseen models (each run counts once), of unseen sources (each source counts once)."""
    off = {kind: np.abs(np.log(predicted / runs.step_time_s)) for kind, predicted in held_out.items()}
    _, inverse, counts = np.unique(runs.column("source_repo_or_doc").astype(str), return_inverse=True, return_counts=True)
    order = np.argsort(off["S"])
    weight = np.cumsum((1 / counts[inverse])[order])
    unknown = off["S"][order][np.searchsorted(weight, 0.8 * weight[-1])]
    return {"known_runtime_factor": float(np.exp(np.quantile(off["M"], 0.8))), "unknown_runtime_factor": float(np.exp(unknown))}


def parameter_names(params: list[Parameter]) -> list[str]:
    return [f"{p.constant}@{p.runtime or p.family}".rstrip("@") for p in params]


def ship(problem: Problem, params: list[Parameter], runs: RunTable, x: list[float], held_out: dict[str, np.ndarray]) -> None:
    """Write the fit of all runs as the calibration that the package ships."""
    fitted = to_calibration(problem, params, np.array(x))

    def tidy(groups: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        rounded = {key: {c: round(v, 3) for c, v in factors.items() if abs(v - 1) > 0.01} for key, factors in sorted(groups.items())}
        return {key: factors for key, factors in rounded.items() if factors}

    sources = sorted(set(runs.column("source_repo_or_doc").astype(str)))
    m, s = (figures(runs, held_out[kind]) for kind in "MS")
    shipped = dataclasses.replace(
        fitted, name="published runs", constants={c: float(f"{v:.4g}") for c, v in fitted.constants.items()}, by_runtime=tidy(fitted.by_runtime),
        by_family=tidy(fitted.by_family), data={"fitted_on": datetime.date.today().isoformat(), "num_runs": len(runs), "num_sources": len(sources), "sources": sources,
              "runtimes": sorted(set(problem.runtime.tolist()))},
        interval={k: round(v, 3) for k, v in interval_factors(runs, held_out).items()},
        error={"unseen_model_median_share": round(m["median_error_share"], 3), "unseen_model_p90_share": round(m["p90_error_share"], 3),
               "unseen_source_median_share": round(s["mean_of_source_medians"], 3)},
    )  # fmt: skip
    path = Path(cost_models.__file__).parent / "calibration" / "default.toml"
    path.write_text(calibration_toml(shipped), encoding="utf8")


def main() -> None:
    runs = load_runs()
    problem, params = load_problem(runs)
    fitted = fit_folds(problem, params, runs)
    held_out = held_out_s(problem, params, runs, fitted)
    baseline = {kind: {k: round(v, 4) for k, v in figures(runs, predicted).items()} for kind, predicted in held_out.items()}
    (HERE / "baseline.json").write_text(json.dumps(baseline, indent=1) + "\n", encoding="utf8")
    lines = [json.dumps({"parameters": parameter_names(params)})[:-1] + ',\n "folds": {']
    lines += ["  " + json.dumps(name) + ": " + json.dumps(values) + "," for name, values in fitted.items()]
    (HERE / "fold_constants.json").write_text("\n".join(lines).rstrip(",") + "\n }}\n", encoding="utf8")
    ship(problem, params, runs, fitted["all"], held_out)
    print(json.dumps(baseline, indent=1))


if __name__ == "__main__":
    main()
