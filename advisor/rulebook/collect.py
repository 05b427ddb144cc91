"""Facts of one case, from the profile's header, its hotspots, the workload, the cluster and the search's result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from advisor.rulebook.facts import FACTS, FAMILIES, HAZARDS
from advisor.search.types import Candidate, Rejected, SearchResult
from cost_models.types import OP_CLASSES, Cluster, Plan, Workload

if TYPE_CHECKING:
    from advisor.profiling.schema import ProfileMeta
    from advisor.report.report import Hotspot

Value = float | str | bool
_COMMUNICATION = ("tp_communication", "pipeline_p2p", "dp_communication", "fsdp_communication")
_RDMA_KINDS = ("infiniband", "roce", "efa", "fabric")


def collect_facts(
    *, meta: ProfileMeta, hotspots: tuple[Hotspot, ...], workload: Workload, cluster: Cluster, result: SearchResult
) -> dict[str, Value]:
    """Every fact that this case gives; what isn't known is left out, and rules that need it say so.

    Args:
        meta: header of the profile.
        hotspots: classes of operators with their shares; may be empty.
        workload: the model's step.
        cluster: what is planned for.
        result: priced plans; may hold no candidate.

    Returns:
        Name -> value, names of `advisor.rulebook.facts.FACTS` only.
    """
    facts: dict[str, Value] = {}
    for part in (
        _of_script(meta, cluster),
        _of_hotspots(hotspots, workload),
        _of_model(workload, cluster),
        _of_cluster(workload, cluster),
        _of_best_plan(result, workload, cluster),
        _of_families(result, cluster),
    ):
        facts.update(part)
    return {name: value for name, value in facts.items() if name in FACTS}


def _of_script(meta: ProfileMeta, cluster: Cluster) -> Iterator[tuple[str, Value]]:
    yield "num_optimizers", meta.num_optimizers
    yield "clips_gradients", meta.clips_gradients
    yield "uses_checkpointing", meta.uses_checkpointing
    yield "buffer_bytes", float(meta.buffer_bytes)
    yield "other_model_params", float(sum(meta.other_models.values()))
    on_cpu = meta.device.casefold().startswith("cpu")
    if meta.step_time_s and meta.idle_s is not None and on_cpu == (cluster.device.name == "cpu"):
        yield "idle_share", meta.idle_s / meta.step_time_s
    if meta.peak_memory_bytes:
        yield "measured_memory_share", meta.peak_memory_bytes / cluster.device.memory_bytes
    seen = {h.get("id", ""): h.get("evidence", "") for h in meta.hazards}
    if meta.tied:
        seen.setdefault("tied-weights", "; ".join(" = ".join(names) for names in meta.tied[:3]))
    if meta.num_optimizers > 1:
        seen.setdefault("several-optimizers", f"{meta.num_optimizers} optimizers stepped")
    if meta.optimizer == "hand-written":
        seen.setdefault("hand-written-optimizer", "no torch optimizer stepped")
    if meta.other_models:
        seen.setdefault("ema-copy", ", ".join(f"{name} ({n:,} parameters)" for name, n in meta.other_models.items()))
    for hazard in HAZARDS:
        key = hazard.replace("-", "_")
        yield f"has_{key}", hazard in seen
        if hazard in seen:
            yield f"{key}_evidence", seen[hazard] or HAZARDS[hazard]


def _of_hotspots(hotspots: tuple[Hotspot, ...], workload: Workload) -> Iterator[tuple[str, Value]]:
    if not hotspots:
        return
    for name in OP_CLASSES:
        yield f"{name.replace('-', '_')}_time_share", sum(h.time_share for h in hotspots if h.op_class == name)
    for bound in ("compute", "memory", "latency", "communication", "host"):
        yield f"{bound}_bound_share", sum(h.time_share for h in hotspots if h.bound_by == bound)
    kernels = sum(float(g.ops.num_kernels.sum()) * g.num_repeats for g in workload.groups)
    busy_s = sum(h.time_s for h in hotspots if h.op_class != "idle")
    if kernels > 0 and busy_s > 0:
        yield "mean_kernel_s", busy_s / kernels


def _of_model(workload: Workload, cluster: Cluster) -> Iterator[tuple[str, Value]]:
    w, groups = workload, workload.groups
    weights = w.num_params * w.param_bytes
    gradients = w.num_trainable_params * w.grad_bytes
    optimizer = w.num_trainable_params * (w.master_bytes + w.optimizer.state_bytes_per_param)
    states = weights + gradients + optimizer
    saved = sum(g.num_repeats * (g.saved_inner_bytes + g.saved_sequence_bytes + g.saved_other_bytes) for g in groups)
    memory = cluster.device.memory_bytes
    yield from (("num_params", w.num_params), ("trainable_share", w.num_trainable_params / max(w.num_params, 1.0)))
    yield from (("weights_bytes", weights), ("gradient_bytes", gradients), ("optimizer_bytes", optimizer), ("states_bytes", states))
    yield from (("optimizer_states_share", optimizer / max(states, 1.0)), ("states_memory_share", states / memory))
    yield from (("activations_bytes_per_sample", saved), ("activations_memory_share", saved / memory))
    yield "logits_bytes_per_sample", w.logits_bytes
    yield "logits_share_of_activations", w.logits_bytes / max(saved + w.logits_bytes, 1.0)
    yield "num_layers", float(sum(g.num_repeats * g.num_layers for g in groups if g.can_cut and g.num_repeats > 1))
    if w.vocab_size:
        tables = 2.0 if w.logits_bytes and not w.tied_params else 1.0  # embedding and head
        yield from (
            ("vocab_size", w.vocab_size),
            ("embedding_params_share", tables * w.vocab_size * w.hidden_size / max(w.num_params, 1.0)),
        )
    if w.seq_len:
        yield "seq_len", w.seq_len
    if w.num_heads:
        yield from (("num_heads", w.num_heads), ("num_kv_heads", w.num_kv_heads or w.num_heads))
    experts = sum(g.num_expert_params * g.num_repeats for g in groups)
    yield from (("num_experts", w.num_experts), ("expert_params_share", experts / max(w.num_params, 1.0)))
    yield from (("can_tensor_parallel", w.can_tensor_parallel), ("can_pipeline", w.can_pipeline), ("compute_dtype", w.compute_dtype))
    kept = 1.0 / cluster.num_gpus
    for stage, sharded in (("zero1", optimizer), ("zero2", optimizer + gradients), ("zero3", states)):
        yield f"{stage}_saving_share", sharded * (1.0 - kept) / max(states, 1.0)


def _of_cluster(workload: Workload, cluster: Cluster) -> Iterator[tuple[str, Value]]:
    device, nodes = cluster.device, cluster.num_nodes
    yield from (("device_name", device.name), ("device_memory_bytes", device.memory_bytes), ("has_bf16", "bf16" in device.peak_flops_per_s))
    yield from (("num_gpus", cluster.num_gpus), ("gpus_per_node", cluster.gpus_per_node), ("num_nodes", nodes))
    yield from (("intra_link", cluster.intra.name), ("intra_bytes_per_s", cluster.intra.bytes_per_s))
    yield "intra_is_nvlink", cluster.intra.kind in ("nvlink", "xgmi")
    yield "eager_load_bytes", workload.num_params * 4.0 * cluster.gpus_per_node
    if nodes > 1:
        yield from (("inter_link", cluster.inter.name), ("inter_bytes_per_s", cluster.inter.bytes_per_s))
        yield "link_ratio", cluster.intra.bytes_per_s / (cluster.inter.bytes_per_s / cluster.gpus_per_node)
        yield "network_has_rdma", cluster.inter.kind in _RDMA_KINDS
        # Two all-gathers of the weights and one reduce-scatter of the gradients; of each, a node must receive all but its own
        # share through its adapters. A lower bound: no latency, no protocol, line rate.
        traffic = (
            (2.0 * workload.num_params * workload.param_bytes + workload.num_trainable_params * workload.grad_bytes) * (nodes - 1) / nodes
        )
        yield from (("sharded_traffic_bytes", traffic), ("sharded_traffic_s", traffic / cluster.inter.bytes_per_s))


def _of_best_plan(result: SearchResult, workload: Workload, cluster: Cluster) -> Iterator[tuple[str, Value]]:
    if not result.candidates:
        return
    best = result.candidates[0]
    plan, step_s, memory = best.plan, best.estimate["step_time_s"], cluster.device.memory_bytes
    yield from (("best_plan_label", plan.label()), ("best_plan_step_s", step_s))
    yield "best_plan_memory_share", best.estimate["peak_memory_bytes"] / memory
    yield "best_plan_cautious_memory_share", best.estimate["high_memory_bytes"] / memory
    yield "best_plan_communication_share", _share(best, *_COMMUNICATION)
    for fact, part in (
        ("bubble", "pipeline_bubble"), ("host", "host_overhead"), ("recompute", "recompute"), ("offload", "offload"),
        ("gather", "fsdp_communication"), ("gradient", "dp_communication"),
    ):  # fmt: skip
        yield f"best_plan_{fact}_share", _share(best, part)
    peak = max(best.estimate["peak_memory_bytes"], 1.0)
    yield "best_plan_activation_share", (best.breakdown_bytes.get("activations", 0.0) + best.breakdown_bytes.get("recomputed", 0.0)) / peak
    for name in ("tp_degree", "pp_degree", "dp_degree", "zero_stage", "micro_batch", "num_microbatches"):
        yield f"best_plan_{name}", float(getattr(plan, name))
    yield from (("best_plan_offloads", plan.offload), ("best_plan_recompute", plan.recompute))
    layers = sum(g.num_repeats * g.num_layers for g in workload.groups if g.can_cut and g.num_repeats > 1)
    stages = plan.pp_degree * plan.virtual_stages
    yield from (("best_plan_layers_per_stage", layers / stages), ("best_plan_pipeline_uneven", bool(stages > 1 and layers % stages)))
    yield from (("global_batch", plan.global_batch), ("samples_per_gpu", plan.global_batch / cluster.num_gpus))


def _of_families(result: SearchResult, cluster: Cluster) -> Iterator[tuple[str, Value]]:
    best_s = result.candidates[0].estimate["step_time_s"] if result.candidates else 0.0
    firsts: dict[str, Candidate] = {}
    for key in FAMILIES:
        mine = [c for c in result.candidates if _IN_FAMILY[key](c.plan)]
        if mine:
            first = firsts[key] = min(mine, key=lambda c: c.estimate["step_time_s"])
            step_s = first.estimate["step_time_s"]
            yield from ((f"{key}_fits", True), (f"best_{key}_plan_label", first.plan.label()), (f"best_{key}_plan_step_s", step_s))
            yield f"best_{key}_plan_slowdown_share", step_s / best_s - 1.0
            yield f"best_{key}_plan_memory_share", first.estimate["peak_memory_bytes"] / cluster.device.memory_bytes
            yield f"best_{key}_plan_communication_share", _share(first, *_COMMUNICATION)
        elif (short := _shortest(key, result.rejected)) is not None:
            yield from ((f"{key}_fits", False), (f"{key}_short_by_bytes", short))
    if "fsdp" in firsts and "hsdp" in firsts:
        full, hybrid = firsts["fsdp"].estimate, firsts["hsdp"].estimate
        yield "hsdp_saves_s", full["step_time_s"] - hybrid["step_time_s"]
        yield "hsdp_extra_bytes", hybrid["peak_memory_bytes"] - full["peak_memory_bytes"]


def _shortest(family: str, rejected: tuple[Rejected, ...]) -> float | None:
    """Bytes by which the closest rejected plan of a family is over, or None where memory wasn't the reason."""
    over = [r.needed_bytes - r.available_bytes for r in rejected
            if r.needed_bytes is not None and r.available_bytes is not None and _IN_FAMILY[family](r.plan)]  # fmt: skip
    return min(over) if over else None


def _share(candidate: Candidate, *parts: str) -> float:
    return sum(candidate.breakdown_s.get(part, 0.0) for part in parts) / candidate.estimate["step_time_s"]


def _data_only(stage: int, *, hybrid: bool = False) -> Callable[[Plan], bool]:
    """Whether a plan is data parallel alone, of this ZeRO stage, on the GPU; stage 3 tells hybrid from full sharding."""

    def matches(plan: Plan) -> bool:
        alone = plan.tp_degree == plan.pp_degree == plan.cp_degree == 1 and not plan.offload
        return alone and plan.zero_stage == stage and (stage < 3 or (plan.dp_replicate_degree > 1) == hybrid)

    return matches


_IN_FAMILY: Mapping[str, Callable[[Plan], bool]] = {
    "ddp": _data_only(0),
    "zero1": _data_only(1),
    "zero2": _data_only(2),
    "fsdp": _data_only(3),
    "hsdp": _data_only(3, hybrid=True),
    "tp": lambda plan: plan.tp_degree > 1,
    "pp": lambda plan: plan.pp_degree > 1,
    "offload": lambda plan: plan.offload,
}
