"""Trains the model of resnet50.py on 8 processes: FSDP 8.

    torchrun --standalone --nproc-per-node 8 advice/plan-1/train_deepspeed.py --steps 100

A global batch is 8 x 32 = 256 samples: data ranks x micro-batch. Every rank draws the same global batch and takes its
share, so the run sees what a single process would see; when drawing gets slow, offer a data set by `make_dataset()` and write this file again.
`--help` lists evaluation, checkpoints, metrics, clipping and warm-up.
"""

import argparse
import gc
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from train_helpers import (
    Metrics,
    RandomStates,
    draw,
    mark_newest,
    newest_checkpoint,
    parse_options,
    random_states,
    seed_everything,
    set_random_states,
    warm_up,
)

HERE = Path(__file__).resolve().parent
SCRIPT = (HERE / "../../examples/resnet50.py").resolve()
WORLD_SIZE, MICRO_BATCH, NUM_MICROBATCHES = 8, 32, 1
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


class Checkpoints:
    """DeepSpeed's own, in `<folder>/step-<N>/`, and `latest`, which names the newest complete one. Training waits while they are written."""

    def __init__(self, options: argparse.Namespace, engine: deepspeed.DeepSpeedEngine):
        self.folder, self.keep, self.engine = options.checkpoint, options.keep_checkpoints, engine

    def load(self, data: RandomStates) -> tuple[int, RandomStates]:
        """The step to go on with and where the random numbers of the batches stand; 0 and `data` without a checkpoint."""
        name = newest_checkpoint(self.folder)
        if not name:
            return 0, data
        self.engine.load_checkpoint(self.folder, tag=name)
        progress = torch.load(self.progress_file(name), weights_only=False)
        set_random_states(progress["own"])
        return progress["step"], progress["data"]

    def save(self, step: int, data: RandomStates) -> None:
        """Write what `step` steps have made; only then it is the newest."""
        name = f"step-{step}"
        self.engine.save_checkpoint(self.folder, tag=name, save_latest=False)
        torch.save({"step": step, "data": data, "own": random_states()}, self.progress_file(name))
        dist.barrier()
        if dist.get_rank() == 0:
            mark_newest(self.folder, name, self.keep)

    def progress_file(self, name: str) -> Path:
        """Where this rank's random numbers lie."""
        return Path(self.folder) / name / f"progress_{dist.get_rank()}.pt"


def train(options: argparse.Namespace, device: torch.device) -> None:
    rank = dist.get_rank()
    seed_everything(SEED)  # equal weights on all ranks
    user = load(SCRIPT)
    model = user.build_model()
    config = json.loads((HERE / "ds_config.json").read_text()) | {"gradient_clipping": options.clip_norm}
    deepspeed.zero.Init(module=model, config_dict_or_path=config)  # cut up on the host: the whole model need not fit on one GPU
    optimizer = user.build_optimizer(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    full_rates = [group["lr"] for group in optimizer.param_groups]
    data = random_states()  # batches go on from here, alike on all ranks
    seed_everything(SEED + rank)  # different dropout masks
    metrics = Metrics(options.metrics, device)
    checkpoints = Checkpoints(options, engine)
    first, data = checkpoints.load(data)

    for step in range(first, options.steps):
        if step < options.warmup_steps:
            warm_up(optimizer, full_rates, step, options.warmup_steps)
        metrics.start(step)
        batch, data = draw(user.make_batch, GLOBAL_BATCH, data)
        total, norm = torch.zeros((), device=device), None
        for i in range(NUM_MICROBATCHES):
            micro = share(batch, i * WORLD_SIZE + rank, device)
            loss = user.loss_fn(engine, micro)
            engine.backward(loss)  # divides by the accumulation steps
            engine.step()  # acts on the last micro-batch
            total += loss.detach().float()
        whole_norm = engine.get_global_grad_norm()
        norm = None if whole_norm is None else float(whole_norm)  # without ZeRO the engine doesn't keep it
        dist.all_reduce(total)
        mean_loss = total.item() / (WORLD_SIZE * NUM_MICROBATCHES)
        metrics.stop()
        if rank == 0:
            print(f"step {step} loss {mean_loss:.6f}", flush=True)
        if options.metrics:
            metrics.write(step, mean_loss, norm)
        if options.eval_every and (step + 1) % options.eval_every == 0:
            held_out = evaluate(user, engine, options.eval_batches, device)
            if rank == 0:
                print(f"step {step} evaluation {held_out:.6f}", flush=True)
        if options.checkpoint and ((step + 1) % options.checkpoint_every == 0 or step + 1 == options.steps):
            checkpoints.save(step + 1, data)


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
    options = parse_options("Trains the model of resnet50.py: FSDP 8.")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if not on_gpu:  # gloo alone will do: nothing has to be compiled
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if on_gpu else "gloo")
    if dist.get_world_size() != WORLD_SIZE:
        raise SystemExit(f"this plan is for {WORLD_SIZE} processes, not {dist.get_world_size()}")
    train(options, device)
    gc.collect()  # the model must be gone before the process group is, or leaving may hang
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
