"""Trains the model of resnet50.py on 8 processes: FSDP 8.

    torchrun --standalone --nproc-per-node 8 advice/plan-1/train.py --steps 100

A global batch is 8 x 32 = 256 samples: data ranks x micro-batch. Every rank draws the same global batch and takes its
share, so the run sees what a single process would see; put your own sharded data in the place of `make_batch` when drawing gets slow.
"""

import argparse
import gc
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from parallelize import parallelize

HERE = Path(__file__).resolve().parent
SCRIPT = (HERE / "../../examples/resnet50.py").resolve()
WORLD_SIZE, MICRO_BATCH, NUM_MICROBATCHES = 8, 32, 1
GLOBAL_BATCH = WORLD_SIZE * MICRO_BATCH * NUM_MICROBATCHES
SEED = 0


def load(path: Path):
    """The user's module, without running what stands under `if __name__ == "__main__"`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
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
        return [share(value, index, device) for value in batch]
    return batch


def train(steps: int, device: torch.device) -> None:
    rank = dist.get_rank()
    torch.manual_seed(SEED)  # equal weights on all ranks
    user = load(SCRIPT)
    model = parallelize(user.build_model())
    optimizer = user.build_optimizer(model)
    data_state = torch.get_rng_state()
    torch.manual_seed(SEED + rank)  # different dropout masks

    for step in range(steps):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(data_state)
            batch = user.make_batch(GLOBAL_BATCH)
            data_state = torch.get_rng_state()
        total = torch.zeros((), device=device)
        for i in range(NUM_MICROBATCHES):
            micro = share(batch, i * WORLD_SIZE + rank, device)
            loss = user.loss_fn(model, micro)
            loss.backward()
            total += loss.detach().float()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item() / (WORLD_SIZE * NUM_MICROBATCHES):.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    steps = parser.parse_args().steps

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if dist.get_world_size() != WORLD_SIZE:
        raise SystemExit(f"this plan is for {WORLD_SIZE} processes, not {dist.get_world_size()}")
    train(steps, device)
    gc.collect()  # the model must be gone before the process group is, or leaving may hang
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
