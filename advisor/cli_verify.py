"""The command that runs an advice's plans on a few local processes and says what holds."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click

from advisor.errors import AdvisorError
from advisor.options import ENGINE_NAMES
from advisor.progress import shown

_NOTHING_RAN = 3  # exit status
_LEAST_STEPS = 4


@click.command(short_help="Run the plans of ADVICE_DIR here and compare.")
@click.argument("advice_dir", metavar="ADVICE_DIR")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
@click.option("--plan", type=int, metavar="K", help="Rank of the only plan to verify; default: all that have files.")
@click.option("--engine", type=click.Choice(ENGINE_NAMES), help="The only engine to verify; default: all that the plan has files for.")
@click.option(
    "--nproc", type=int, metavar="N", help="Processes at most; default: 2 for each kind of parallelism, up to 4 or the GPUs here."
)
@click.option("--steps", type=int, default=_LEAST_STEPS, show_default=True, metavar="S", help="Optimizer steps that are compared.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON instead of tables.")
def verify(  # noqa: PLR0917 - click passes them by name
    advice_dir: str, script_args: tuple[str, ...], plan: int | None, engine: str | None, nproc: int | None, steps: int, as_json: bool
) -> None:
    """Run the plans of ADVICE_DIR (or the one whose folder is given), shrunk to a few local processes, and compare them with one process alone.

    Losses, gradient norms, parameters, sharding and collectives are checked, step time and memory measured beside the prediction, and a run
    that loses a rank must resume from its checkpoint. Exit status 1 where something failed, 3 where nothing could be run
    here. Arguments after -- go to the script in place of the plan's own.
    """
    from advisor.report.plain import frozen, thawed
    from advisor.report.terminal import report_console
    from advisor.verify import Request, verify_advice
    from advisor.verify.table import print_verdicts

    if nproc is not None and nproc < 1:
        raise AdvisorError(f"--nproc must be at least 1, not {nproc}.")
    if steps < _LEAST_STEPS:
        raise AdvisorError(
            f"--steps must be at least {_LEAST_STEPS}, not {steps}: one to warm up, one to count collectives in, two to time."
        )
    with _stopping_once(), shown(lines=True) as progress:
        request = Request(engine=engine or "", num_processes=nproc, num_steps=steps, args=script_args, progress=progress)
        verdicts = verify_advice(Path(advice_dir), request, plan)
    if as_json:
        click.echo(json.dumps({"plans": [thawed(frozen(v.to_json())) for v in verdicts]}, indent=1, allow_nan=False))
    else:
        print_verdicts(verdicts, report_console())
    if any(v.failed for v in verdicts):
        sys.exit(1)
    if not any(v.ran for v in verdicts):
        click.echo("advise: nothing could be run here; the table says why", err=True)
        sys.exit(_NOTHING_RAN)


@contextlib.contextmanager
def _stopping_once() -> Iterator[None]:
    """Ctrl-C and SIGTERM interrupt what is being done, the first time: a second signal would leave its processes and files behind."""
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop(_number: int, _frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, stop) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
