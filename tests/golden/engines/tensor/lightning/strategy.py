"""TP 4 x FSDP 4, recompute selective for Lightning.

In `configure_model` of your LightningModule, `self.model = parallelize(self.model)` with parallelize.py; then:

    trainer = Trainer(**TRAINER, strategy=strategy())
"""

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy

TRAINER: dict[str, Any] = {
    "num_nodes": 2,
    "devices": 8,
    "precision": "32-true",  # the script sees to bf16
    "accumulate_grad_batches": 1,
}


def strategy() -> ModelParallelStrategy:
    return ModelParallelStrategy(
        data_parallel_size=4,
        tensor_parallel_size=4,
    )
