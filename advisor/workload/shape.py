"""StepProfile -> Workload."""

from __future__ import annotations

from advisor.profiling.schema import StepProfile
from advisor.workload import facts
from advisor.workload.groups import layer_group, price_part
from advisor.workload.layout import Layout, find_layout
from advisor.workload.precision import Precision, plan_optimizer, plan_precision
from advisor.workload.pricing import Pricing, flops_of
from advisor.workload.records import FLOAT_DTYPES, num_elements
from advisor.workload.saved import BYTES_PER_LOGIT
from advisor.workload.split_facts import why_not_cut_loss
from cost_models.types import Workload

#: Parts of class names of models that predict the next token; traced, some of them build the mask that they leave out on a GPU.
_DECODERS = ("CausalLM", "LMHeadModel", "GPT")
_IMAGE_CHANNELS = (1, 3, 4)


def shape(profile: StepProfile, *, precision: str | None = None, optimizer: str | None = None) -> Workload:
    """The workload of a profiled step, at one sample.

    Args:
        profile: the step, however it was seen.
        precision: fp32, tf32, fp16, bf16 or fp8; None for what the script does (`advisor.workload.precision`).
        optimizer: adamw, adam, sgd, sgd-momentum, lion, adafactor, adamw-8bit, ...; None for the script's own.

    Raises:
        AdvisorError: unknown precision or optimizer.
    """
    return shape_layout(find_layout(profile), precision=precision, optimizer=optimizer)


def shape_layout(layout: Layout, *, precision: str | None, optimizer: str | None) -> Workload:
    """`shape` for a profile that is already cut up."""
    meta = layout.profile.meta
    planned = plan_precision(meta, precision)
    pricing = plan_pricing(layout, planned)
    trainable = [p for p in layout.tree.parameters if p.trainable]
    heads, kv_heads = facts.num_heads(layout)
    experts, active_experts = facts.num_experts(layout)
    on_gpu = facts.measured_on_gpu(layout) and planned.compute_dtype == planned.traced_dtype
    is_image = bool(meta.input_shapes) and len(meta.input_shapes[0]) == 4 and meta.input_shapes[0][1] in _IMAGE_CHANNELS
    return Workload(
        name=meta.model_class or "model",
        groups=tuple(layer_group(layout, i, pricing, planned.activation_bytes) for i in range(len(layout.parts))),
        num_params=sum(p.num_elements for p in layout.tree.parameters), num_trainable_params=sum(p.num_elements for p in trainable),
        optimizer=plan_optimizer(meta, optimizer, param_bytes=planned.param_bytes, num_tensors=len(trainable)),
        compute_dtype=planned.compute_dtype, param_bytes=planned.param_bytes, master_bytes=planned.master_bytes, grad_bytes=planned.grad_bytes,
        tokens_per_sample=float(1 if is_image else meta.seq_len or 1),
        sample_unit="images" if is_image else "tokens" if meta.seq_len else "samples",
        seq_len=float(meta.seq_len), hidden_size=facts.hidden_size(layout), num_heads=heads, num_kv_heads=kv_heads,
        vocab_size=float(meta.vocab_size), num_experts=experts, num_active_experts=active_experts, tied_params=facts.tied_params(layout),
        logits_bytes=num_elements(layout.logits) * BYTES_PER_LOGIT / pricing.batch_size if layout.logits else 0.0,
        cuts_loss=not why_not_cut_loss(layout), buffer_bytes=float(meta.buffer_bytes), resident_bytes=_resident_bytes(profile=layout.profile), input_bytes=meta.input_bytes / pricing.batch_size, model_flops=_model_flops(layout, pricing),
        can_tensor_parallel=not layout.tp_reason, can_pipeline=bool(layout.cuts.parts), traced_batch=pricing.batch_size,
        measured_step_s=meta.step_time_s / max(meta.accumulation, 1) if on_gpu and meta.step_time_s else None,
        measured_device=facts.device_name(layout) if on_gpu else "", measured_host_s_per_kernel=facts.measured_host_s_per_kernel(layout),
    )  # fmt: skip


def plan_pricing(layout: Layout, planned: Precision) -> Pricing:
    """Batch and byte scales: float tensors of the traced activation width move to the planned one, everything else stays."""
    ratio = planned.activation_bytes / planned.traced_activation_bytes
    same_width = ("fp32", "tf32") if planned.traced_activation_bytes == 4 else ("fp16", "bf16")
    scale = {dtype: ratio if dtype in same_width else 1.0 for dtype in FLOAT_DTYPES}
    shapes = frozenset(p.shape for p in layout.tree.parameters)
    meta = layout.profile.meta
    is_decoder = any(name in meta.model_class for name in _DECODERS)
    return Pricing(batch_size=max(meta.batch_size, 1), weight_shapes=shapes, byte_scale=scale, masks_are_causal=is_decoder)


def _model_flops(layout: Layout, pricing: Pricing) -> float:
    """Forward and backward flops of one sample as MFU counts them: attention over the whole square (no causal discount), and its
    backward as twice the forward (the scores that fused kernels compute again are recomputation).
    """
    total = 0.0
    for i, part in enumerate(layout.parts):
        for entry, _class, phase, _split in price_part(layout, i, pricing):
            flops = flops_of(entry, phase) * part.num_repeats
            if entry.kind == "attention":
                flops *= (2.0 if entry.is_causal else 1.0) * (0.8 if phase == "backward" else 1.0)
            total += flops
    return total


def _resident_bytes(*, profile: StepProfile) -> float:
    """Buffers, and models beside the trained one (EMA copies, teachers), on every rank whatever the plan; their weights as fp32 unless 16-bit."""
    meta = profile.meta
    element_bytes = 2.0 if meta.param_dtype in {"bf16", "fp16"} else 4.0
    return meta.buffer_bytes + element_bytes * sum(meta.other_models.values())
