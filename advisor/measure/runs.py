"""Published or own runs as a table -> workloads, clusters and plans that the cost models price.

Reads the columns of `runs.csv` (see README, "Your own runs"): one row per run. Whatever a row leaves open gets a documented default and
is named in `assumed`; a row that can't be priced gets a reason in `skipped`. Measured columns are read only into `step_time_s` and
`peak_mem_gib`: nothing else here sees them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from advisor.errors import AdvisorError
from advisor.measure.run_fields import RowReader
from advisor.measure.run_layout import ReadRow, fill_open
from advisor.measure.run_values import Skip, without_thousands
from advisor.progress import Progress, quiet
from cost_models.types import Cluster, FloatArray, IntArray, Plan, PlanTable, Workload

#: Columns that make a row a run; all others may be missing.
REQUIRED_COLUMNS = ("model_name", "gpu", "n_gpus")
_SHOWN_COLUMNS = 8  # named where some are missing
#: What was measured: never read for a prediction.
MEASURED_COLUMNS = ("step_time_s", "tokens_per_s_per_gpu", "samples_per_s_total", "tflops_per_gpu", "mfu", "peak_mem_gib", "oom")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTable:
    """Runs that can be priced, and what was left out. Arrays and lists are parallel to `row`."""

    frame: pd.DataFrame  # all rows as read, index 0, 1, ...
    row: IntArray  # position in `frame` of each priced run
    workloads: tuple[Workload, ...]
    clusters: tuple[Cluster, ...]
    plans: PlanTable
    step_time_s: FloatArray  # measured seconds of the plan's step, from its throughput where no time is stated; NaN where neither is
    peak_mem_gib: FloatArray  # measured, NaN where none
    assumed: tuple[tuple[str, ...], ...]  # fields that got a default
    states_batch: np.ndarray  # bool: False where the plan's batch is a default, so that only throughputs can be compared
    units_per_sample: FloatArray  # what throughputs in samples count: 1, or the mel frames of a sentence where the row counts those
    skipped: Mapping[int, str]  # position in `frame` -> reason

    def __len__(self) -> int:
        return len(self.row)

    def column(self, name: str, default: object = "") -> np.ndarray:
        """A column of the table, for the priced runs."""
        if name not in self.frame:
            return np.full(len(self), default, dtype=object)
        return self.frame[name].to_numpy()[self.row]

    def take(self, index: IntArray) -> RunTable:
        """Some of the priced runs, in the given order."""
        pick = [int(i) for i in index]
        return RunTable(
            frame=self.frame, row=self.row[index], workloads=tuple(self.workloads[i] for i in pick), clusters=tuple(self.clusters[i] for i in pick),
            plans=self.plans.take(index), step_time_s=self.step_time_s[index],
            peak_mem_gib=self.peak_mem_gib[index], assumed=tuple(self.assumed[i] for i in pick),
            states_batch=self.states_batch[index], units_per_sample=self.units_per_sample[index], skipped=self.skipped,
        )  # fmt: skip


def read_runs(source: str | Path | pd.DataFrame, arch_csv: str | Path | None = None, *, progress: Progress = quiet) -> RunTable:
    """Read runs.

    Args:
        source: CSV file, or a frame with its columns.
        arch_csv: shapes of the models named, with the columns of `arch.csv`; built-in shapes of well-known models otherwise.
        progress: told which row is read; the first of a network of the zoo takes a second or two.

    Raises:
        AdvisorError: unreadable, or not a table of runs.
    """
    frame = source.reset_index(drop=True) if isinstance(source, pd.DataFrame) else _read_csv(source)
    missing = [c for c in REQUIRED_COLUMNS if c not in frame]
    if missing:
        has = ", ".join(str(c).strip() for c in frame.columns[:_SHOWN_COLUMNS]) + (", ..." if len(frame.columns) > _SHOWN_COLUMNS else "")
        raise AdvisorError(f"The table of runs has no column {', '.join(missing)}; it has {has}.", hint="See the README for the columns.")
    reader = RowReader(arch=None if arch_csv is None else _read_arch(arch_csv))
    kept: list[ReadRow] = []
    skipped: dict[int, str] = {}
    inputs = frame.drop(columns=[c for c in MEASURED_COLUMNS if c in frame])
    for position, record in enumerate(inputs.to_dict("records")):
        progress(f"reading row {position + 1:,} of {len(frame):,}: {record['model_name']}")
        try:
            kept.append(reader.read({str(k): v for k, v in record.items()}))
            kept[-1].position = position
        except Skip as reason:
            skipped[position] = str(reason)
    fill_open(kept)
    return _table(frame, kept, skipped)


def _table(frame: pd.DataFrame, kept: list[ReadRow], skipped: dict[int, str]) -> RunTable:
    row = np.array([k.position for k in kept], dtype=np.int64)
    workloads, plans = tuple(k.workload for k in kept), [k.plan for k in kept]
    memory, units = _numbers(frame, "peak_mem_gib"), np.array([k.units_per_sample for k in kept], dtype=np.float64)
    return RunTable(
        frame=frame, row=row, workloads=workloads, clusters=tuple(k.cluster for k in kept), plans=PlanTable.from_plans(plans),
        step_time_s=_step_s(frame, row, workloads, plans, units), peak_mem_gib=np.where(memory > 0, memory, np.nan)[row], assumed=tuple(k.assumed for k in kept),
        states_batch=np.array([k.states_batch for k in kept], dtype=bool), units_per_sample=units, skipped=skipped,
    )  # fmt: skip


def _step_s(frame: pd.DataFrame, row: IntArray, workloads: tuple[Workload, ...], plans: list[Plan], units: FloatArray) -> FloatArray:
    """Measured seconds per step of the priced runs; where the row lacks batch or sequence, of the plan's at the measured throughput."""
    units_of_row = np.ones(len(frame))
    units_of_row[row] = units
    stated = measured_step_s(frame, units_of_row)[row]
    batch, tokens = np.array([p.global_batch for p in plans], dtype=np.float64), np.array([w.tokens_per_sample for w in workloads])
    tokens_per_s = _numbers(frame, "tokens_per_s_per_gpu")[row] * _numbers(frame, "n_gpus")[row]
    with np.errstate(divide="ignore", invalid="ignore"):
        from_tokens, from_samples = batch * tokens / tokens_per_s, batch * units / _numbers(frame, "samples_per_s_total")[row]
    found = np.where(np.isfinite(stated), stated, np.where(np.isfinite(from_samples), from_samples, from_tokens))
    return np.where(np.isfinite(found) & (found > 0), found, np.nan)


def measured_step_s(frame: pd.DataFrame, units_per_sample: FloatArray | float = 1.0) -> FloatArray:
    """Measured seconds per step: stated, or from tokens per second and GPU, or from samples per second. NaN where none."""
    batch = _numbers(frame, "global_batch")
    with np.errstate(divide="ignore", invalid="ignore"):
        from_tokens = batch * _numbers(frame, "seq_len") / (_numbers(frame, "tokens_per_s_per_gpu") * _numbers(frame, "n_gpus"))
        from_samples = batch * units_per_sample / _numbers(frame, "samples_per_s_total")
    stated = _numbers(frame, "step_time_s")
    out = np.where(np.isfinite(stated), stated, np.where(np.isfinite(from_tokens), from_tokens, from_samples))
    return np.where(np.isfinite(out) & (out > 0), out, np.nan)


def _numbers(frame: pd.DataFrame, name: str) -> FloatArray:
    """A column as numbers, NaN where it has none or isn't there."""
    if name not in frame:
        return np.full(len(frame), np.nan)
    column = frame[name]
    if not pd.api.types.is_numeric_dtype(column):
        column = column.map(lambda value: without_thousands(value.strip()) if isinstance(value, str) else value)
    return pd.to_numeric(column, errors="coerce").to_numpy(dtype=np.float64)


def _read_arch(path: str | Path) -> pd.DataFrame:
    """Shapes by model name; sizes that are no numbers count as blank."""
    frame = _read_csv(path)
    if "model_name" not in frame:
        raise AdvisorError(f"The table of shapes {path} has no column model_name.", hint="See the README for the columns.")
    texts = ("model_name", "moe")
    return frame.assign(**{name: pd.to_numeric(frame[name], errors="coerce") for name in frame.columns if name not in texts})


def _read_csv(path: str | Path) -> pd.DataFrame:
    """A table whose columns are parted by commas, semicolons or tabs; spaces around their names are dropped."""
    try:
        frame = _parted_by(",", path)
        others = [mark for mark in (";", "\t") if len(frame.columns) == 1 and mark in str(frame.columns[0])]
        frame = _parted_by(others[0], path) if others else frame
    except UnicodeDecodeError as error:
        raise AdvisorError(f"{path} is no text in UTF-8 ({error}).", hint="Save the table as CSV in UTF-8.") from error
    except (OSError, ValueError) as error:
        raise AdvisorError(f"{path} can't be read as a CSV table ({error}).", hint="Give a CSV file with one run per row.") from error
    return frame.rename(columns=lambda name: str(name).strip())


def _parted_by(mark: str, path: str | Path) -> pd.DataFrame:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pd.errors.ParserWarning)  # a comma more at a row's end must not shift its columns
        return pd.read_csv(path, low_memory=False, index_col=False, sep=mark, skipinitialspace=True)
