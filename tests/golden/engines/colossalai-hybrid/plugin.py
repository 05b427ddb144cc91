"""PP 2 interleave 2 x TP 4 x ZeRO-1 2 for ColossalAI 0.5, in an environment of its own: it wants torch 2.5.1 or older and transformers 4.51.3.

Under torchrun, after `colossalai.launch_from_torch()`:

    booster = Booster(plugin=plugin())
    model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, criterion, loader)

and `booster.execute_pipeline(iterator, model, criterion, optimizer)` in the place of forward and backward.
"""

from colossalai.booster.plugin import HybridParallelPlugin


def plugin() -> HybridParallelPlugin:
    return HybridParallelPlugin(
        tp_size=4,
        pp_size=2,
        enable_sequence_parallelism=True,
        sequence_parallelism_mode="split_gather",
        num_microbatches=8,
        pp_style="interleaved",
        num_model_chunks=2,
        precision="bf16",
        zero_stage=1,
        cpu_offload=False,
        max_norm=1.0,
    )
