"""Runs many train files in one torchrun: start-up and imports are paid once, each cell runs in its own forked process.

    torchrun --nproc-per-node 2 harness.py cells.json

A cell is {"name", "train", "args", "cwd"}. Each rank writes `<out>/<name>.<rank>.json`: exit code, standard output and, after every optimizer
step, what that optimizer holds on this rank. Nothing in the train files is changed.
"""

import contextlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


def holdings(optimizer, *_):
    """What an optimizer holds here: elements of parameters and states, placements of sharded ones, world size."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    local = [p.to_local() if isinstance(p, torch.distributed.tensor.DTensor) else p for p in params]
    states = [s for p in optimizer.state.values() for s in p.values() if isinstance(s, torch.Tensor) and s.dim()]
    locals_ = [s.to_local() if isinstance(s, torch.distributed.tensor.DTensor) else s for s in states]
    dtensors = [p for p in params if isinstance(p, torch.distributed.tensor.DTensor)]
    return {
        "optimizer": type(optimizer).__name__,
        "num_params": sum(p.numel() for p in params),
        "num_local": sum(p.numel() for p in local),
        "num_state": sum(s.numel() for s in locals_),
        "placements": sorted({str(tuple(p.placements)) for p in dtensors}),
        "meshes": sorted({str(tuple(p.device_mesh.shape)) for p in dtensors}),
        "num_plain": len(params) - len(dtensors),
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
    }


def run_cell(cell, number, out):
    """In the forked process: become the train file."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # a rendezvous of its own
    os.chdir(cell["cwd"])
    os.environ.update(cell.get("env", {}))
    steps = []
    register_optimizer_step_post_hook(lambda optimizer, *_: steps.append(holdings(optimizer)))
    sys.argv = [cell["train"], *cell["args"]]
    sys.path[0] = str(Path(cell["train"]).parent)
    code, log = 0, out / f"{cell['name']}.{os.environ['RANK']}.txt"
    with log.open("w") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        try:
            runpy.run_path(cell["train"], run_name="__main__")
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
            print(stop.code)
        except BaseException:
            traceback.print_exc()
            code = 1
    result = {"code": code, "steps": steps, "output": log.read_text()}
    (out / f"{cell['name']}.{os.environ['RANK']}.json").write_text(json.dumps(result))
    os._exit(code)


def main():
    spec = json.loads(Path(sys.argv[1]).read_text())
    with contextlib.suppress(ImportError):
        import deepspeed  # noqa: F401
    with contextlib.suppress(ImportError):
        import transformers.models.llama.modeling_llama  # noqa: F401
    for number, cell in enumerate(spec["cells"], start=1):
        child = os.fork()
        if child == 0:
            run_cell(cell, number, Path(spec["out"]))
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
