"""Runs a train file of Accelerate's without a GPU, and prints what Accelerate made of it.

    torchrun --nproc-per-node 2 accelerate_on_cpu.py TRAIN_FILE [ARGUMENTS]

FOR TESTS ONLY. Accelerate shards on accelerators alone and goes on unsharded, exit code 0, where there is none: two of its methods
are replaced, so that gloo stands for NCCL. Replicas (`ACCELERATE_USE_CPU`) need no replacement.
"""

import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

if importlib.util.find_spec("deepspeed"):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo alone will do: nothing has to be compiled
if os.environ.get("ACCELERATE_USE_CPU") != "true":
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))

plain_prepare = Accelerator.prepare


def prepare(self, *objects, **more):
    prepared = plain_prepare(self, *objects, **more)
    model = prepared[0]
    found = {
        "distributed_type": self.distributed_type.value,
        "num_processes": self.num_processes,
        "class": type(model).__name__,
        "placements": sorted({str(tuple(p.placements)) for p in model.parameters() if isinstance(p, DTensor)}),
        "num_sharded": sum(isinstance(p, DTensor) for p in model.parameters()),
        "num_parameters": sum(1 for _ in model.parameters()),
    }
    print("became", json.dumps(found), flush=True)
    return prepared


Accelerator.prepare = prepare
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
