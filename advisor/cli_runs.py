"""Commands on tables of measured runs: predict, evaluate, calibrate."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from advisor.errors import AdvisorError
from advisor.progress import shown
from advisor.words import counted

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
    constants = read_calibration(calibration)
    with shown() as progress:
        table = predict_runs(runs, arch_csv=arch, calibration=constants, anchor=anchor, progress=progress)
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
    from advisor.report.plain import frozen, thawed
    from advisor.report.terminal import print_blocks, report_console
    from advisor.runs_report import evaluation_blocks

    constants = read_calibration(calibration)
    with shown() as progress:
        found = evaluate_runs(runs, arch_csv=arch, calibration=constants, anchor=anchor, progress=progress)
    if as_json:
        click.echo(json.dumps(thawed(frozen(found.to_json())), indent=1, allow_nan=False))
    else:
        print_blocks(evaluation_blocks(found, constants), report_console())


@click.command(short_help="Refit the constants on your RUNS.csv.")
@click.argument("runs", metavar="RUNS.csv")
@click.option("-o", "--out", required=True, metavar="FILE", help="Calibration file to write.")
@_ARCH
@_CALIBRATION
def calibrate(runs: str, out: str, arch: str | None, calibration: str | None) -> None:
    """Refit the constants on your own measured RUNS.csv, staying near the shipped ones; says by cross-validation whether it helps."""
    from advisor.assemble import read_calibration
    from advisor.measure.calibrate import calibrate_runs
    from advisor.report.terminal import print_blocks, report_console
    from advisor.runs_report import calibration_blocks
    from cost_models import calibration_toml

    check_output(out, runs, arch, calibration)
    constants = read_calibration(calibration)
    with shown() as progress:
        result = calibrate_runs(runs, arch_csv=arch, calibration=constants, progress=progress)
    write_text(Path(out), calibration_toml(result.calibration))
    print_blocks(calibration_blocks(result), report_console())
    click.echo(f"\nrefitted on {counted(result.num_runs, 'run')}, written to {out}; use it with --calibration {shlex.quote(out)}")


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
    """Write a file whole, or not at all. What a link points to is written, and a device or pipe is written to, not replaced.

    Raises:
        AdvisorError: it can't be written.
    """
    target = path.resolve()
    part = target.with_name(f".{target.name}.part")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf8")
            return
        part.write_text(text, encoding="utf8")
        part.replace(target)
    except OSError as error:
        if part.is_file():
            part.unlink()
        raise AdvisorError(f"{path} can't be written ({error.strerror}).", hint="Choose another file with -o.") from error
