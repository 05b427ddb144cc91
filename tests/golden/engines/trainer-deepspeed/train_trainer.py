"""Trains the model of llama_gqa.py with the Hugging Face Trainer on 8 processes: FSDP 8.

    torchrun --standalone --nproc-per-node 8 advice/plan-1/trainer/train_trainer.py --steps 100

How the model is spread is in training_arguments.json. A global batch is 8 x 1 x 4 = 32 samples: data ranks x micro-batch x accumulation.
Every rank draws the same global batch and takes its share; put your own sharded data in the place of `make_batch` when drawing gets slow.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

HERE = Path(__file__).resolve().parent
SCRIPT = (HERE / "../../../tests/engines/models/llama_gqa.py").resolve()
WORLD_SIZE, MICRO_BATCH, NUM_MICROBATCHES = 8, 1, 4
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


class FunctionsTrainer(Trainer):
    """Takes loss, batches and optimizer from the user's functions."""

    def __init__(self, user, **given):
        super().__init__(**given)
        self.user = user
        self.model_accepts_loss_kwargs = False  # losses are means over a micro-batch: divide them by the accumulation steps

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=None)  # already this rank's share

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # noqa: ARG002  the Trainer's own arguments
        return self.user.loss_fn(model, inputs)

    def create_optimizer(self, model=None):
        model = self.model if model is None else model
        self.optimizer = self.user.build_optimizer(model)
        return self.optimizer


class PrintLosses(TrainerCallback):
    def on_log(self, _args, state, _control, logs=None, **_):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step - 1} loss {logs['loss']:.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    steps = parser.parse_args().steps
    plan = json.loads((HERE / "training_arguments.json").read_text())
    arguments = TrainingArguments(
        output_dir=str(HERE / "output"),
        max_steps=steps,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **plan,
    )
    torch.manual_seed(SEED)  # equal weights on all ranks
    user = load(SCRIPT)
    model = user.build_model()
    if not isinstance(model, PreTrainedModel):
        raise SystemExit(f"{SCRIPT.name} builds a {type(model).__name__}, which is no PreTrainedModel")
    data = MicroBatches(user.make_batch, arguments.process_index)
    trainer = FunctionsTrainer(user, model=model, args=arguments, train_dataset=data, callbacks=[PrintLosses()])
    trainer.remove_callback(PrinterCallback)
    accelerator = trainer.accelerator
    found = (accelerator.num_processes, accelerator.distributed_type.value)
    if found != (WORLD_SIZE, "DEEPSPEED"):  # the Trainer itself goes on, unsharded, where there is no GPU
        raise SystemExit(f"this plan is for {WORLD_SIZE} processes under DEEPSPEED, not {found}")
    torch.manual_seed(SEED + arguments.process_index)  # different dropout masks
    trainer.train()


if __name__ == "__main__":
    main()
