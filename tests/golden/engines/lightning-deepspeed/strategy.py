"""ZeRO-2 8, recompute full, optimizer offload for Lightning.

With your LightningModule as it is:

    trainer = Trainer(**TRAINER, strategy=strategy())
"""

from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy

TRAINER: dict[str, Any] = {
    "num_nodes": 1,
    "devices": 8,
    "precision": "32-true",
    "accumulate_grad_batches": 1,
}


def strategy() -> DeepSpeedStrategy:
    return DeepSpeedStrategy(
        stage=2,
        logging_batch_size_per_gpu=8,  # of a micro-batch, where Lightning can't see it in the loader
        offload_optimizer=True,
        offload_parameters=False,
        pin_memory=True,
    )
