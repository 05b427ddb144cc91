"""Commands on tables of measured runs: predict, evaluate, calibrate."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from advisor.errors import AdvisorError
from advisor.words import counted

if TYPE_CHECKING:
    import pandas as pd

    from advisor.measure.evaluate import Evaluation

_ARCH = click.option("--arch", metavar="ARCH.csv", help="Shapes of the models named in RUNS.")
_CALIBRATION = click.option("--calibration", metavar="FILE", help="Constants of `advise calibrate` instead of the shipped ones.")
_ANCHOR = click.option("--anchor", is_flag=True, help="Correct n-GPU runs by the measured single-GPU run of the same model.")


@click.command(short_help="Price the rows of RUNS.csv.")
@click.argument("runs", metavar="RUNS.csv")
@click.option("-o", "--out", required=True, metavar="PRED.csv", help="Table to write: the rows of RUNS.csv with the predictions.")
@_ARCH
@_CALIBRATION
@_ANCHOR
def predict(runs: str, out: str, arch: str | None, calibration: str | None, anchor: bool) -> None:
    """Add predicted step time, interval, memory and breakdown to each row of RUNS.csv; measured columns are ignored."""
    from advisor.assemble import read_calibration
    from advisor.measure.predict import predict_runs

    check_output(out, runs, arch, calibration)
    table = predict_runs(runs, arch_csv=arch, calibration=read_calibration(calibration), anchor=anchor)
    write_text(Path(out), table.to_csv(index=False))
    skipped = table["skipped_reason"].fillna("").astype(str)
    click.echo(f"{(skipped == '').sum():,} of {len(table):,} rows predicted, written to {out}")
    for reason, count in skipped[skipped != ""].value_counts().items():
        click.echo(f"  {count} skipped: {reason}")


@click.command(short_help="Compare prices with the measured RUNS.csv.")
@click.argument("runs", metavar="RUNS.csv")
@_ARCH
@_CALIBRATION
@_ANCHOR
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def evaluate(runs: str, arch: str | None, calibration: str | None, anchor: bool, as_json: bool) -> None:
    """Compare predicted with measured step times of RUNS.csv, per source, GPU and layout, with rank quality per sweep."""
    from advisor.assemble import read_calibration
    from advisor.measure.evaluate import evaluate_runs

    found = evaluate_runs(runs, arch_csv=arch, calibration=read_calibration(calibration), anchor=anchor)
    if as_json:
        click.echo(json.dumps(_plain(found.to_json()), indent=1))
        return
    _print_evaluation(found)


def _print_evaluation(found: Evaluation) -> None:
    for name, value in found.overall.items():
        if math.isfinite(value):
            click.echo(f"{name:34} {value:.4g}")
    if found.overall["num_measured"]:
        for title in ("by_source", "by_gpu", "by_layout"):
            click.echo(f"\n{title}\n{_table(getattr(found, title))}")
        sweeps = _table(found.sweeps) if len(found.sweeps) else "No sweep_id has four measured runs or more, so no ranking was judged."
        click.echo(f"\nsweeps\n{sweeps}")
    else:
        click.echo("\nNo row has a measured step time, so only memory was compared.")
    if found.memory["num_measured"]:
        click.echo("\npeak memory\n" + "\n".join(f"{name:34} {value:.4g}" for name, value in found.memory.items()))
    else:
        click.echo("\nNo row has a measured peak memory (peak_mem_gib), so only times were compared.")


@click.command(short_help="Refit the constants on your RUNS.csv.")
@click.argument("runs", metavar="RUNS.csv")
@click.option("-o", "--out", required=True, metavar="FILE", help="Calibration file to write.")
@_ARCH
@_CALIBRATION
def calibrate(runs: str, out: str, arch: str | None, calibration: str | None) -> None:
    """Refit the constants on your own measured RUNS.csv, staying near the shipped ones; says by cross-validation whether it helps."""
    from advisor.assemble import read_calibration
    from advisor.measure.calibrate import calibrate_runs
    from cost_models import calibration_toml

    check_output(out, runs, arch, calibration)
    result = calibrate_runs(runs, arch_csv=arch, calibration=read_calibration(calibration))
    write_text(Path(out), calibration_toml(result.calibration))
    after = "after, on runs left out" if result.num_runs > 1 else "after, on the run itself"
    for word, error in (("before", result.error_before), (after, result.error_after)):
        click.echo(f"{word:24} " + "  ".join(f"{name} {value:.1%}" for name, value in error.items()))
    if len(result.moved):
        click.echo(_table(result.moved))
    click.echo(f"refitted on {counted(result.num_runs, 'run')}, written to {out}; use it with --calibration {out}")


def check_output(out: str, *inputs: str | None) -> None:
    """Refuse, before any work, a file that can't be written or that is read.

    Raises:
        AdvisorError: with another file to choose.
    """
    path, hint = Path(out), "Choose another file with -o."
    if not out or path.is_dir():
        raise AdvisorError(f"{out!r} is no file to write.", hint=hint)
    for name in inputs:
        if name is not None and path.exists() and Path(name).exists() and path.samefile(name):
            raise AdvisorError(f"{out} is a file that is read.", hint=hint)


def write_text(path: Path, text: str) -> None:
    """Write a file whole, or not at all.

    Raises:
        AdvisorError: it can't be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise AdvisorError(f"{path} can't be written ({error.strerror}).", hint="Choose another file with -o.") from error


def _table(frame: pd.DataFrame) -> str:
    return frame.to_string(float_format=lambda v: f"{v:.4g}", max_rows=60)


def _plain(value: Any) -> Any:
    """JSON without NaN and numpy scalars."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and math.isnan(value) else value
