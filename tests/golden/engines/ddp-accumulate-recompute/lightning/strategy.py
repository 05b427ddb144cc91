"""DDP 8, recompute selective for Lightning.

With your LightningModule as it is:

    trainer = Trainer(**TRAINER, strategy=strategy())
"""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

TRAINER: dict[str, Any] = {
    "num_nodes": 1,
    "devices": 8,
    "precision": "bf16-mixed",
    "accumulate_grad_batches": 4,
}


def strategy() -> DDPStrategy:
    return DDPStrategy(
        gradient_as_bucket_view=True,  # gradients live in the buckets: no second copy
    )
