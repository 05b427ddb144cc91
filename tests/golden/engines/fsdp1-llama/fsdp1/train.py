"""Runs llama3_8b.py unchanged on 8 processes: HSDP 2 x 4.

    torchrun --standalone --nproc-per-node 8 advice/plan-1/fsdp1/train.py

The script runs as `__main__`. The model is parallelised the moment the script builds its optimizer; data loaders give each rank
its share; only rank 0 prints and saves. One turn of the script's loop is one micro-batch on each rank.
The loss printed after each optimizer step is the mean over the global batch.
"""

import collections
import datetime
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from parallelize import parallelize

HERE = Path(__file__).resolve().parent
SCRIPT = (HERE / "../../../examples/llama3_8b.py").resolve()
# arguments of the script, unless others follow train.py on the command line
SCRIPT_ARGS = shlex.split("")
WORLD_SIZE = 8
SCRIPT_BATCH, MICRO_BATCH = 1, 1  # a DataLoader with the first batch size gets the second
TURNS_PER_STEP = 1  # turns of the script's loop that make one optimizer step
BACKWARDS_PER_STEP = 1  # backward passes that make one
SAVE_WAIT_S = 60  # of a rank that saves, for the others
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
        if torch.is_storage(value):  # not the script's doing: a tensor is packed for another process
            plain_save(value, *args, **kwargs)
            return
        agree_to_save()
        value = gathered(value)  # all ranks take part
        if RANK == 0:
            plain_save(value, *args, **kwargs)
        dist.barrier(progress.writers)

    torch.save = save


def agree_to_save() -> None:
    """All ranks take part in saving: stop, rather than hang, where some don't come."""
    try:
        dist.barrier(progress.savers)
    except RuntimeError:
        raise SystemExit(
            f"rank {RANK} saves although others don't: {SCRIPT.name} decides from its own rank's loss; decide from a loss averaged over ranks"
        ) from None


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


def hold_on_host() -> None:
    """A model that would fill the GPU stays on the host when the script moves it: later its shards go over one by one."""
    plain_to = nn.Module.to

    def to(module, *args, **kwargs):
        num_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
        if num_bytes < 0.4 * torch.cuda.mem_get_info()[1]:
            return plain_to(module, *args, **kwargs)
        dtypes = [value for value in (*args, kwargs.get("dtype")) if isinstance(value, torch.dtype)]
        return plain_to(module, *dtypes) if dtypes else module

    nn.Module.to = to
    nn.Module.cuda = lambda module, device="cuda": to(module, device)


def parallelize_with_optimizer() -> None:
    """When the script builds its optimizer, model and parameters are complete: the moment to parallelise."""
    plain_init = torch.optim.Optimizer.__init__

    def init(optimizer, *args, **kwargs):
        torch.optim.Optimizer.__init__ = plain_init
        plain_init(optimizer, *args, **kwargs)
        model = owner(optimizer)
        parallel = parallelize(model)  # the parameters stay the objects that the optimizer holds
        route_calls(model, parallel)
        route_states(model, parallel, optimizer)
        route_steps(optimizer, optimizer.step)
        progress.parallel = parallel
        different_draws()

    torch.optim.Optimizer.__init__ = init


def route_calls(model: nn.Module, parallel) -> None:
    """The script's `model(...)` goes through FullyShardedDataParallel; called from in there, the model answers itself."""
    plain = type(model)
    inside = False

    def call(self, *args, **kwargs):
        nonlocal inside
        if inside:
            return plain.__call__(self, *args, **kwargs)
        inside = True
        progress.calls += 1
        try:
            return parallel(*args, **kwargs)
        finally:
            inside = False

    model.__class__ = type(plain.__name__, (plain,), {"__call__": call, "__module__": plain.__module__})


def route_states(model: nn.Module, parallel: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """What the script gets from `state_dict()` of model and optimizer is sharded, and what it loads whole; by the names and numbers it knows."""
    plain_weights, plain_states, plain_load = model.state_dict, optimizer.state_dict, optimizer.load_state_dict
    known = {id(p): name.replace("_fsdp_wrapped_module.", "") for name, p in model.named_parameters()}
    inside = False

    def weights(*args, **kwargs):
        if "destination" in kwargs:  # the wrapper asks what it wraps
            return plain_weights(*args, **kwargs)
        agree_to_save()
        return get_model_state_dict(parallel)

    def load_weights(whole, *_args, strict=True, **_kwargs):
        sharded = get_model_state_dict(parallel)
        cut = {name: part(value, sharded.get(name)) for name, value in whole.items()}
        return set_model_state_dict(parallel, cut, options=StateDictOptions(strict=strict))

    def names():
        return [known[id(p)] for group in optimizer.param_groups for p in group["params"]]

    def states():
        nonlocal inside
        if inside:
            return plain_states()
        agree_to_save()
        inside = True
        named = get_optimizer_state_dict(parallel, optimizer)
        inside = False
        numbers = {name: number for number, name in enumerate(names())}
        groups = [group | {"params": [numbers[name] for name in group["params"]]} for group in named["param_groups"]]
        return {"state": {numbers[name]: state for name, state in named["state"].items()}, "param_groups": groups}

    def load_states(state_dict):
        nonlocal inside
        if inside:
            plain_load(state_dict)
            return
        sharded, of = get_model_state_dict(parallel), names()
        cut = {of[i]: {key: part(value, sharded[of[i]]) for key, value in state.items()} for i, state in state_dict["state"].items()}
        groups = [group | {"params": [of[i] for i in group["params"]]} for group in state_dict["param_groups"]]
        routed = optimizer.__dict__.pop("step")  # PyTorch takes an empty step, so that there are states to fill
        inside = True
        set_optimizer_state_dict(parallel, optimizer, {"state": cut, "param_groups": groups})
        inside = False
        optimizer.step = routed

    model.state_dict, model.load_state_dict = weights, load_weights
    optimizer.state_dict, optimizer.load_state_dict = states, load_states


def gathered(value):
    """Whole tensors in the place of sharded ones, wherever they sit in dicts and lists: on rank 0's host; the other ranks only take part."""
    if isinstance(value, DTensor):
        whole = value.full_tensor()
        return whole.cpu() if RANK == 0 else whole.to("meta")
    if isinstance(value, dict):
        return type(value)((key, gathered(item)) for key, item in value.items())
    return [gathered(item) for item in value] if isinstance(value, list) else value


def part(value, sharded):
    """This rank's part of a whole tensor that is sharded as another one is; all else stays as it is."""
    if not isinstance(value, torch.Tensor) or not isinstance(sharded, DTensor) or value.shape != sharded.shape:
        return value
    return distribute_tensor(value.to(sharded.device), sharded.device_mesh, sharded.placements, src_data_rank=None)


def clip_over_ranks() -> None:
    """A gradient norm is that of all ranks' shards, which the wrapper knows."""

    def clip_grad_norm_(parameters, max_norm, norm_type=2.0, *_args, **_kwargs):
        given = {id(p) for p in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
        if any(p.requires_grad and id(p) not in given for p in progress.parallel.parameters()):
            raise SystemExit(f"{SCRIPT.name} clips the gradients of some parameters; under FSDP1 only those of all can be clipped")
        return progress.parallel.clip_grad_norm_(max_norm, norm_type)

    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_


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
    """Count backward passes and note their losses."""
    plain_backward = torch.Tensor.backward

    def backward(loss, *args, **kwargs):
        progress.backwards += 1
        progress.losses.append(loss.detach())
        plain_backward(loss, *args, **kwargs)

    torch.Tensor.backward = backward


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
    progress.savers = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=SAVE_WAIT_S))
    progress.writers = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))  # rank 0 may write for long
    share_data()
    if torch.cuda.is_available():
        hold_on_host()
    only_rank_0_speaks()
    parallelize_with_optimizer()
    watch_backward()
    clip_over_ranks()
    sys.argv = [str(SCRIPT), *(sys.argv[1:] or SCRIPT_ARGS)]
    sys.path[0] = str(SCRIPT.parent)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    gc.collect()  # the model must be gone before the process group is, or leaving may hang
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
