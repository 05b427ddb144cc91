"""DDP 8 for ColossalAI 0.5, in an environment of its own: it wants torch 2.5.1 or older and transformers 4.51.3.

Under torchrun, after `colossalai.launch_from_torch()`:

    booster = Booster(plugin=plugin())
    model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, criterion, loader)

and `booster.backward(loss, optimizer)` in the place of `loss.backward()`.
"""

from colossalai.booster.plugin import TorchDDPPlugin


def plugin() -> TorchDDPPlugin:
    return TorchDDPPlugin(
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
    )
