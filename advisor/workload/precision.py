"""What a precision and an optimizer mean in bytes per parameter.

The script's own habit counts unless `--precision` says otherwise:

    script                        compute  weights  master  gradients  Adam moments   bytes per parameter
    fp32                          fp32     4        0       4          8              16
    autocast over fp32 weights    16-bit   4        0       4          8              16   (torch.amp; the weights are the master)
    model.to(bf16)                bf16     2        0       2          4               8   (torch keeps moments in the weights' dtype)

A 16-bit or fp8 precision asked of an fp32 script means autocast over fp32 weights; asked of a 16-bit script it leaves weights as they are.
fp32 or tf32 asked of a 16-bit script means fp32 weights. Runtimes that keep another set of copies (DeepSpeed, Megatron) say so in
their own data files. Activations are 16-bit under 16-bit and fp8 precisions (fp8 keeps nothing smaller for backward).
"""

from __future__ import annotations

from dataclasses import dataclass

from advisor.errors import AdvisorError
from advisor.profiling.schema import ProfileMeta
from cost_models.types import OptimizerSpec

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")
#: Moments per parameter, in elements of the weights' dtype; "adamw-8bit" keeps two of one byte (and block scales, ignored).
_NUM_MOMENTS = {
    "adamw": 2.0, "adam": 2.0, "nadam": 2.0, "radam": 2.0, "adamax": 2.0, "lamb": 2.0, "sgd": 0.0, "sgd-momentum": 1.0, "lion": 1.0,
    "rmsprop": 1.0, "adagrad": 1.0, "muon": 1.0, "adafactor": 0.01,
}  # fmt: skip
OPTIMIZERS = (*_NUM_MOMENTS, "adamw-8bit")
_FLOAT32 = ("fp32", "tf32")
#: Passes of an unfused optimizer over its tensors, and tensors that one multi-tensor launch holds (torch's foreach, CUDA).
_FOREACH_PASSES = 12.0
_TENSORS_PER_LAUNCH = 48.0
_FUSED_TENSORS_PER_LAUNCH = 36.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes per element."""

    compute_dtype: str
    param_bytes: float
    master_bytes: float
    grad_bytes: float
    activation_bytes: float
    traced_dtype: str  # of the activations in the profile
    traced_activation_bytes: float


def plan_precision(meta: ProfileMeta, wanted: str | None) -> Precision:
    """The precision to plan with.

    Args:
        meta: the script's own habit.
        wanted: one of PRECISIONS, or None for the script's own.

    Raises:
        AdvisorError: unknown precision.
    """
    if wanted is not None and wanted not in PRECISIONS:
        raise AdvisorError(f'Unknown precision "{wanted}".', hint=f"Choose one of {', '.join(PRECISIONS)}.")
    traced = meta.autocast_dtype or (meta.param_dtype if meta.param_dtype in PRECISIONS else "fp32")
    compute = wanted or traced
    weights_16bit = meta.param_dtype in ("bf16", "fp16") and compute not in _FLOAT32
    weight_bytes = 2.0 if weights_16bit else 4.0
    return Precision(
        compute_dtype=compute, param_bytes=weight_bytes, master_bytes=0.0, grad_bytes=weight_bytes,
        activation_bytes=4.0 if compute in _FLOAT32 else 2.0, traced_dtype=traced, traced_activation_bytes=4.0 if traced in _FLOAT32 else 2.0,
    )  # fmt: skip


def plan_optimizer(meta: ProfileMeta, wanted: str | None, *, param_bytes: float, num_tensors: int) -> OptimizerSpec:
    """State bytes per parameter and launches of the optimizer to plan with.

    Args:
        meta: the script's own optimizer.
        wanted: one of OPTIMIZERS, or None for the script's own.
        param_bytes: bytes per element of the weights; torch keeps moments in that dtype.
        num_tensors: trainable parameters as tensors.

    Raises:
        AdvisorError: unknown optimizer.
    """
    if wanted is not None and wanted not in OPTIMIZERS:
        raise AdvisorError(f'Unknown optimizer "{wanted}".', hint=f"Choose one of {', '.join(OPTIMIZERS)}.")
    traced_param_bytes = 2.0 if meta.param_dtype in ("bf16", "fp16") else 4.0
    if wanted is None or wanted == meta.optimizer:
        name, state = meta.optimizer or "none", meta.optimizer_state_bytes_per_param * param_bytes / traced_param_bytes
    else:
        name, state = wanted, 2.0 if wanted == "adamw-8bit" else _NUM_MOMENTS[wanted] * param_bytes
    if meta.optimizer_fused and wanted is None:
        kernels = num_tensors / _FUSED_TENSORS_PER_LAUNCH
    elif name == "hand-written":
        kernels = 2.0 * num_tensors
    else:
        kernels = _FOREACH_PASSES * num_tensors / _TENSORS_PER_LAUNCH
    return OptimizerSpec(name=name, state_bytes_per_param=state, num_kernels=max(round(kernels), 1))
