"""What `advise calibrate` makes of few runs of a source that nothing was fitted on. `python -m tests.accuracy.few_rows [RUNS]` prints the table.

Each source in turn is left out with its quirks (the S folds of `folds.py`), RUNS random runs of it (5) refit the constants, and the rest of it
is priced before and after.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import numpy as np
import pandas as pd

from advisor.measure.calibrate import refit_factors
from advisor.measure.fit import make_problem, to_calibration
from cost_models import Calibration
from tests.accuracy.folds import HERE, load_problem, load_runs, without_quirks

_DRAWS, _FEWEST_RUNS, _SEED = 8, 10, 2


def draws(num_runs: int) -> Iterator[tuple[str, float, float]]:
    """Source, and median error of the runs that weren't drawn: before and after."""
    runs, rng = load_runs(), np.random.default_rng(_SEED)
    problem, params = load_problem(runs)
    fitted = json.loads((HERE / "fold_constants.json").read_text(encoding="utf8"))["folds"]
    source = runs.column("source_repo_or_doc").astype(str)
    for name in sorted(set(source)):
        of_source = np.flatnonzero(source == name)
        if len(of_source) < max(_FEWEST_RUNS, 2 * num_runs):
            continue
        base = to_calibration(problem, params, np.array(fitted[name]))
        everything = without_quirks(make_problem(runs.take(of_source), base))
        off = {"before": _error(everything, base)}
        for _ in range(_DRAWS):
            drawn = np.zeros(len(of_source), dtype=bool)
            drawn[rng.choice(len(of_source), num_runs, replace=False)] = True
            few = without_quirks(make_problem(runs.take(of_source[drawn]), base))
            off["after"] = _error(everything, refit_factors(few))
            yield name, *(float(np.median(off[key][~drawn])) for key in ("before", "after"))


def _error(problem, calibration: Calibration) -> np.ndarray:
    return np.abs(np.expm1(problem.log_predicted(calibration) - problem.log_measured))


def main() -> None:
    found = pd.DataFrame(draws(int(sys.argv[1]) if len(sys.argv) > 1 else 5), columns=["source", "before", "after"])
    by_source = found.groupby("source").mean()
    print(by_source.round(3).to_string())
    print("mean of the sources", by_source.mean().round(4).to_dict())
    print("without nanotron   ", by_source[~by_source.index.str.contains("nanotron")].mean().round(4).to_dict())


if __name__ == "__main__":
    main()
