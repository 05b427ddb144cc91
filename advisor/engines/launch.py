"""Launch lines and scripts: torchrun on one node or with a rendezvous, and the same through Slurm."""

from __future__ import annotations

import shlex
from pathlib import PurePath

from advisor.engines.types import EngineInput


def torchrun_line(inp: EngineInput, file: str | PurePath) -> str:
    """The command to paste; on several nodes it is run on each, with $HEAD_NODE naming the first."""
    if inp.num_nodes == 1:
        start = f"torchrun --standalone --nproc-per-node {inp.gpus_per_node}"
    else:
        start = (
            f"torchrun --nnodes {inp.num_nodes} --nproc-per-node {inp.gpus_per_node} --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500"
        )
    return f"{start} {shlex.quote(str(file))}"
