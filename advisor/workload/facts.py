"""Facts about the model that the cost models want as plain numbers: heads, experts, tied weights, sequence."""

from __future__ import annotations

import math

from advisor.workload.layout import Layout
from advisor.workload.pricing import attention_sides
from advisor.workload.records import is_expert
from cost_models.catalogue import gpu_for_device_name


def num_heads(layout: Layout) -> tuple[int, int]:
    """(query heads, key-value heads) that a tensor-parallel degree must divide, over all blocks; (0, 0) without attention.

    Models that repeat keys before attention show them by the width of the key projection.
    """
    meta = layout.profile.meta
    found: list[tuple[int, int]] = []
    for i, part in enumerate(layout.parts):
        for local in part.ops if part.segment.is_blocks else ():
            sides = attention_sides(local.op) if local.op.op_class == "attention" and local.op.phase == "forward" else None
            if sides is not None:
                found.append(_heads_of(layout, i, heads=sides[0][1], kv_heads=sides[1][1], head_size=sides[0][3]))
    if not found:
        return meta.num_heads, meta.num_kv_heads or meta.num_heads
    return math.gcd(*(h for h, _ in found)), math.gcd(*(k for _, k in found))


def _heads_of(layout: Layout, i: int, *, heads: int, kv_heads: int, head_size: int) -> tuple[int, int]:
    meta, split = layout.profile.meta, layout.splits[i]
    if heads == meta.num_heads and kv_heads == heads and meta.num_kv_heads:
        kv_heads = meta.num_kv_heads
    elif kv_heads == heads and split.pairs and len(split.pairs[0].columns) == 3:
        widths = [p.n for p in layout.products[i].values() if p.weight in split.pairs[0].columns and p.role == "forward"]
        kv_heads = max(int(min(widths) // head_size), 1)
    return heads, kv_heads if heads % max(kv_heads, 1) == 0 else heads


def hidden_size(layout: Layout) -> float:
    """Width of what the main blocks hand on; 0 for images and unknown."""
    part = layout.parts[layout.main]
    shape = layout.tree.modules[part.segment.repeats[0][-1].path].output_shape if part.segment.is_blocks else ()
    return float(shape[-1]) if len(shape) in (2, 3) else 0.0


def num_experts(layout: Layout) -> tuple[int, int]:
    """(experts, experts that a token visits) of the main blocks; (0, 0) without experts."""
    part = layout.parts[layout.main]
    experts = 0
    for p in part.parameters:
        if not is_expert(p):
            continue
        parts = p.name.split(".")
        following = parts[parts.index("experts") + 1]
        experts = max(experts, int(following) + 1 if following.isdigit() else p.shape[0] if len(p.shape) == 3 else 0)
    chosen = [o.op.outputs[0][-1] for o in part.ops if o.op.name == "topk" and o.op.outputs and o.op.outputs[0]]
    active = chosen[-1] if chosen else 0  # the last choice; one among groups of experts comes before it
    return experts, min(active, experts)


def tied_params(layout: Layout) -> float:
    """Elements of parameters that two different parts use (an embedding that is also the head)."""
    users: dict[str, set[int]] = {}
    for i, part in enumerate(layout.parts):
        for local in part.ops:
            p = layout.tree.parameter_by_name.get(local.op.weight)
            if p is not None and p.aliases:
                users.setdefault(p.name, set()).add(i)
    return sum(layout.tree.parameter_by_name[name].num_elements for name, parts in users.items() if len(parts) > 1)


def measured_host_s_per_kernel(layout: Layout) -> float | None:
    """Seconds of host work per kernel of a live profile; None where the device, not the host, set the pace.

    A step whose device idles for more than a fifth of it lasts as long as the host needs to launch its kernels.
    """
    meta = layout.profile.meta
    if not measured_on_gpu(layout) or not meta.step_time_s or meta.idle_s is None or meta.idle_s < 0.2 * meta.step_time_s:
        return None
    launched = sum(op.num_kernels * (1 if op.phase == "optimizer" else meta.accumulation) for op in layout.tree.ops)
    return meta.step_time_s / launched if launched else None


def measured_on_gpu(layout: Layout) -> bool:
    """Whether the profile's seconds come from a device that plans can be anchored on."""
    meta = layout.profile.meta
    return meta.source == "measured" and bool(meta.device) and "cpu" not in meta.device.lower()


def device_name(layout: Layout) -> str:
    """Catalogue name of the device that was measured; as the driver says it where the catalogue lacks it."""
    device = layout.profile.meta.device
    try:
        return gpu_for_device_name(device)
    except ValueError:
        return device
