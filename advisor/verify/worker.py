"""Runs cells one after the other under torchrun: imports are paid once, each cell is a forked process that may crash, hang or exit.

    torchrun --nproc-per-node 2 -m advisor.verify.worker cells.json

Each rank leaves `<name>.<rank>.json`: exit status and what was watched; and `<name>.<rank>.txt`: what was printed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_POLL_S = 0.02
#: Seconds for the other ranks, once one has ended with an error, to end by themselves; and for a stack to be printed before a kill.
_GRACE_S, _LAST_WORDS_S = 3.0, 3.0
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run the cells of the file given."""
    spec = json.loads(Path(arguments[0]).read_text(encoding="utf8"))
    rank, out = int(os.environ["RANK"]), Path(spec["out"])
    os.environ.pop("PYTHONSAFEPATH", None)
    for name in spec["imports"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import advisor.verify.watch  # noqa: F401  torch is imported here, once

    gc.freeze()  # else each cell's garbage collection would write to, and so copy, all that was imported
    for cell in spec["cells"]:
        if cell.get("alone") and rank != 0:
            continue
        if rank == 0:
            (out / "current").write_text(cell["name"], encoding="utf8")
        child = os.fork()
        if child == 0:
            _become(cell, out, rank)
        _wait(child, cell, out, rank)
    return 0


def _wait(child: int, cell: Mapping[str, Any], out: Path, rank: int) -> None:
    """Until the cell's process ends; it is killed after its time, and soon after another rank failed."""
    mark, before = out / f"{cell['name']}.failed", out / f"{cell.get('after', '')}.failed"
    deadline, reason = time.monotonic() + cell["limit_s"], ""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if mark.exists() and deadline > time.monotonic() + _GRACE_S:
            deadline, reason = time.monotonic() + _GRACE_S, "ended because another rank failed"
        if before.exists():
            deadline, reason = 0.0, f"{cell['after']} failed"
        if time.monotonic() > deadline:
            reason = reason or f"did not end within {cell['limit_s']:.0f} s"
            _kill_group(child)
        time.sleep(_POLL_S)
    _kill_group(child)  # what it started itself
    code = os.waitstatus_to_exitcode(status)
    file = out / f"{cell['name']}.{rank}.json"
    record = json.loads(file.read_text(encoding="utf8")) if file.is_file() else {"code": code or 1, "steps": []}
    if code or record["code"] or reason:
        mark.touch()
    file.write_text(json.dumps({**record, "code": code or record["code"], "reason": reason}), encoding="utf8")


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _become(cell: Mapping[str, Any], out: Path, rank: int) -> None:
    """In the forked process: become the train file. Never returns."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(0, 0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    stem = out / f"{cell['name']}.{rank}"
    output = os.open(f"{stem}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(max(cell["limit_s"] - _LAST_WORDS_S, 1.0), file=2)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(cell["port"]), **cell.get("env", {})}
    from advisor.verify.watch import Watch

    watch = Watch(cell)
    code = _run(watch, cell)
    sys.stdout.flush()
    sys.stderr.flush()
    Path(f"{stem}.json").write_text(json.dumps({"code": code, **watch.record()}), encoding="utf8")
    os._exit(0)


def _run(watch: Any, cell: Mapping[str, Any]) -> int:
    from advisor.verify import reference
    from advisor.verify.watch import Finished

    try:
        watch.install()
        if cell.get("alone") and cell["form"] == "functions":
            reference.train_functions(cell)
        elif cell.get("alone"):
            reference.train_script(cell)
        else:
            reference.without_shuffling()
            if "accelerate_config" in cell:
                os.environ |= _accelerate_environment(cell["accelerate_config"])
            sys.argv = [cell["file"], *cell["args"]]
            sys.path.insert(0, str(Path(cell["file"]).parent))
            runpy.run_path(cell["file"], run_name="__main__")
    except Finished:
        return 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _accelerate_environment(config: str) -> dict[str, str]:
    """What `accelerate launch` sets for its processes from a configuration file, by its own code."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    arguments = launch_command_parser().parse_args(["--config_file", config, "train.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        made = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        made = prepare_multi_gpu_env(arguments)
    found = {key: value for key, value in made.items() if os.environ.get(key) != value and not key.startswith("MASTER_")}
    return found if os.environ.get("CUDA_VISIBLE_DEVICES") != "" else {**found, "ACCELERATE_USE_CPU": "true"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
