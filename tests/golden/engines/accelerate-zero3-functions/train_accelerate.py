"""Trains the model of resnet50.py with Accelerate on 16 processes: FSDP 16.

    accelerate launch --config_file advice/plan-1/accelerate/accelerate.yaml --main_process_ip $HEAD_NODE advice/plan-1/accelerate/train_accelerate.py --steps 100

How the model is spread is in accelerate.yaml. A global batch is 16 x 16 x 2 = 512 samples: data ranks x micro-batch x accumulation.
Every rank draws the same global batch and takes its share; put your own sharded data in the place of `make_batch` when drawing gets slow.
"""

import argparse
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import Accelerator

HERE = Path(__file__).resolve().parent
SCRIPT = (HERE / "../../../examples/resnet50.py").resolve()
WORLD_SIZE, MICRO_BATCH, NUM_MICROBATCHES = 16, 16, 2
GLOBAL_BATCH = WORLD_SIZE * MICRO_BATCH * NUM_MICROBATCHES
SEED = 0


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
        dtype = torch.bfloat16 if rows.is_floating_point() else rows.dtype  # as the weights are
        return rows.to(device, dtype, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: share(value, index, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return getattr(batch, "_make", type(batch))(share(value, index, device) for value in batch)  # named tuples stay such
    return batch


def train(accelerator: Accelerator, steps: int, max_norm: float) -> None:
    torch.manual_seed(SEED)  # equal weights on all ranks
    user = load(SCRIPT)
    model = user.build_model()
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = MICRO_BATCH  # no DataLoader here from which Accelerate could take it
    config["gradient_clipping"] = max_norm  # DeepSpeed clips in its own step
    model, optimizer = accelerator.prepare(model, user.build_optimizer(model))
    data_state = torch.get_rng_state()
    torch.manual_seed(SEED + accelerator.process_index)  # different dropout masks

    for step in range(steps):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(data_state)
            batch = user.make_batch(GLOBAL_BATCH)
            data_state = torch.get_rng_state()
        total = torch.zeros((), device=accelerator.device)
        for i in range(NUM_MICROBATCHES):
            micro = share(batch, i * WORLD_SIZE + accelerator.process_index, accelerator.device)
            with accelerator.accumulate(model):
                loss = user.loss_fn(model, micro)
                accelerator.backward(loss)  # divides by the accumulation steps
                optimizer.step()  # acts on the last micro-batch, and so does zero_grad
                optimizer.zero_grad()
            total += loss.detach().float()
        mean = accelerator.gather(total).mean().item() / NUM_MICROBATCHES
        accelerator.print(f"step {step} loss {mean:.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--max-norm", type=float, default=0.0, help="clip gradients to this norm; 0 doesn't")
    arguments = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=NUM_MICROBATCHES)
    found = (accelerator.num_processes, accelerator.distributed_type.value)
    if found != (WORLD_SIZE, "DEEPSPEED"):  # Accelerate itself goes on, unsharded, where it can't do as it is told
        raise SystemExit(f"this plan is for {WORLD_SIZE} processes under DEEPSPEED, not {found}; Accelerate shards on GPUs only")
    train(accelerator, arguments.steps, arguments.max_norm)
    accelerator.end_training()


if __name__ == "__main__":
    main()
