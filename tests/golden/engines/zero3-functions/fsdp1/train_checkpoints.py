"""Asynchronous checkpoints: each rank copies what it holds to the host, trains on, and writes meanwhile.

A folder holds `step-<N>/`, written together by all ranks through torch.distributed.checkpoint, and `latest`, which names the newest
complete one; older ones are deleted as `--keep-checkpoints` says. Weights and optimizer states are saved by the name of their parameter, so that another number of ranks can read them.
"""

import argparse
import functools
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from train_helpers import RandomStates, mark_newest, newest_checkpoint, random_states, set_random_states

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class Checkpoints:
    """Those of one run; without a folder none are read or written."""

    def __init__(self, options: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.folder, self.keep, self.model, self.optimizer = options.checkpoint, options.keep_checkpoints, model, optimizer
        # a process group of its own: writing ranks talk beside training, never in the order of its collectives
        self.group = dist.new_group(backend="gloo") if self.folder else None
        self.writing: Future[Any] | None = None
        self.marked = threading.Event()

    def load(self, data: RandomStates) -> tuple[int, RandomStates]:
        """The step to go on with and where the random numbers of the batches stand; 0 and `data` without a checkpoint."""
        name = newest_checkpoint(self.folder)
        if not name:
            return 0, data
        whole, partial = self.states(0, data)
        path = Path(self.folder) / name
        try:
            dcp.load(whole, checkpoint_id=path, process_group=self.group)
            # weights that had no gradient yet have no states, and ranks that weren't there no random numbers
            dcp.load(partial, checkpoint_id=path, process_group=self.group, planner=DefaultLoadPlanner(allow_partial_load=True))
        except (OSError, EOFError, RuntimeError, CheckpointException) as error:
            raise SystemExit(f"{path} can't be read ({error!r}); name an older checkpoint in {self.folder}/latest") from error
        set_state_dict(self.model, self.optimizer, model_state_dict=whole["model"], optim_state_dict=partial["optimizer"], options=OPTIONS)
        own = f"rank_{dist.get_rank()}"
        if any(key.startswith(f"{own}.") for key in dcp.FileSystemReader(path).read_metadata().state_dict_metadata):
            set_random_states(partial[own])
        return whole["progress"]["step"], whole["progress"]["data"]

    def states(self, step: int, data: RandomStates) -> tuple[dict[str, Any], dict[str, Any]]:
        """All that a run consists of: what a checkpoint must hold, and what may be missing from it."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=OPTIONS)
        progress = {"step": step, "data": data}
        return {"model": model, "progress": progress}, {"optimizer": optimizer, f"rank_{dist.get_rank()}": random_states()}

    def save(self, step: int, data: RandomStates) -> None:
        """Start to write what `step` steps have made; once it is all written, it is the newest."""
        self.finish()
        whole, partial = self.states(step, data)
        name = f"step-{step}"
        begun = dcp.async_save(whole | partial, checkpoint_id=Path(self.folder) / name, process_group=self.group)
        self.writing = begun if isinstance(begun, Future) else begun.upload_completion
        self.marked.clear()
        self.writing.add_done_callback(functools.partial(self.mark, name))

    def mark(self, name: str, written: Future[Any]) -> None:
        """Called when the ranks have written, or failed to; rank 0 keeps the books."""
        try:
            if dist.get_rank() == 0 and written.exception() is None:
                mark_newest(self.folder, name, self.keep)
        finally:
            self.marked.set()

    def finish(self) -> None:
        """Wait for what is being written; raises what went wrong."""
        if self.writing is not None:
            self.writing.result()
            self.marked.wait()
