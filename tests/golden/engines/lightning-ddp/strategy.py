"""DDP 8 for Lightning.

With your LightningModule as it is:

    trainer = Trainer(**TRAINER, strategy=strategy())
"""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

TRAINER: dict[str, Any] = {
    "num_nodes": 1,
    "devices": 8,
    "precision": "bf16-mixed",
    "accumulate_grad_batches": 2,
}


def strategy() -> DDPStrategy:
    return DDPStrategy(
        gradient_as_bucket_view=True,  # gradients live in the buckets: no second copy
        find_unused_parameters=True,  # no gradient for classifier.bias: freeze what is never used, then drop this
    )
