"""The header of a profile: batch, sequence, optimizer, attention heads, precision."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from advisor.profiling.calls import RootCall
from advisor.profiling.rows import Row, dtype_name
from advisor.profiling.storages import num_bytes
from advisor.profiling.tables import Model
from advisor.profiling.watcher import Watcher
from advisor.profiling.world import World

_LOSS_OPERATORS = ("aten.nll_loss_forward", "aten.nll_loss2d_forward", "aten.nll_loss_nd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What was seen of a step, for the header and the hazards."""

    watcher: Watcher
    model: Model
    rows: list[Row]
    world: World
    batch_size: int | None

    def first_call(self) -> RootCall | None:
        """First call, with gradients where there is one, of a model that is trained."""
        trained = {id(c) for _, m in self.model.roots for c in m.modules()}
        calls = list(self.watcher.roots.values())
        fitting = [c for c in calls if id(c.module) in trained or id(getattr(c.module, "module", None)) in trained]
        fed = [c for c in fitting or calls if any(t.dim() for t in c.inputs)]
        return next((c for c in fed if c.has_grad), None) or next(iter(fed or fitting or calls), None)


def fields(step: Step) -> dict[str, Any]:
    """Fields of ProfileMeta that need some working out."""
    call = step.first_call()
    inputs = [t for t in call.inputs if t.dim()] if call is not None else []
    batch, seq = batch_and_sequence(step, call)
    logits = next((r.input_shapes[0] for r in step.rows if r.phase == "forward" and r.operator in _LOSS_OPERATORS), [])
    heads, kv_heads = _heads(step)
    dtypes: Counter[str] = Counter()
    for p in step.model.parameters.values():
        dtypes[dtype_name(p.dtype)] += p.numel()
    return {
        "batch_size": step.batch_size or batch, "seq_len": seq, "input_shapes": call.input_shapes if call is not None else [],
        "input_bytes": sum(num_bytes(t) for t in inputs), "accumulation": step.watcher.accumulation,
        "logits_shape": logits, "vocab_size": logits[1] if seq and len(logits) >= 2 and 2 * logits[0] >= batch * seq else 0, "num_heads": heads, "num_kv_heads": kv_heads,
        "param_dtype": dtypes.most_common(1)[0][0] if dtypes else "fp32", **_optimizer(step),
    }  # fmt: skip


def batch_and_sequence(step: Step, call: RootCall | None) -> tuple[int, int]:
    """Samples in a forward pass and tokens in a sample (0 where the inputs are no token sequences)."""
    inputs = [t for t in call.inputs if t.dim()] if call is not None else []
    if not inputs or call is None:
        return 1, 0
    tokens = next((t for t in inputs if not t.dtype.is_floating_point and t.dim() == 2 and _is_embedded(step, t)), None)
    first = inputs[0]
    if tokens is not None and first.dim() <= 2:
        batch, seq = int(tokens.shape[0]), int(tokens.shape[1])
        layers = [m for m in step.model.modules.values() if isinstance(m, (torch.nn.RNNBase, torch.nn.MultiheadAttention))]
        if layers and not layers[0].batch_first and _leads(step, layers[0], batch):
            batch, seq = seq, batch
        return batch, seq
    sizes = {int(t.shape[0]) for t in inputs}
    outputs = [t for t in call.outputs if t.dim()]
    if len(sizes) > 1 and outputs and int(outputs[0].shape[0]) < int(first.shape[0]):
        return int(outputs[0].shape[0]), 0
    return int(first.shape[0]), int(tokens.shape[1]) if tokens is not None else 0


def _leads(step: Step, module: torch.nn.Module, size: int) -> bool:
    call = step.watcher.calls.get(id(module))
    return call is not None and bool(call.input_shape) and call.input_shape[0] == size


def _is_embedded(step: Step, tokens: torch.Tensor) -> bool:
    """Whether these indices are looked up in an embedding as they are: then their second dimension is the sequence."""
    shape = list(tokens.shape)
    return any(
        r.operator.startswith("aten.embedding") and shape in r.input_shapes for r in step.rows if r.phase in ("forward", "recompute")
    )


def _heads(step: Step) -> tuple[int, int]:
    """Attention heads of the largest attention call, and those of its keys."""
    calls = [r for r in step.rows if "scaled_dot_product" in r.operator and r.phase in ("forward", "recompute") and len(r.input_shapes) > 1]
    calls = [r for r in calls if len(r.input_shapes[0]) == 4]
    config = next((c for m in step.model.modules.values() if (c := getattr(m, "config", None)) is not None), None)
    if not calls:
        attention = next((m for m in step.model.modules.values() if isinstance(m, torch.nn.MultiheadAttention)), None)
        found = attention.num_heads if attention is not None else int(getattr(config, "num_attention_heads", 0) or 0)
        return found, int(getattr(config, "num_key_value_heads", 0) or found)
    largest = max(calls, key=lambda r: r.flops)
    query, key = largest.input_shapes[:2]
    heads, kv_heads, head_size = query[1], key[1], query[3]
    if kv_heads == heads:
        kv_heads = int(getattr(config, "num_key_value_heads", 0) or 0) or _projected_heads(step, head_size) or heads
    return heads, kv_heads if heads % kv_heads == 0 else heads


def _projected_heads(step: Step, head_size: int) -> int:
    """Key heads by the size of a key projection, for models that repeat keys before attention."""
    for path, module in step.model.modules.items():
        if path.rsplit(".", 1)[-1] in ("k_proj", "wk", "key_proj") and isinstance(module, torch.nn.Linear):
            return module.out_features // head_size
    return 0


def _optimizer(step: Step) -> dict[str, Any]:
    stepped = step.watcher.stepped
    if not stepped:
        return {"optimizer": "hand-written", "num_optimizers": 0, "optimizer_state_bytes_per_param": 0.0, "optimizer_fused": False}
    main = max(stepped, key=lambda o: sum(p.numel() for g in o.param_groups for p in g["params"]))
    state_bytes = elements = 0
    for optimizer in stepped:
        for p, state in optimizer.state.items():
            elements += p.numel()
            state_bytes += 0 if id(p) in step.model.parameters else _state_bytes(p)  # a copy of the weights
            state_bytes += sum(_state_bytes(t) for t in state.values() if isinstance(t, torch.Tensor) and (t.dim() or p.numel() == 1))
    return {
        "optimizer": type(main).__name__.lower(), "num_optimizers": len(stepped),
        "optimizer_state_bytes_per_param": state_bytes / elements if elements else 0.0,
        "optimizer_fused": any(bool(g.get("fused")) for g in main.param_groups),
    }  # fmt: skip


def _state_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
