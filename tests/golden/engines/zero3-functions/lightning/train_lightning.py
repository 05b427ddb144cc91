"""Trains the model of resnet50.py with Lightning on 8 processes: FSDP 8.

    torchrun --standalone --nproc-per-node 8 advice/plan-1/lightning/train_lightning.py --steps 100

How the model is spread is in strategy.py. A global batch is 8 x 32 = 256 samples: data ranks x micro-batch.
Every rank draws the same global batch and takes its share; put your own sharded data in the place of `make_batch` when drawing gets slow.
"""

import argparse
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, IterableDataset

from parallelize import parallelize
from strategy import TRAINER, strategy

HERE = Path(__file__).resolve().parent
SCRIPT = (HERE / "../../../examples/resnet50.py").resolve()
WORLD_SIZE, MICRO_BATCH, NUM_MICROBATCHES = 8, 32, 1
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
        return rows.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: share(value, index, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return getattr(batch, "_make", type(batch))(share(value, index, device) for value in batch)  # named tuples stay such
    return batch


class MicroBatches(IterableDataset):
    """This rank's micro-batches, for ever."""

    def __init__(self, make_batch, rank: int):
        self.make_batch, self.rank = make_batch, rank
        self.random_state = torch.get_rng_state()

    def __iter__(self):
        while True:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self.random_state)
                batch = self.make_batch(GLOBAL_BATCH)
                self.random_state = torch.get_rng_state()
            for i in range(NUM_MICROBATCHES):
                yield share(batch, i * WORLD_SIZE + self.rank, torch.device("cpu"))


class UserModule(pl.LightningModule):
    """Takes model, loss and optimizer from the user's functions."""

    def __init__(self, user):
        super().__init__()
        self.user = user
        self.model = user.build_model()
        self.total = 0.0

    def configure_model(self):
        self.model = parallelize(self.model)

    def training_step(self, batch):
        loss = self.user.loss_fn(self.model, batch)
        self.total += loss.detach().float()
        return loss

    def on_train_batch_end(self, _outputs, _batch, index):
        if (index + 1) % NUM_MICROBATCHES == 0:
            mean = self.trainer.strategy.reduce(self.total, reduce_op="mean") / NUM_MICROBATCHES
            self.total = 0.0
            if self.trainer.is_global_zero:
                print(f"step {self.trainer.global_step - 1} loss {mean.item():.6f}", flush=True)

    def configure_optimizers(self):
        return self.user.build_optimizer(self.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    steps = parser.parse_args().steps
    trainer = pl.Trainer(
        **TRAINER,
        strategy=strategy(),
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        max_steps=steps,
        use_distributed_sampler=False,  # MicroBatches gives each rank its share
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if trainer.world_size != WORLD_SIZE:
        raise SystemExit(f"this plan is for {WORLD_SIZE} processes, not {trainer.world_size}")
    torch.manual_seed(SEED)  # equal weights on all ranks
    user = load(SCRIPT)
    module = UserModule(user)
    data_rank = trainer.global_rank
    data = DataLoader(MicroBatches(user.make_batch, data_rank), batch_size=None)
    torch.manual_seed(SEED + data_rank)  # different dropout masks
    trainer.fit(module, data)


if __name__ == "__main__":
    main()
