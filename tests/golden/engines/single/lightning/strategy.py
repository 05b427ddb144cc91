"""single GPU for Lightning.

With your LightningModule as it is:

    trainer = Trainer(**TRAINER, strategy=strategy())
"""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

TRAINER: dict[str, Any] = {
    "num_nodes": 1,
    "devices": 1,
    "precision": "32-true",
    "accumulate_grad_batches": 2,
}


def strategy() -> DDPStrategy:
    return DDPStrategy(
        gradient_as_bucket_view=True,  # gradients live in the buckets: no second copy
    )
