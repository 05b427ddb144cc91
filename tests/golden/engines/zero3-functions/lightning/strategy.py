"""FSDP 8 for Lightning.

In `configure_model` of your LightningModule, `self.model = parallelize(self.model)` with parallelize.py; then:

    trainer = Trainer(**TRAINER, strategy=strategy())
"""

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy

TRAINER: dict[str, Any] = {
    "num_nodes": 1,
    "devices": 8,
    "precision": "32-true",
    "accumulate_grad_batches": 1,
}


def strategy() -> ModelParallelStrategy:
    return ModelParallelStrategy(
        data_parallel_size=8,
        tensor_parallel_size=1,
    )
