"""Runs many train files on a few ranks: imports are paid once for all of them, each rank of each cell is a forked process of its own.

    python harness.py cells.json

It sets what torchrun would set; that plans start under torchrun itself is for `test_launch_script_starts_the_plan` and `advise verify`.
A cell is {"name", "file", "args", "env", "port", "alone"}; "alone" runs on rank 0 only, without a process group. Each rank writes
`<out>/<name>.<rank>.json`: exit code, output and, after every optimizer step, what the optimizer holds on this rank. Nothing in the
train files is changed.
"""

import contextlib
import faulthandler
import gc
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard  # noqa: F401  imported once, before forking
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

TIME_LIMIT_S = 120  # of a cell; then it says where it hangs and ends


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def holdings(optimizer):
    """Elements of parameters and states on this rank, placements and meshes of the sharded ones."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [s for p in optimizer.state.values() for s in p.values() if isinstance(s, torch.Tensor) and s.dim()]
    sharded = [p for p in params if isinstance(p, DTensor)]
    return {
        "optimizer": type(optimizer).__name__,
        "num_params": sum(p.numel() for p in params),
        "num_local": sum(local(p).numel() for p in params),
        "num_state": sum(local(s).numel() for s in states),
        "num_plain_tensors": len(params) - len(sharded),
        "placements": sorted({str(tuple(p.placements)) for p in sharded}),
        "meshes": sorted({str(tuple(p.device_mesh.shape)) for p in sharded}),
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "backend": dist.get_backend() if dist.is_initialized() else "",
    }


def run_cell(cell, out):
    """In the forked process: become the train file."""
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(cell["port"])} | cell.get("env", {})
    steps = []
    register_optimizer_step_post_hook(lambda optimizer, *_: steps.append(holdings(optimizer)))
    sys.argv = [cell["file"], *cell["args"]]
    sys.path[0] = str(Path(cell["file"]).parent)
    name = f"{cell['name']}.{os.environ['RANK']}"
    code = 0
    with (out / f"{name}.txt").open("w") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True, file=stream)
        try:
            runpy.run_path(cell["file"], run_name="__main__")
        except SystemExit as stop:
            print(stop.code, file=sys.stderr)
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        faulthandler.cancel_dump_traceback_later()
    output = (out / f"{name}.txt").read_text()
    (out / f"{name}.json").write_text(json.dumps({"code": code, "steps": steps, "output": output}))
    os._exit(0)


def run_rank(rank, spec):
    """In the forked process: all cells, one after the other, as this rank."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(spec["num_procs"]),
        "LOCAL_WORLD_SIZE": str(spec["num_procs"]),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "cells",  # by which Lightning knows torchrun
    }
    for cell in spec["cells"]:
        if cell.get("alone") and rank != 0:
            continue
        child = os.fork()
        if child == 0:
            run_cell(cell, Path(spec["out"]))
        os.waitpid(child, 0)
    os._exit(0)


def main():
    spec = json.loads(Path(sys.argv[1]).read_text())
    for heavy in spec["imports"]:
        __import__(heavy)
    gc.freeze()  # else each cell's garbage collection would write to, and so copy, all that was imported
    ranks = []
    for rank in range(spec["num_procs"]):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            run_rank(rank, spec)
    statuses = [os.waitpid(rank, 0)[1] for rank in ranks]
    sys.exit(int(any(statuses)))


if __name__ == "__main__":
    main()
