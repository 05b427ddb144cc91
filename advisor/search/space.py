"""Only the legal plans: every way to spread a workload over a cluster that divides heads, layers, batch and world size.

Nothing is priced here and nothing is built that could not run. Loops run over (tensor, pipeline, data) degrees only, a few hundred at
most; everything below is a broadcast product, so a million plans cost a fraction of a second.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from cost_models.types import RECOMPUTES, SCHEDULES, Cluster, IntArray, PlanTable, Workload

#: Engines as cost models know them. All run the script's own kernels: plans must differ by what they communicate and keep, not by a framework.
RUNTIMES = ("torch-ddp", "deepspeed-zero", "fsdp2", "torch-tp")
_NONE, _GPIPE, _ONE_F_ONE_B, _INTERLEAVED = (SCHEDULES.index(name) for name in ("none", "gpipe", "1f1b", "interleaved"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What a search may use; the defaults are everything."""

    max_tp_degree: int = 64
    max_pp_degree: int = 128
    max_virtual_stages: int = 8
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    recomputes: tuple[str, ...] = RECOMPUTES
    offload: bool = True
    gpipe: bool = True
    accumulation: int = 1  # passes that the script itself accumulates over: plans that run it as it is keep a multiple of them


def divisors(n: int) -> list[int]:
    """All divisors of n >= 1, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def num_cut_layers(workload: Workload) -> int:
    """Layers that pipeline stages may be made of."""
    return sum(group.num_repeats for group in workload.groups if group.can_cut)


def tp_degrees(workload: Workload, world_size: int, limit: int) -> list[int]:
    """Tensor-parallel degrees: they divide the world, the heads and the key-value heads."""
    if not workload.can_tensor_parallel:
        return [1]
    heads = max(workload.num_heads, 1)
    kv_heads = workload.num_kv_heads or heads
    return [d for d in divisors(world_size) if d <= limit and (d == 1 or (heads % d == 0 and kv_heads % d == 0))]


def pp_degrees(workload: Workload, world_size: int, limit: int) -> list[int]:
    """Pipeline degrees: they divide the world and leave every stage a layer."""
    if not workload.can_pipeline:
        return [1]
    return [d for d in divisors(world_size) if d <= min(limit, max(num_cut_layers(workload), 1))]


def legal_plans(workload: Workload, cluster: Cluster, *, global_batch: int, space: Space | None = None) -> PlanTable:
    """All legal plans of a workload on a whole cluster at a fixed global batch.

    Args:
        workload: what is trained.
        cluster: every GPU of it is used.
        global_batch: samples per optimizer step; plans that can't divide it among their data ranks are left out.
        space: limits.

    Returns:
        The plans as arrays; empty when no data degree divides the batch.
    """
    space = space or Space()
    blocks: list[dict[str, IntArray]] = []
    for tp in tp_degrees(workload, cluster.num_gpus, space.max_tp_degree):
        for pp in pp_degrees(workload, cluster.num_gpus // tp, space.max_pp_degree):
            dp = cluster.num_gpus // (tp * pp)
            if dp * tp * pp == cluster.num_gpus and global_batch % dp == 0:
                blocks.append(_block(workload, cluster, space, tp=tp, pp=pp, dp=dp, per_rank=global_batch // dp))
    names = list(_COLUMNS)
    joined = {name: np.concatenate([b[name] for b in blocks]) if blocks else np.zeros(0, np.int64) for name in names}
    return PlanTable(**joined, runtime_names=RUNTIMES)


_COLUMNS = tuple(f.name for f in dataclasses.fields(PlanTable) if f.name != "runtime_names")


def _block(workload: Workload, cluster: Cluster, space: Space, *, tp: int, pp: int, dp: int, per_rank: int) -> dict[str, IntArray]:
    """Plans of one (tensor, pipeline, data) shape: product of sharding, batch split, schedule, recomputation and sequence parallelism."""
    shard = _shardings(space, cluster, tp=tp, pp=pp, dp=dp)  # rows: zero_stage, dp_shard_degree, offload
    batch = _batch_splits(workload, space, pp=pp, per_rank=per_rank)  # rows: micro_batch, num_microbatches, virtual_stages, schedule
    can_recompute = any(group.can_recompute for group in workload.groups)
    recompute = [RECOMPUTES.index(r) for r in space.recomputes if r == "none" or can_recompute]
    sequence = [0, 1] if tp > 1 and workload.seq_len and workload.seq_len % tp == 0 else [0]
    i, j, k, s = (a.ravel() for a in np.meshgrid(range(len(shard)), range(len(batch)), recompute, sequence, indexing="ij"))
    zero, dp_shard, offload = shard[i].T
    micro, num_micro, virtual, schedule = batch[j].T
    ones = np.ones(len(i), np.int64)
    return {
        "dp_replicate_degree": dp // dp_shard, "dp_shard_degree": dp_shard, "tp_degree": ones * tp, "cp_degree": ones, "ep_degree": ones,
        "pp_degree": ones * pp, "virtual_stages": virtual, "zero_stage": zero, "micro_batch": micro, "num_microbatches": num_micro,
        "recompute": k.astype(np.int64), "schedule": schedule, "sequence_parallel": s.astype(np.int64), "offload": offload,
        "runtime": _runtime(zero, tp=tp, pp=pp),
    }  # fmt: skip


def _runtime(zero: IntArray, *, tp: int, pp: int) -> IntArray:
    """Who would run it: DDP, DeepSpeed for ZeRO-1 and 2, FSDP2; torch's own parallelism for everything with tensors or stages."""
    if tp > 1 or pp > 1:
        return np.full(len(zero), RUNTIMES.index("torch-tp"), np.int64)
    codes = np.array([RUNTIMES.index(name) for name in ("torch-ddp", "deepspeed-zero", "deepspeed-zero", "fsdp2")], np.int64)
    return codes[zero]


def _shardings(space: Space, cluster: Cluster, *, tp: int, pp: int, dp: int) -> IntArray:
    """(zero_stage, dp_shard_degree, offload): replicate, shard over all data ranks, or shard in a node and replicate across nodes.

    ZeRO-2 does not mix with pipelines (gradients must persist over the micro-batches). Offloading needs a sharding engine; one GPU
    may use it alone.
    """
    rows: list[tuple[int, int, int]] = [(0, 1, 0)] if 0 in space.zero_stages else []
    offloads = (0, 1) if space.offload and tp == pp == 1 else (0,)
    for stage in space.zero_stages:
        if stage == 0 or (stage == 2 and pp > 1):
            continue
        sizes = [dp] if dp > 1 else []
        in_node = cluster.gpus_per_node // tp
        if stage == 3 and 1 < in_node < dp and dp % in_node == 0:
            sizes.append(in_node)
        rows += [(stage, size, off) for size in sizes for off in offloads if not (off and size < dp)]
        if dp == 1 and stage == 2 and 1 in offloads:
            rows.append((2, 1, 1))
    return np.array(rows, np.int64).reshape(-1, 3)


def _batch_splits(workload: Workload, space: Space, *, pp: int, per_rank: int) -> IntArray:
    """(micro_batch, num_microbatches, virtual_stages, schedule) at a fixed batch per data rank."""
    splits = [(b, per_rank // b) for b in divisors(per_rank)]
    if pp == 1:
        splits = [(b, m) for b, m in splits if m % space.accumulation == 0] or splits
        return np.array([(b, m, 1, _NONE) for b, m in splits], np.int64)
    rows = []
    layers = num_cut_layers(workload)
    interleaves = [v for v in range(2, space.max_virtual_stages + 1) if layers % (pp * v) == 0]
    for b, m in splits:
        rows.append((b, m, 1, _ONE_F_ONE_B))
        if space.gpipe:
            rows.append((b, m, 1, _GPIPE))
        if m % pp == 0:  # interleaved schedules hand micro-batches out in rounds of pp
            rows += [(b, m, v, _INTERLEAVED) for v in interleaves]
    return np.array(rows, np.int64)
