"""The child process: runs the user's script in a world of its own and leaves a profile, or the reason why there is none.

    python -m advisor.profiling.child REQUEST.json

The request names a folder; `profile/` or `failure.json` appears in it. Nothing is printed here: stdout and stderr are the script's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from advisor.profiling import processes

_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the parent asks for."""

    script: str  # as the user gave it
    path: str
    entry: str
    form: str
    declared: list[str]
    imports: list[str]
    facts: dict[str, str]
    args: list[str]
    folder: str
    way: str = "fake"  # fake, real (the same recorder on real CPU tensors) or live
    batch_size: int | None = None
    launcher_environment: bool = False
    num_devices: int = 8  # that the script is told of
    guesses: bool = False  # make up shapes that depend on values which a trace does not have
    warm_up_steps: int = 1
    timed_steps: int = 1
    updates_per_step: int = 1  # optimizer steps in a training step; 0: updated by hand
    backward_per_step: int = 1
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why there is no profile."""

    kind: str  # import, exit, crash, no-step, input, contract, unsupported
    message: str
    hint: str = ""
    details: str = ""
    host_model_bytes: int = 0


def main() -> None:
    """Entry point of the child."""
    request = Request(**json.loads(Path(sys.argv[1]).read_text(encoding="utf8")))
    folder = Path(request.folder)
    processes.adopt_orphans()
    _end_with_parent(folder)
    own = os.getpid()
    try:
        failure = run(request)
    except Exception as error:
        failure = Failure(kind="crash", message=f"{request.script} could not be recorded: {type(error).__name__}: {one_line(str(error))}",
                          details=traceback.format_exc()[-8000:])  # fmt: skip
    if os.getpid() != own:  # a copy of this process that the script forked
        os._exit(0)
    if failure is not None:
        (folder / "failure.json").write_text(json.dumps(asdict(failure)), encoding="utf8")
    leave()


def leave() -> None:
    """End this process and all that it started; no clean-up of the script's may hang us."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
    processes.end(processes.descendants(os.getpid()))
    os._exit(0)


def _end_with_parent(folder: Path) -> None:
    """End this process, what it started and its folder when its parent is gone, so that nothing is left behind."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        processes.end(processes.descendants(os.getpid()))
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run(request: Request) -> Failure | None:
    """Run the script the way that was asked for; None when a profile was written."""
    from advisor.profiling import sandbox

    if request.launcher_environment:
        from advisor.profiling.single_process import LAUNCHER_ENVIRONMENT

        os.environ.update({k: v for k, v in LAUNCHER_ENVIRONMENT.items() if k not in os.environ})
    if request.way == "live":
        from advisor.profiling import live

        sandbox.keep_saved(sandbox.protect_files(Path(request.folder)))
        return live.run(request)
    from advisor.profiling import traced

    sandbox.keep_saved(sandbox.protect_files(Path(request.folder)))
    return traced.run(request)


def run_script(request: Request, num_steps: int, device: str, batch_size: int | None) -> BaseException | None:
    """Run the user's code to its end, to a Stop, or to its exception, which is returned."""
    from advisor.profiling import functions
    from advisor.profiling.watcher import Stop

    folder = Path(request.path).resolve().parent
    sys.path.insert(0, str(folder))
    sys.argv = [request.path, *request.args]
    try:
        with _out_of_the_way(folder):
            if request.form == "functions":
                namespace = runpy.run_path(request.path, run_name="__advisor__")
                functions.train(namespace, request.entry, batch_size, num_steps=num_steps, device=device)
            else:
                runpy.run_path(request.path, run_name="__main__")
    except Stop:
        return None
    except BaseException as error:
        return error
    return None


@contextlib.contextmanager
def _out_of_the_way(folder: Path) -> Iterator[None]:
    """While the script runs, `import advisor` and `import cost_models` find modules of these names beside it, where it has them."""
    hidden: dict[str, Any] = {}
    for name in ("advisor", "cost_models"):
        own = Path(getattr(sys.modules.get(name), "__file__", None) or __file__).resolve()
        beside = [p for p in (folder / f"{name}.py", folder / name / "__init__.py") if p.is_file() and p.resolve() != own]
        if beside:
            hidden.update({k: m for k, m in sys.modules.items() if k == name or k.startswith(f"{name}.")})
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)


def explain(request: Request, error: BaseException | None, watcher: Any) -> Failure:
    """Why a script that has ended took no step."""
    name = request.script
    if type(error).__name__ == "OneDeviceWanted":
        return Failure(kind="one-device", message=f"{name} wraps its model in DataParallel.")
    if isinstance(error, ModuleNotFoundError):
        return Failure(kind="import", message=str(error), details=error.name or "")
    if isinstance(error, SystemExit):
        code = error.code if error.code is not None else 0
        said = f" with status {code}" if isinstance(code, int) else f" ({one_line(str(code))})"
        return Failure(kind="exit", message=f"{name} ended by itself{said} before it took a training step.",
                       hint="Give the script's own arguments after --, e.g. `advise train.py -- --data DIR`.")  # fmt: skip
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str):
        return Failure(kind="input", message=f"{_where(request, error)} opens {error.filename!r}, which isn't there.",
                       hint=f"Run the advisor in the folder that the path starts from (now {Path.cwd()}), or give another path after --, "
                            "as in `advise train.py -- --data DIR`.")  # fmt: skip
    if isinstance(error, EOFError):
        return Failure(kind="input", message=f"{_where(request, error)} asks for input, and there is nobody to answer.",
                       hint="Give the answers as arguments or defaults.")  # fmt: skip
    if type(error).__name__ == "ContractError":
        return Failure(kind="contract", message=f"{name}: {one_line(str(error))}.", hint=error.hint)  # type: ignore[union-attr]
    if error is not None and "NestedTensor" in str(error):
        return Failure(kind="unsupported", message=f"{_where(request, error)} works on nested tensors, which the advisor can't follow.",
                       hint="Let the script pad its sequences to one length for the advisor, e.g. by an argument after --.",
                       details=one_line(str(error)))  # fmt: skip
    if error is not None:
        text = one_line(str(error))
        message = f"{_where(request, error)} raised {type(error).__name__}" + (f": {text}" if text else ".")
        return Failure(kind="crash", message=message, hint="Run the script by itself to see the whole traceback, or show it here with --verbose.",
                       details="".join(traceback.format_exception(error))[-8000:])  # fmt: skip
    if watcher is not None and watcher.num_backward:
        return Failure(kind="no-step", message=f"{name} ran a backward pass but never updated its parameters.",
                       hint="The advisor looks at one training step: forward, backward and the optimizer's step.")  # fmt: skip
    what = "called a model but never backward()" if watcher is not None and watcher.roots else "ended without calling a model"
    return Failure(kind="no-step", message=f"{name} never took a training step: it {what}.",
                   hint="Give a script that trains, or declare build_model() and make_batch(batch_size) in it.")  # fmt: skip


def one_line(text: str) -> str:
    """What a script said, as part of a sentence: without escape codes, control characters and line ends, and not endless."""
    plain = re.sub(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)", "", text[:4000])
    plain = "".join(c if c.isprintable() else " " for c in plain.encode("utf8", "replace").decode())
    short = " ".join(plain.split())
    return short if len(short) <= _MESSAGE_CHARACTERS else short[: _MESSAGE_CHARACTERS - 3] + "..."


def _where(request: Request, error: BaseException) -> str:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == request.path]
    return f"{request.script}:{lines[-1]}" if lines else request.script


if __name__ == "__main__":
    main()
