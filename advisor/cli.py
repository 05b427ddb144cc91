"""Command line: parse, call the pipeline, print. No arithmetic."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from advisor.cli_runs import calibrate, check_output, evaluate, predict, write_text
from advisor.cli_verify import verify
from advisor.errors import AdvisorError
from advisor.options import CAPTURES, ENGINE_NAMES, OBJECTIVES, PRECISIONS
from advisor.progress import shown
from advisor.usage import check_command, said_plainly
from advisor.words import counted, make_streams_readable

_INTERRUPTED = 130


class _Advise(click.Group):
    """A group whose default command is `run`: `advise train.py` means `advise run train.py`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        if args[0] not in {*self.commands, "--help", "-h", "--version"}:
            if not Path(args[0]).exists():
                check_command(args[0], list(self.commands))
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - as click calls it
        return list(self.commands)  # in the order of use


@click.group(cls=_Advise, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, no_args_is_help=True)
@click.version_option(package_name="parallel-advisor", prog_name="advise")
def cli() -> None:
    """How to train a PyTorch model in parallel: a ranked plan with reasons, and files that run.

    \b
      advise train.py                                     plan for this machine's GPUs (or 8 x H100)
      advise train.py --gpu a100-sxm-80gb --nodes 4 -- --batch-size 8
      advise run --help                                   all options

    SCRIPT is an unmodified training script, or a file that declares build_model() and make_batch(batch_size).
    """  # noqa: D301 - click reads \b as a character


def _options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


_profile_options = _options(
    click.option("--entry", metavar="NAME", help="Function that builds the model, where the script has several."),
    click.option(
        "--capture", type=click.Choice(CAPTURES), default="auto", show_default=True, help="Trace without a device, measure live, or both."
    ),
    click.option("--profile-timeout", type=float, default=300.0, show_default=True, metavar="S", help="Seconds the script may run for."),
    click.option("--batch-size", type=int, metavar="N", help="Batch size given to make_batch()."),
    click.option("-v", "--verbose", is_flag=True, help="Show what the script prints."),
)
_plan_options = _options(
    click.option("--gpu", metavar="NAME", help="GPU of the catalogue, e.g. h100-sxm-80gb; `advise gpus` lists them."),
    click.option("--gpus-per-node", type=int, metavar="N", help="GPUs in a node; default: as usual with that GPU."),
    click.option("--nodes", type=int, metavar="M", help="Number of nodes; default: 1."),
    click.option("--intra", metavar="LINK", help="Link inside a node, e.g. nvlink-4, pcie-4."),
    click.option("--inter", metavar="LINK", help="Network of a node, all its adapters together, e.g. ib-ndr-8x (eight), ethernet-100g."),
    click.option("--cluster", metavar="FILE", help="TOML file of a cluster, e.g. from `advise measure`."),
    click.option("--global-batch", type=int, metavar="N", help="Samples per optimizer step; default: the script's own on each GPU."),
    click.option("--precision", type=click.Choice(PRECISIONS), help="Arithmetic of matrix products; default: the script's."),
    click.option("--optimizer", metavar="NAME", help="adamw, sgd, lion, adafactor, ...; default: the script's."),
    click.option(
        "--objective",
        type=click.Choice(OBJECTIVES),
        default="throughput",
        show_default=True,
        help="Fastest plan, least memory, or fewest GPUs that fit.",
    ),
    click.option(
        "--max-memory-share", type=float, default=0.95, show_default=True, metavar="X", help="Share of GPU memory a plan may take."
    ),
    click.option("--calibration", metavar="FILE", help="Constants refitted on your runs by `advise calibrate`."),
    click.option("--plans", type=int, default=3, show_default=True, metavar="K", help="Plans to write files for."),
    click.option(
        "--engine",
        multiple=True,
        type=click.Choice(ENGINE_NAMES),
        help="Engine to write files for, may be repeated; default: all that can.",
    ),
)
_output_options = _options(
    click.option(
        "-o",
        "--out",
        default="advice",
        show_default=True,
        metavar="DIR",
        help="Where the advice is written; an older advice there is replaced.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print report.json instead of the terminal report."),
)


@cli.command(name="run", short_help="Profile SCRIPT, rank its plans, write files that run.")
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
@_profile_options
@_plan_options
@_output_options
def run(script: str, script_args: tuple[str, ...], out: str, as_json: bool, **options: Any) -> None:
    """Profile SCRIPT, rank its parallel plans, write files that run. (The default command.)

    Arguments after -- go to the script.
    """
    from advisor.pipeline import advise

    with shown() as progress:
        report = advise(script, args=script_args, out=out, progress=progress, **options)
    _show(report, as_json)


@cli.command(short_help="Look at one step of SCRIPT and save it.")
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
@_profile_options
@click.option("-o", "--out", required=True, metavar="DIR", help="Folder for the profile.")
def profile(script: str, script_args: tuple[str, ...], out: str, **options: Any) -> None:
    """Look at one training step of SCRIPT and save it, to be planned elsewhere by `advise plan`."""
    from advisor.pipeline import profile as take
    from advisor.profiling.schema import save_profile

    folder = Path(out)
    _refuse_foreign(folder)
    with shown() as progress:
        step = take(script, args=script_args, progress=progress, **options)
    try:
        save_profile(step, folder)
    except OSError as error:
        raise AdvisorError(f"{out} can't be written ({error.strerror}).", hint="Choose another folder with -o.") from error
    click.echo(
        f"{step.meta.model_class}: {counted(step.meta.num_params, 'parameter')}, {counted(len(step.operators), 'operator')}, "
        f"{step.meta.source}; saved in {out}"
    )


@cli.command(short_help="Rank plans for a saved PROFILE.")
@click.argument("profile_dir", metavar="PROFILE")
@_plan_options
@_output_options
def plan(profile_dir: str, out: str, as_json: bool, **options: Any) -> None:
    """Rank plans for a saved PROFILE; needs no torch, no GPU and no script."""
    from advisor.pipeline import advise

    if not Path(profile_dir).is_dir():
        raise AdvisorError(f"{profile_dir} is not a folder.", hint="Make a profile with `advise profile SCRIPT -o DIR`.")
    with shown() as progress:
        report = advise(profile_dir, out=out, progress=progress, **options)
    _show(report, as_json)


@cli.command(short_help="Where the time went in a recorded TRACE.")
@click.argument("trace_file", metavar="TRACE")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def trace(trace_file: str, as_json: bool) -> None:
    """Say where the time went in a TRACE (.json, .json.gz) recorded with torch.profiler; CUDA, ROCm or CPU."""
    from advisor.report.plain import frozen, thawed
    from advisor.report.terminal import report_console
    from advisor.traces import print_summary, trace_summary

    summary = trace_summary(Path(trace_file))
    if as_json:
        click.echo(json.dumps(thawed(frozen(summary)), indent=1, allow_nan=False))
    else:
        print_summary(summary, report_console())


@cli.command(short_help="What a rule means and what holds of it.")
@click.argument("rule", required=False)
def explain(rule: str | None) -> None:
    """Say what a RULE means, why, and what holds of it; without RULE, list them."""
    from advisor.rulebook import explain as text
    from advisor.rulebook import load_rules

    click.echo(text(rule) if rule else "\n".join(f"{r.id:42} {r.title}" for r in load_rules()))


@cli.command(short_help="The catalogue's GPUs and their figures.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, also of the list.")
def gpus(name: str | None, as_json: bool) -> None:
    """List the catalogue's GPUs, or one with the source of each figure."""
    from cost_models import catalogue

    try:
        data: Any = catalogue.describe_gpu(name) if name else list(catalogue.gpu_names())
    except ValueError as error:
        raise AdvisorError(str(error)) from error
    click.echo(json.dumps(data, indent=1, default=str) if as_json or name else "\n".join(data))


@cli.command(short_help="Measure this machine's device.")
@click.option("-o", "--out", metavar="FILE", help="Cluster file to write; printed when left out.")
@click.option("--full", is_flag=True, help="More sizes and larger arrays: minutes instead of seconds.")
def measure(out: str | None, full: bool) -> None:
    """Measure this machine's device: matrix rates by size and dtype, memory, host copies, launch overhead."""
    from advisor.measure.cluster_file import to_toml
    from advisor.measure.here import cluster_here

    if out is not None:
        check_output(out)
    with shown() as progress:
        cluster, measurements = cluster_here(quick=not full, progress=progress)
    text = to_toml(cluster)
    if out is None:
        click.echo(text)
    else:
        write_text(Path(out), text)
        click.echo(
            f"{measurements.device_name}: measured in {measurements.duration_s:.3g} s, written to {out}; use it with --cluster {out}"
        )
    for warning in measurements.warnings:
        click.echo(f"advise: {warning}", err=True)


for _command in (predict, evaluate, calibrate, verify):
    cli.add_command(_command)


def _show(report: Any, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1, allow_nan=False))
        return
    from advisor.report.terminal import render_terminal, report_console

    render_terminal(report, report_console())


def _refuse_foreign(folder: Path) -> None:
    from advisor.profiling.schema import is_profile

    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not is_profile(folder))):
        raise AdvisorError(f"{folder} exists and is no profile.", hint="Choose another folder with -o.")


def _stop(error: AdvisorError) -> NoReturn:
    """End with what is wrong and what to try."""
    click.echo(f"advise: {error.message}", err=True)
    if error.hint:
        click.echo(f"  {error.hint}", err=True)
    sys.exit(error.exit_code)


@contextlib.contextmanager
def _cleaning_up() -> Iterator[None]:
    """SIGTERM ends the command as an exception does, so that its processes and temporary folders go with it."""

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    """Entry point: errors become one line and an exit code."""
    make_streams_readable()
    try:
        with _cleaning_up():
            status = cli.main(prog_name="advise", standalone_mode=False)
    except AdvisorError as error:
        _stop(error)
    except click.UsageError as error:
        _stop(said_plainly(error))
    except (click.Abort, KeyboardInterrupt):
        click.echo("advise: interrupted; nothing was written", err=True)
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        click.echo(f"advise: the result can't be printed ({error.strerror})", err=True)
        sys.exit(1)
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
