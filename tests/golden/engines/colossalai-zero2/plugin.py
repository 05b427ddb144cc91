"""HSDP 2 x 4, optimizer offload for ColossalAI 0.5, in an environment of its own: it wants torch 2.5.1 or older and transformers 4.51.3.

Under torchrun, after `colossalai.launch_from_torch()`:

    booster = Booster(plugin=plugin())
    model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, criterion, loader)

and `booster.backward(loss, optimizer)` in the place of `loss.backward()`, stepping after every 4 of them.
"""

from colossalai.booster.plugin import LowLevelZeroPlugin


def plugin() -> LowLevelZeroPlugin:
    return LowLevelZeroPlugin(
        stage=2,
        precision="fp32",
        cpu_offload=True,
        extra_dp_size=2,
        max_norm=1.0,
    )
