"""Runs gpt2.py unchanged on 8 processes: DDP 8, recompute selective.

    torchrun --standalone --nproc-per-node 8 advice/plan-1/train.py

The script runs as `__main__`. The model is parallelised the moment the script builds its optimizer; data loaders give each rank
its share; only rank 0 prints and saves. One turn of the script's loop is one micro-batch on each rank.
4 turns make an optimizer step: give the loop 4 times as many turns as steps are wanted.
The loss printed after each optimizer step is the mean over the global batch.
"""

import collections
import contextlib
import functools
import gc
import inspect
import itertools
import os
import random
import runpy
import shlex
import sys
import types
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from parallelize import parallelize

HERE = Path(__file__).resolve().parent
SCRIPT = (HERE / "../../examples/gpt2.py").resolve()
# arguments of the script, unless others follow train.py on the command line
SCRIPT_ARGS = shlex.split("--steps 400")
WORLD_SIZE = 8
SCRIPT_BATCH, MICRO_BATCH = 8, 2  # a DataLoader with the first batch size gets the second
TURNS_PER_STEP = 4  # turns of the script's loop that make one optimizer step
BACKWARDS_PER_STEP = 4  # backward passes that make one
RANK, LOCAL_RANK = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))  # torchrun sets them


# the script so far: calls of the model, backward passes, optimizer steps, losses of the latest backward passes
progress = types.SimpleNamespace(calls=0, backwards=0, steps=0, losses=collections.deque(maxlen=BACKWARDS_PER_STEP))


def at_boundary() -> bool:
    """Whether all gradients of an optimizer step are in (or none of the next)."""
    return progress.backwards % BACKWARDS_PER_STEP == 0


class Share(IterableDataset):
    """Every WORLD_SIZE-th item from this rank's on; an incomplete last round is dropped, so that all ranks take equally many."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        items = iter(self.items)
        while len(turn := list(itertools.islice(items, WORLD_SIZE))) == WORLD_SIZE:
            yield turn[RANK]

    def __len__(self):
        return len(self.items) // WORLD_SIZE


class ShuffledShare(DistributedSampler):
    """Counts the epochs itself, as the script doesn't call `set_epoch`."""

    def __iter__(self):
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)


def share_data() -> None:
    """From now on a DataLoader reads only this rank's share."""
    plain_init = DataLoader.__init__
    signature = inspect.signature(plain_init)

    def init(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        if given.get("batch_sampler") is not None:
            given["batch_sampler"] = Share(given["batch_sampler"])
        elif given.get("batch_size", 1) == SCRIPT_BATCH:
            given["batch_size"] = MICRO_BATCH
        if isinstance(given["dataset"], IterableDataset):
            given["dataset"] = Share(given["dataset"])
        elif given.get("sampler") is not None:
            given["sampler"] = Share(given["sampler"])
        elif given.get("batch_sampler") is None:
            shuffle = bool(given.pop("shuffle", False))
            drop_last = given.get("drop_last", False)
            given["sampler"] = ShuffledShare(given["dataset"], WORLD_SIZE, RANK, shuffle=shuffle, drop_last=drop_last)
        plain_init(**given)

    DataLoader.__init__ = init


def only_rank_0_speaks() -> None:
    """Prints and `torch.save` of the other ranks go nowhere. Other ways to write files are not caught."""
    if RANK != 0:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  open as long as the process lives
    plain_save = torch.save

    def save(value, *args, **kwargs):
        if RANK == 0 or torch.is_storage(value):  # a storage is no doing of the script's: a tensor is packed for another process
            plain_save(value, *args, **kwargs)

    torch.save = save


def different_draws() -> None:
    """Equal seeds gave all ranks equal weights; now each draws its own batches and dropout masks (rank 0 as if alone)."""
    if RANK != 0:
        torch.manual_seed(torch.initial_seed() + RANK)
        random.seed(f"{random.random()} {RANK}")
        numpy.random.seed(numpy.random.randint(2**31) + RANK)


def owner(optimizer: torch.optim.Optimizer) -> nn.Module:
    """The outermost module that holds all parameters of the optimizer."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    children = {id(child) for m in modules for child in m.children()}
    owners = [m for m in modules if id(m) not in children and wanted <= {id(p) for p in m.parameters()}]
    if len(owners) != 1:
        raise SystemExit(f"{len(owners)} models hold all the parameters of {SCRIPT.name}'s optimizer; one is needed")
    return owners[0]


def parallelize_with_optimizer() -> None:
    """When the script builds its optimizer, model and parameters are complete: the moment to parallelise."""
    plain_init = torch.optim.Optimizer.__init__

    def init(optimizer, *args, **kwargs):
        torch.optim.Optimizer.__init__ = plain_init
        plain_init(optimizer, *args, **kwargs)
        model = owner(optimizer)
        route_calls(model, parallelize(model))
        route_steps(optimizer, optimizer.step)
        different_draws()

    torch.optim.Optimizer.__init__ = init


def route_calls(model: nn.Module, parallel) -> None:
    """The script's `model(...)` goes through DistributedDataParallel; called from in there, the model answers itself."""
    plain = type(model)
    inside = False

    def call(self, *args, **kwargs):
        nonlocal inside
        if inside:
            return plain.__call__(self, *args, **kwargs)
        inside = True
        progress.calls += 1
        try:
            last = (progress.backwards + 1) % BACKWARDS_PER_STEP == 0  # only then are gradients averaged over the ranks
            with contextlib.nullcontext() if last else parallel.no_sync():
                return parallel(*args, **kwargs)
        finally:
            inside = False

    model.__class__ = type(plain.__name__, (plain,), {"__call__": call, "__module__": plain.__module__})


def route_steps(optimizer: torch.optim.Optimizer, take_step) -> None:
    """`optimizer.step()` acts only when all gradients are in; then the loss is reported."""

    def step(_, *args, **kwargs):
        if not at_boundary():
            return None
        if progress.calls == 0:
            raise SystemExit(f"{SCRIPT.name} never calls its model as model(...), so its gradients would not be averaged")
        result = take_step(*args, **kwargs)
        report_loss()
        return result

    optimizer.step = types.MethodType(step, optimizer)


def report_loss() -> None:
    """Print the mean loss over the global batch; a collective, so every rank calls it."""
    total = torch.stack([loss.float() for loss in progress.losses]).sum() / TURNS_PER_STEP
    dist.all_reduce(total)
    if RANK == 0:
        print(f"optimizer step {progress.steps}: loss {total.item() / WORLD_SIZE:.6f} over the global batch", flush=True)
    progress.steps += 1


def watch_backward() -> None:
    """Count backward passes and note their losses, each divided by the turns of a step."""
    plain_backward = torch.Tensor.backward

    def backward(loss, *args, **kwargs):
        progress.backwards += 1
        progress.losses.append(loss.detach())
        plain_backward(loss / TURNS_PER_STEP, *args, **kwargs)

    torch.Tensor.backward = backward


def hold_between_steps() -> None:
    """Before all gradients of a step are in, nothing is cleared, clipped, rescaled or scheduled."""
    schedules = [kind for kind in subclasses(LRScheduler) if "step" in vars(kind)]
    clipping = [(torch.nn.utils, "clip_grad_norm_"), (torch.nn.utils, "clip_grad_value_")]
    scaling = [(torch.amp.GradScaler, name) for name in ("unscale_", "step", "update")]
    clearing = [(torch.optim.Optimizer, "zero_grad"), (nn.Module, "zero_grad")]
    for place, name in [*((kind, "step") for kind in schedules), *clipping, *scaling, *clearing]:
        setattr(place, name, held(getattr(place, name)))


def held(function):
    last = torch.zeros(())

    @functools.wraps(function)
    def run(*args, **kwargs):
        nonlocal last
        if at_boundary():
            last = function(*args, **kwargs)
        return last

    return run


def subclasses(kind: type[LRScheduler]) -> list[type[LRScheduler]]:
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in subclasses(child))]


def main() -> None:
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus != "":  # this process sees one GPU only, so that the script's "cuda" and "cuda:0" both mean it
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus.split(",")[LOCAL_RANK] if gpus else str(LOCAL_RANK)
        os.environ["LOCAL_RANK"] = "0"  # where libraries look for its number
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if dist.get_world_size() != WORLD_SIZE:
        raise SystemExit(f"this plan is for {WORLD_SIZE} processes, not {dist.get_world_size()}")
    torch.manual_seed(0)  # equal weights on all ranks, where the script sets no seed itself
    random.seed(0)
    numpy.random.seed(0)
    share_data()
    only_rank_0_speaks()
    parallelize_with_optimizer()
    watch_backward()
    hold_between_steps()
    sys.argv = [str(SCRIPT), *(sys.argv[1:] or SCRIPT_ARGS)]
    sys.path[0] = str(SCRIPT.parent)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    gc.collect()  # the model must be gone before the process group is, or leaving may hang
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
