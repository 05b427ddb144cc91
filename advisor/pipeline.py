"""The stages in order, on one screen: capture, shape, search, classify, judge, report, write. No arithmetic here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.errors import AdvisorError
from advisor.options import PlanOptions, ProfileOptions, split_options
from advisor.progress import Progress, quiet

if TYPE_CHECKING:
    from advisor.profiling.schema import StepProfile
    from advisor.report.report import Report


def profile(script: str | Path, *, progress: Progress = quiet, **options: Any) -> StepProfile:
    """Look at one training step of a script.

    Args:
        script: path of a Python file, or `path.py:ENTRY`; a saved profile's folder is loaded instead.
        progress: called with a short phrase at each stage.
        **options: fields of ProfileOptions.

    Raises:
        AdvisorError: the script is missing, broken or never takes a step.
    """
    seeing, _ = split_options(options)
    return _capture(script, seeing, progress)


def plan(step: StepProfile, *, progress: Progress = quiet, **options: Any) -> Report:
    """Rank the ways to train a profiled step on a cluster; needs no torch, GPU or script, and writes nothing.

    Args:
        step: from `profile`, or loaded from a folder.
        progress: called with a short phrase at each stage.
        **options: fields of PlanOptions.

    Raises:
        AdvisorError: unknown hardware, or no plan fits.
    """
    from advisor.profiling.schema import StepProfile

    if not isinstance(step, StepProfile):
        raise AdvisorError(
            f"plan() takes what profile() returns, not {step!r}.", hint="Write advisor.plan(advisor.profile(SCRIPT_OR_FOLDER))."
        )
    _, planning = split_options(options)
    return _plan(step, planning, progress)[0]


def advise(script: str | Path, *, out: str | Path | None = None, progress: Progress = quiet, **options: Any) -> Report:
    """Profile a script, rank its parallel plans and, with `out`, write report and files there.

    Args:
        script: path of a Python file, or `path.py:ENTRY`; or the folder of a saved profile.
        out: folder for the advice; None writes nothing.
        progress: called with a short phrase at each stage.
        **options: fields of ProfileOptions and PlanOptions.

    Raises:
        AdvisorError: one sentence and a hint on what to change.
    """
    from advisor.assemble import check_cluster
    from advisor.report.output import check_output, write_advice

    seeing, planning = split_options(options)
    check_cluster(planning)
    if out is not None and not isinstance(out, str | Path):
        raise AdvisorError(f"out is a folder's path, not {out!r}.")
    if out is not None:
        check_output(Path(out))
    step = _capture(script, seeing, progress)
    report, write_plans = _plan(step, planning, progress, seeing, Path(out) if out is not None else None)
    if out is None:
        return report
    progress("writing files")
    return write_advice(report, Path(out), write_plans)


def _capture(script: str | Path, seeing: ProfileOptions, progress: Progress) -> StepProfile:
    from advisor.profiling import capture
    from advisor.profiling.schema import load_profile

    if not isinstance(script, str | Path):
        raise AdvisorError(f"The script is given by its path, not by {script!r}.", hint='For example advisor.advise("train.py").')
    if Path(script).is_dir():
        return load_profile(Path(script))
    progress(f"looking at one step of {Path(script).name}")
    return capture(
        str(script), entry=seeing.entry, args=list(seeing.args), capture=seeing.capture, timeout_s=seeing.profile_timeout,
        batch_size=seeing.batch_size, verbose=seeing.verbose, progress=progress,
    )  # fmt: skip


def _plan(
    step: StepProfile, planning: PlanOptions, progress: Progress, seeing: ProfileOptions | None = None, out: Path | None = None
) -> tuple[Report, Callable[[Path], Sequence[str]]]:
    """Everything after the profile; returns the report and what writes its plans' folders."""
    from advisor import assemble

    situation = assemble.situation(step, planning, progress)
    progress("pricing plans")
    result = assemble.searched(situation)
    if not result.candidates:
        raise assemble.no_plan(situation, result)
    progress("judging")
    return assemble.report(situation, result, seeing or ProfileOptions(), out)


__all__ = ["AdvisorError", "advise", "plan", "profile"]
