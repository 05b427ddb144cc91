"""What `report.json` holds under "model", and why a model can't be split where it can't."""

from __future__ import annotations

from typing import Any

from advisor.profiling.schema import StepProfile
from advisor.workload.architecture import architecture
from advisor.workload.assign import Part
from advisor.workload.layout import Layout, find_layout
from advisor.workload.records import Parameter, Tree
from advisor.workload.split_facts import split_facts
from cost_models.types import Workload


def model_summary(profile: StepProfile, workload: Workload) -> dict[str, Any]:
    """The model as the report and the engines see it.

    Args:
        profile: the step.
        workload: what `shape` made of it.

    Returns:
        Plain values: `name class num_params num_trainable_params tied layer_groups optimizer precision batch_size seq_len num_heads
        num_kv_heads vocab_size buffer_bytes other_models block_paths tp_reason pp_reason` and byte counts. `block_paths` are the modules to
        wrap, shard or checkpoint one by one, in execution order. And what `split_facts` and `architecture` tell.
    """
    layout, meta = find_layout(profile), profile.meta
    return {
        "name": workload.name, "class": meta.model_class, "num_params": int(workload.num_params),
        "num_trainable_params": int(workload.num_trainable_params), "tied": [list(names) for names in meta.tied],
        "tied_params": int(workload.tied_params),
        "layer_groups": [_group(layout, i, workload) for i in range(len(layout.parts))],
        "optimizer": workload.optimizer.name, "precision": workload.compute_dtype, "param_bytes": workload.param_bytes,
        "batch_size": meta.batch_size, "accumulation": meta.accumulation, "seq_len": meta.seq_len, "hidden_size": workload.hidden_size,
        "num_heads": workload.num_heads, "num_kv_heads": workload.num_kv_heads, "vocab_size": int(workload.vocab_size),
        "num_experts": workload.num_experts, "buffers": meta.buffer_bytes, "other_models": dict(meta.other_models),
        "unused_parameters": _unused(layout),
        "model_flops_per_sample": workload.model_flops, "block_paths": _block_paths(layout), **split_facts(layout),
        "can_tensor_parallel": workload.can_tensor_parallel, "can_pipeline": workload.can_pipeline,
        "tp_reason": layout.tp_reason, "pp_reason": layout.cuts.reason, **architecture(layout.tree, _block_paths(layout)),
    }  # fmt: skip


def split_notes(profile: StepProfile) -> tuple[str, ...]:
    """Sentences on what can't be split and why; empty where tensor and pipeline parallelism both apply."""
    layout = find_layout(profile)
    notes = []
    if layout.tp_reason:
        notes.append(f"tensor parallelism left out: {layout.tp_reason}")
    if not layout.cuts.parts:
        notes.append(f"pipeline parallelism left out: {layout.cuts.reason}")
    return tuple(notes)


def _group(layout: Layout, i: int, workload: Workload) -> dict[str, Any]:
    part, group = layout.parts[i], workload.groups[i]
    return {
        "name": group.name, "class": _class_name(part, layout.tree), "num_repeats": group.num_repeats,
        "num_params": round(group.num_params), "num_trainable_params": round(group.num_trainable_params),
        "num_calls": max(layout.tree.modules[u.path].num_calls for u in part.segment.repeats[0]),
        "saved_bytes_per_sample": group.saved_inner_bytes + group.saved_sequence_bytes + group.saved_other_bytes,
        "boundary_bytes_per_sample": group.boundary_bytes, "can_recompute": group.can_recompute, "can_cut": group.can_cut,
    }  # fmt: skip


def _unused(layout: Layout) -> list[str]:
    """Trainable parameters that got no gradient in the traced step."""
    frame = layout.profile.parameters
    return [str(name) for name in frame.loc[frame["requires_grad"].astype(bool) & ~frame["got_grad"].astype(bool), "name"]]


def _class_name(part: Part, tree: Tree) -> str:
    names = dict.fromkeys(tree.modules[u.path].class_name for u in part.segment.repeats[0])
    return " + ".join(names)


def _block_paths(layout: Layout) -> list[str]:
    """Blocks in execution order, without those that share a parameter with a module outside (sharding wrappers can't tie across units)."""
    blocks = [u.path for p in layout.parts if p.segment.is_blocks for repeat in p.segment.repeats for u in repeat if u.is_block]
    return [path for path in blocks if not any(_is_shared_outside(p, path) for p in layout.tree.params_below[path])]


def _is_shared_outside(p: Parameter, path: str) -> bool:
    return any(not alias.startswith(path + ".") for alias in p.aliases)
