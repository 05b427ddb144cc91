"""What a run's GPU and model say of the age of its software, where the row itself doesn't: both are named in `assumed`.

A framework's name stays while its code changes. Software for Hopper, Blackwell and CDNA3 is of 2023 or later, and so is whatever trains
a model with rotary positions and gated feed-forward parts (Llama, February 2023): attention is fused there, and "Megatron-LM" is
Megatron-Core, on Blackwell that of 2025 (a runtime's trait `successors`). Code that was frozen when it was published (a runtime's trait `frozen`) stays what it was on any GPU.
"""

from __future__ import annotations

from advisor.measure.run_values import Fields
from cost_models.traits import Runtime, load_runtime

#: GPU families that came out when frameworks had fused attention.
RECENT_FAMILIES = ("hopper", "blackwell", "cdna3", "cdna4")


def runtime_of_its_time(row: Fields, runtime: Runtime, family: str) -> Runtime:
    """The runtime, or what its project had become by the time of the GPU."""
    successor = runtime.successors.get(family)
    if successor is None:
        return runtime
    row.assumed.append(f"runtime = {successor}")
    return load_runtime(successor)


def presumed_flash(row: Fields, runtime: Runtime, *, recent: bool, gated: bool) -> bool:
    """Whether attention is taken to be fused where the row doesn't say; named in `assumed`, with the reason where it isn't the runtime's habit.

    Args:
        row: of the run.
        runtime: whose habit is taken otherwise.
        recent: the GPU is of one of `RECENT_FAMILIES`.
        gated: the model has gated feed-forward parts.
    """
    if runtime.flash_attention or runtime.frozen or not (recent or gated):
        row.assumed.append("flash_attention")
        return runtime.flash_attention
    row.assumed.append(f"flash_attention = 1 (a {'GPU' if recent else 'model'} of 2023 or later)")
    return True
