"""The parent's side: starts the child, holds it to its time, and turns what it left into a profile or an error."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from advisor.errors import ScriptError
from advisor.profiling import processes
from advisor.profiling.child import one_line
from advisor.profiling.events import Event, MeasuredCall, calls_of
from advisor.profiling.schema import StepProfile, load_profile
from advisor.profiling.source import Source, missing_modules

_TAIL_LINES, _LINE_BYTES = 12, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildFailure:
    """Why a child left no profile."""

    kind: str  # import, exit, crash, no-step, input, contract, timeout, died
    message: str
    hint: str
    tail: str
    details: str = ""
    host_model_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a live run found."""

    device: str
    step_time_s: float
    idle_s: float
    peak_memory_bytes: int | None
    on_device: bool  # seconds are those of a GPU's kernels
    calls: list[MeasuredCall]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One capture: what is run, and how."""

    source: Source
    script: str
    args: tuple[str, ...]
    batch_size: int | None
    verbose: bool
    deadline: float  # time.monotonic() when everything must be over

    def left_s(self) -> float:
        return self.deadline - time.monotonic()


def run_child(job: Job, way: str, **extra: Any) -> StepProfile | ChildFailure:
    """Run the script in a child process of its own group.

    Args:
        job: what is run.
        way: "fake" or "real".
        extra: further fields of the child's request.
    """
    with _working_folder() as folder:
        result = _run_in(folder, job, way, extra)
        return load_profile(folder / "profile") if result is None else result


def run_live(job: Job, profile: StepProfile, *, warm_up_steps: int, timed_steps: int) -> Measurement | ChildFailure:
    """Run the script for real and measure a step of it.

    Args:
        job: what is run.
        profile: the traced step, whose operators are looked for.
        warm_up_steps: steps before the clock starts.
        timed_steps: steps timed before one is profiled.
    """
    updates = profile.meta.num_optimizers if profile.meta.optimizer != "hand-written" else 0
    with _working_folder() as folder:
        failure = _run_in(folder, job, "live", {
            "warm_up_steps": warm_up_steps, "timed_steps": timed_steps, "updates_per_step": updates, "backward_per_step": profile.meta.accumulation,
            "launcher_environment": any(h["id"] == "already-distributed" for h in profile.meta.hazards),
        })  # fmt: skip
        return _read_measurement(folder, profile) if failure is None else failure


def _read_measurement(folder: Path, profile: StepProfile) -> Measurement:
    summary = json.loads((folder / "live.json").read_text(encoding="utf8"))
    events = [Event.from_list(e) for e in json.loads((folder / "events.json").read_text(encoding="utf8"))]
    calls = calls_of(events, summary["paths"], set(profile.operators["operator"]), on_device=summary["on_device"])
    return Measurement(calls=calls, **{f: summary[f] for f in ("device", "step_time_s", "idle_s", "peak_memory_bytes", "on_device")})


@contextlib.contextmanager
def _working_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="advisor-", ignore_cleanup_errors=True) as name:
        (Path(name) / "tmp").mkdir()
        yield Path(name)


def _run_in(folder: Path, job: Job, way: str, extra: dict[str, Any]) -> ChildFailure | None:
    """Run the child; None when it left what was asked for."""
    request = {
        "script": job.script, "path": str(job.source.path), "entry": job.source.entry, "form": job.source.form,
        "declared": list(job.source.declared), "imports": list(job.source.imports), "facts": job.source.facts, "args": list(job.args),
        "folder": str(folder), "way": way, "batch_size": job.batch_size, **extra,
    }  # fmt: skip
    (folder / "request.json").write_text(json.dumps(request), encoding="utf8")
    status, tail = _run(job, folder, way)
    if status is None:
        return _timed_out(job, tail)
    if (folder / "profile" / "meta.json").is_file() or (folder / "live.json").is_file():
        return None
    failure = folder / "failure.json"
    if failure.is_file():
        return ChildFailure(tail=tail, **json.loads(failure.read_text(encoding="utf8")))
    return _died(job, status, tail)


def _environment(folder: Path) -> dict[str, str]:
    environment = dict(os.environ)
    home = str(Path(__file__).resolve().parents[2])  # last on the path: the advisor is found, nothing of the script's is hidden
    environment.pop("PYTHONWARNINGS", None)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (environment.get("PYTHONPATH", ""), home) if p)
    environment.update({
        "TMPDIR": str(folder / "tmp"), "PYTHONDONTWRITEBYTECODE": "1", "WANDB_MODE": "disabled", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        processes.MARK: str(folder), "TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "Agg", "TRANSFORMERS_VERBOSITY": "error",
    })  # fmt: skip
    return environment


def _run(job: Job, folder: Path, way: str) -> tuple[int | None, str]:
    """Exit status (None: out of time) and the last lines of output."""
    environment = _environment(folder)
    if way != "live":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["PYTORCH_JIT"] = "0"  # scripted functions run as Python, which the trace follows
        environment.setdefault("OMP_NUM_THREADS", "2")
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "advisor.profiling.child", str(folder / "request.json")], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=environment, start_new_session=True,
    )  # fmt: skip
    lines: deque[str] = deque(maxlen=_TAIL_LINES)
    try:
        reader = threading.Thread(target=_drain, args=(child.stdout, lines, job.verbose), daemon=True)
        reader.start()
        status: int | None = child.wait(timeout=max(job.left_s(), 0.1))
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _end_all(child, folder)
    reader.join(timeout=2.0)
    return status, "\n".join(lines)


def _drain(stream: IO[bytes] | None, lines: deque[str], verbose: bool) -> None:
    """Keep the tail of the child's output, whatever its amount; show all of it where asked."""
    if stream is None:
        return
    with contextlib.suppress(ValueError, OSError):
        while chunk := stream.readline(_LINE_BYTES):
            text = chunk.decode("utf8", "replace").rstrip("\n")
            if text.strip():
                lines.append(text[:500])
            if verbose:
                sys.stderr.write(text + "\n")


def _end_all(child: subprocess.Popen[bytes], folder: Path) -> None:
    """End the child and everything that it started, also what left its group and session."""
    processes.end(processes.descendants(child.pid) if child.poll() is None else set())
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5.0)
    processes.end(processes.marked(f"{processes.MARK}={folder}"))


def _timed_out(job: Job, tail: str) -> ChildFailure:
    return ChildFailure(kind="timeout", message=f"{job.script} took no complete training step within the time limit.",
                        hint="Give more time with --profile-timeout, or arguments that make the script's start shorter.", tail=tail)  # fmt: skip


def _died(job: Job, status: int, tail: str) -> ChildFailure:
    if status < 0:
        name = signal.Signals(-status).name if -status in {s.value for s in signal.Signals} else str(-status)
        message = f"{job.script} was ended by {name} before it took a training step."
        hint = "This is often a lack of memory: try a smaller batch." if name == "SIGKILL" else "Run the script by itself to see why."
        return ChildFailure(kind="died", message=message, hint=hint, tail=tail)
    return ChildFailure(kind="exit", message=f"{job.script} ended by itself with status {status} before it took a training step.",
                        hint="Give the script's own arguments after --.", tail=tail)  # fmt: skip


def script_error(job: Job, failure: ChildFailure) -> ScriptError:
    """The error that the user sees."""
    if failure.kind == "import":
        return import_error(job, failure)
    hint = failure.hint
    if failure.tail and failure.kind not in {"no-step", "contract"} and not job.verbose:
        hint = f"{hint} Its last output: {one_line(failure.tail.splitlines()[-1])[:200]}".strip()
    return ScriptError(failure.message, hint=hint)


def import_error(job: Job, failure: ChildFailure) -> ScriptError:
    """All missing modules at once, the first of the text first."""
    missing = missing_modules(job.source)
    if failure.details and failure.details.split(".")[0] not in missing:
        missing.append(failure.details)
    if not missing:
        return ScriptError(
            f"{job.script} can't be imported: {failure.message}.", hint="Install what is missing in the Python that runs the advisor."
        )
    named = " and ".join(missing) if len(missing) < 3 else ", ".join(missing)
    verb = "is" if len(missing) == 1 else "are"
    return ScriptError(f"{job.script} imports {named}, which {verb} not installed here.",
                       hint="Install what is missing in the Python that runs the advisor, or run the advisor from the folder where it lies.")  # fmt: skip
