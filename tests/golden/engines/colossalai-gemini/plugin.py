"""FSDP 16, recompute full, CPU offload for ColossalAI 0.5, in an environment of its own: it wants torch 2.5.1 or older and transformers 4.51.3.

Under torchrun, after `colossalai.launch_from_torch()`:

    model.gradient_checkpointing_enable()
    booster = Booster(plugin=plugin())
    model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, criterion, loader)

and `booster.backward(loss, optimizer)` in the place of `loss.backward()`, stepping after every 2 of them.
"""

from colossalai.booster.plugin import GeminiPlugin


def plugin() -> GeminiPlugin:
    return GeminiPlugin(
        placement_policy="static",
        precision="bf16",
        shard_param_frac=1.0,
        offload_optim_frac=1.0,
        offload_param_frac=1.0,
        pin_memory=True,
        enable_gradient_accumulation=True,
        max_norm=1.0,
    )
