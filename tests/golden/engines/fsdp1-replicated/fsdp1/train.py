"""Trains the model of resnet50.py on 2 processes: DDP 2.

    torchrun --standalone --nproc-per-node 2 advice/plan-1/fsdp1/train.py --steps 100

A global batch is 2 x 4 = 8 samples: data ranks x micro-batch. Every rank draws the same global batch and takes its
share, so the run sees what a single process would see; when drawing gets slow, offer a data set by `make_dataset()` and write this file again.
`--help` lists evaluation, checkpoints, metrics, clipping and warm-up.
"""

import argparse
import gc
import importlib.util
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from parallelize import parallelize
from train_checkpoints import Checkpoints
from train_helpers import Metrics, draw, parse_options, random_states, seed_everything, set_random_states, warm_up

HERE = Path(__file__).resolve().parent
SCRIPT = (HERE / "../../../examples/resnet50.py").resolve()
WORLD_SIZE, MICRO_BATCH, NUM_MICROBATCHES = 2, 4, 1
GLOBAL_BATCH = WORLD_SIZE * MICRO_BATCH * NUM_MICROBATCHES
SEED, EVAL_SEED = 0, 1000000  # the second is of evaluation batches alone


def load(path: Path):
    """The user's module, without running what stands under `if __name__ == "__main__"`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def share(batch, index: int, device: torch.device):
    """Micro-batch `index` of the global batch: its rows of every tensor, wherever they sit in tuples, lists and dicts."""
    if isinstance(batch, torch.Tensor):
        rows = batch[index * MICRO_BATCH : (index + 1) * MICRO_BATCH] if batch.ndim and len(batch) == GLOBAL_BATCH else batch
        return rows.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: share(value, index, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return getattr(batch, "_make", type(batch))(share(value, index, device) for value in batch)  # named tuples stay such
    return batch


def clip_gradients(model: FullyShardedDataParallel, max_norm: float) -> float:
    """Norm of all gradients, the other ranks' shards included, before they are clipped to `max_norm` (0: only measured)."""
    return model.clip_grad_norm_(max_norm or math.inf).item()


def train(options: argparse.Namespace, device: torch.device) -> None:
    rank = dist.get_rank()
    seed_everything(SEED)  # equal weights on all ranks
    user = load(SCRIPT)
    model = parallelize(user.build_model())
    optimizer = user.build_optimizer(model)
    full_rates = [group["lr"] for group in optimizer.param_groups]
    data = random_states()  # batches go on from here, alike on all ranks
    seed_everything(SEED + rank)  # different dropout masks
    metrics = Metrics(options.metrics, device)
    checkpoints = Checkpoints(options, model, optimizer)
    first, data = checkpoints.load(data)

    for step in range(first, options.steps):
        if step < options.warmup_steps:
            warm_up(optimizer, full_rates, step, options.warmup_steps)
        metrics.start(step)
        batch, data = draw(user.make_batch, GLOBAL_BATCH, data)
        total, norm = torch.zeros((), device=device), None
        for i in range(NUM_MICROBATCHES):
            micro = share(batch, i * WORLD_SIZE + rank, device)
            loss = user.loss_fn(model, micro)
            loss.backward()
            total += loss.detach().float()
        if options.clip_norm or options.metrics:
            norm = clip_gradients(model, options.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        mean_loss = total.item() / (WORLD_SIZE * NUM_MICROBATCHES)
        metrics.stop()
        if rank == 0:
            print(f"step {step} loss {mean_loss:.6f}", flush=True)
        if options.metrics:
            metrics.write(step, mean_loss, norm)
        if options.eval_every and (step + 1) % options.eval_every == 0:
            held_out = evaluate(user, model, options.eval_batches, device)
            if rank == 0:
                print(f"step {step} evaluation {held_out:.6f}", flush=True)
        if options.checkpoint and ((step + 1) % options.checkpoint_every == 0 or step + 1 == options.steps):
            checkpoints.save(step + 1, data)
    checkpoints.finish()


@torch.no_grad()
def evaluate(user, model: nn.Module, num_batches: int, device: torch.device) -> float:
    """Mean loss of batches that are the same each time; every rank computes its share of them."""
    rank = dist.get_rank()
    training = random_states()
    seed_everything(EVAL_SEED)
    data = random_states()
    model.eval()
    total = torch.zeros((), device=device)
    for _ in range(num_batches):
        batch, data = draw(user.make_batch, GLOBAL_BATCH, data)
        for i in range(NUM_MICROBATCHES):
            micro = share(batch, i * WORLD_SIZE + rank, device)
            total += user.loss_fn(model, micro).float()
    model.train()
    set_random_states(training)
    dist.all_reduce(total)
    return total.item() / (WORLD_SIZE * NUM_MICROBATCHES * num_batches)


def main() -> None:
    options = parse_options("Trains the model of resnet50.py: DDP 2.")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if dist.get_world_size() != WORLD_SIZE:
        raise SystemExit(f"this plan is for {WORLD_SIZE} processes, not {dist.get_world_size()}")
    train(options, device)
    gc.collect()  # the model must be gone before the process group is, or leaving may hang
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
