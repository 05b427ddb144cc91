"""The collectives that a plan's price charges, listed: kind, group, calls and bytes of one rank and one optimizer step.

Sizes come from the same functions as the seconds (`terms.volumes`, `cells.unit_sizes`, `terms.pipeline`), so that what an engine was seen
to do can be held against what its plan was priced by. Engines reduce, gather and send what they must and a little more: norms of gradients,
losses and counters of a few bytes are not listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cost_models.buckets import bucket_sizes, ddp_bucket_bytes
from cost_models.cells import LOSS_SUMS, group_columns, unit_sizes
from cost_models.stages import StageSplit, stage_split
from cost_models.terms import pipeline, volumes
from cost_models.terms.communication import groups_hit
from cost_models.traits import Runtime, load_runtime
from cost_models.types import FloatArray, Plan, Workload

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send", "broadcast")
GROUPS = ("dp_shard", "dp_replicate", "tp", "pp", "ep", "cp")
_MIB = 2**20
_BROADCAST_BYTES = 250 * _MIB  # DDP's broadcast_bucket_size
#: Parts of operator names, of `torch.ops.c10d`, `torch.ops._c10d_functional`, `torch.distributed` and profiler rows.
_KIND_OF_NAME = (
    (r"all_?reduce", "all-reduce"), (r"all_?gather", "all-gather"), (r"reduce_scatter", "reduce-scatter"),
    (r"all_?to_?all", "all-to-all"), (r"broadcast", "broadcast"), (r"send(?!er)", "send"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Equal collectives of one rank in one optimizer step."""

    kind: str  # one of KINDS
    group: str  # one of GROUPS: the ranks that take part
    ranks: int
    count: float  # calls
    bytes: float  # of all of them, of the whole message: gathered, before scattering, all-reduced, sent
    purpose: str  # e.g. "parameters forward", "gradients", "activations backward"


def collective_kind(operator: str) -> str:
    """Kind of an operator by its name, "" for none: "c10d::_allgather_base_", "_c10d_functional.all_reduce", "gloo:broadcast"; receives are none."""
    name = re.split(r"::|[.:]", operator.removesuffix(".default"))[-1].lower()
    return next((kind for pattern, kind in _KIND_OF_NAME if re.search(pattern, name)), "")


def charged(workload: Workload, plan: Plan, *, stage: int | None = None, first_bucket_bytes: float | None = None) -> tuple[Charge, ...]:
    """Collectives of one rank and one optimizer step.

    Args:
        workload: the training step.
        plan: how it is spread; its runtime decides what is gathered, reduced and sent when.
        stage: pipeline rank; None: the one with the most parameters, which sets the price of data parallelism.
        first_bucket_bytes: DDP's first bucket; None: as the others.

    Raises:
        ValueError: unknown runtime or no such stage.
    """
    if stage is not None and not 0 <= stage < plan.pp_degree:
        raise ValueError(f"stage {stage} is none of the plan's {plan.pp_degree}")
    runtime = load_runtime(plan.runtime)
    split = stage_split(workload, plan.pp_degree * plan.virtual_stages, cut=runtime.pipeline_cut)
    step = _Step(workload, plan, runtime, split, stage)
    found = (*step.tensor(), *step.experts(), *step.context(), *step.transfers(), *step.sharding(), *step.reduction(first_bucket_bytes),
             *step.ties(), *step.buffers())  # fmt: skip
    return tuple(c for c in found if c.ranks > 1 and c.count > 0)


def _charge(kind: str, group: str, ranks: int, *, count: float, size: float, purpose: str) -> Charge:
    return Charge(kind=kind, group=group, ranks=ranks, count=float(count), bytes=float(size), purpose=purpose)


class _Step:
    """One rank's share of a step."""

    def __init__(self, workload: Workload, plan: Plan, runtime: Runtime, split: StageSplit, stage: int | None):
        self.workload, self.plan, self.runtime, self.split = workload, plan, runtime, split
        tp, ep = np.array(float(plan.tp_degree)), np.array(float(plan.ep_degree))
        samples = np.array(plan.micro_batch / plan.cp_degree)
        root_whole = volumes.leaves_root_whole(workload, runtime, tp * plan.dp_shard_degree * plan.cp_degree)
        columns = group_columns([workload])
        self.sizes = unit_sizes(columns, tp, ep, samples, whole_outside=runtime.whole_outside, root_whole=root_whole.astype(np.float64))
        on_ranks = split.on_ranks(plan.pp_degree).astype(np.float64)
        fullest = pipeline.slowest_rank(on_ranks @ self.sizes["dense_params"], np.zeros(plan.pp_degree, np.int64), np.zeros(1, np.int64))
        self.stage = int(fullest.rank[0]) if stage is None else stage
        self.repeats = on_ranks[self.stage]
        self.shard_ranks = plan.dp_shard_degree * plan.cp_degree
        self.sharded = self.shard_ranks > 1 and (plan.zero_stage >= 3 or (plan.zero_stage == 2 and runtime.zero2_gathers > 0))
        own = np.array(volumes.gradient_bytes(workload))
        self.reduce_bytes, self.fsdp_reduce_bytes = (
            float(volumes.reduced_bytes(np.array(trait), own, np.array(volumes.gather_bytes(workload))))
            for trait in (runtime.gradient_reduce_bytes, runtime.fsdp_reduce_bytes)
        )

    def total(self, values: FloatArray) -> float:
        """Sum over the rank's layers."""
        return float(self.repeats @ values)

    def tensor(self) -> Iterator[Charge]:
        """Sums of layer outputs and input gradients over the tensor ranks, and what the layers around them need whole."""
        sizes, tp, times = self.sizes, self.plan.tp_degree, self.plan.num_microbatches
        sequence, collectives = np.array(float(self.plan.sequence_parallel)), sizes["collectives"]
        inside, regathers = sequence * sizes["in_sequence"], self.runtime.regathers_weight_gradient
        again = collectives * sizes["can_recompute"] * self.recomputes_gathers
        passes = {
            "activations forward": volumes.tensor_calls(collectives, inside),
            "activations backward": volumes.tensor_calls(collectives, inside, gathers=1.0 + regathers),
            "activations recomputed": volumes.tensor_calls(
                again, inside, skipped=self.runtime.early_stop if self.recomputes_sums else again
            ),
        }
        for purpose, calls in passes.items():
            for kind, per_unit in (("all-reduce", calls.all_reduces), ("all-gather", calls.gathers), ("reduce-scatter", calls.scatters)):
                size = self.total(per_unit * sizes["boundary_bytes"])
                yield _charge(kind, "tp", tp, count=times * self.total(per_unit), size=times * size, purpose=purpose)
        yield from self.adapters()
        yield from self.sequence_ends()
        logits, has_logits = self.total(sizes["logits_bytes"]), self.total(np.sign(sizes["logits_bytes"]))
        yield _charge("all-gather", "tp", tp, count=times * has_logits, size=times * logits, purpose="logits forward")
        sums, has_sums = self.total(sizes["loss_bytes"]), LOSS_SUMS * self.total(np.sign(sizes["loss_bytes"]))
        yield _charge("all-reduce", "tp", tp, count=times * has_sums, size=times * sums, purpose="loss forward")
        whole = times * float(sequence) * self.runtime.reduces_whole_gradients
        count, size = whole * self.total(sizes["whole_tensors"]), whole * self.total(sizes["whole_bytes"])
        yield _charge("all-reduce", "tp", tp, count=count, size=size, purpose="gradients of whole parameters")

    def adapters(self) -> Iterator[Charge]:
        """Low-rank outputs of divided inputs, summed forward, and low-rank input gradients of divided outputs, summed backward."""
        once = np.ones_like(self.sizes["can_recompute"])
        again = self.sizes["can_recompute"] * float(self.recomputes_gathers)
        if self.plan.sequence_parallel:
            row = (("reduce-scatter", "forward", once), ("all-gather", "backward", once), ("reduce-scatter", "recomputed", again))
            column = (("all-gather", "forward", once), ("reduce-scatter", "backward", once), ("all-gather", "recomputed", again))
        else:
            row = (("all-reduce", "forward", once), ("all-reduce", "backward", 0 * once), ("all-reduce", "recomputed", again))
            column = (("all-reduce", "forward", 0 * once), ("all-reduce", "backward", once), ("all-reduce", "recomputed", 0 * once))
        times = self.plan.num_microbatches
        for side, passes in (("row", row), ("column", column)):
            calls, num_bytes = self.sizes[f"num_{side}_adapters"], self.sizes[f"{side}_adapter_bytes"]
            for kind, purpose, share in passes:
                count, size = self.total(calls * share), self.total(num_bytes * share)
                yield _charge(kind, "tp", self.plan.tp_degree, count=times * count, size=times * size, purpose=f"adapters {purpose}")

    def sequence_ends(self) -> Iterator[Charge]:
        """Whole sequences after the last layer, and their gradients before the first: on the pipeline's two ends, whichever group they belong to."""
        edges = float(self.plan.sequence_parallel) * self.sizes["edges"]
        size = float(edges @ self.sizes["boundary_bytes"])
        ends = {"activations forward": (self.split.num_stages - 1) % self.plan.pp_degree, "activations backward": 0}
        for purpose, rank in ends.items():
            times = self.plan.num_microbatches * float(rank == self.stage)
            yield _charge("all-gather", "tp", self.plan.tp_degree, count=times * edges.sum(), size=times * size, purpose=purpose)

    @property
    def recomputes_sums(self) -> bool:
        """Whether recomputation runs a layer's sums over tensor ranks again: full, or selective by a share of everything."""
        return self.plan.recompute == "full" or (self.plan.recompute == "selective" and self.runtime.selective == "share")

    @property
    def recomputes_gathers(self) -> bool:
        """Whether it gathers a layer's divided sequences again: wherever it reaches beyond attention."""
        return self.plan.recompute == "full" or (self.plan.recompute == "selective" and self.runtime.selective != "attention")

    def experts(self) -> Iterator[Charge]:
        """Tokens to their experts and back."""
        holds = self.sizes["expert_params"] > 0
        active, share = np.array(float(self.workload.num_active_experts)), self.workload.routed_share
        experts, ranks = np.array(share * self.workload.num_experts), np.array(max(share * self.plan.ep_degree, 1.0))
        copies = groups_hit(experts, active, ranks) if self.runtime.dispatches_once_per_node else active
        tokens = self.total(self.sizes["token_bytes"]) / (self.plan.tp_degree if self.plan.sequence_parallel else 1)
        num_bytes = float(copies) * tokens
        once = self.total(holds.astype(np.float64)) * self.plan.num_microbatches * volumes.EXPERT_EXCHANGES
        for purpose, passes in (("tokens forward", 1), ("tokens backward", 1), ("tokens recomputed", int(self.plan.recompute == "full"))):
            size = passes * volumes.EXPERT_EXCHANGES * self.plan.num_microbatches * num_bytes
            yield _charge("all-to-all", "ep", self.plan.ep_degree, count=passes * once, size=size, purpose=purpose)

    def context(self) -> Iterator[Charge]:
        """Keys and values round the context ranks, and their gradients back."""
        whole = self.sizes["context_bytes"] * self.plan.cp_degree
        count = self.total((whole > 0).astype(np.float64)) * self.plan.num_microbatches
        num_bytes = self.total(whole) * self.plan.num_microbatches
        passes = (
            ("all-gather", "keys and values forward"),
            ("all-gather", "keys and values backward"),
            ("reduce-scatter", "their gradients"),
        )
        for kind, purpose in passes:
            yield _charge(kind, "cp", self.plan.cp_degree, count=count, size=num_bytes, purpose=purpose)

    def transfers(self) -> Iterator[Charge]:
        """What the rank's stages hand on and back."""
        plan, last = self.plan, self.split.num_stages - 1
        stages = range(self.stage, self.split.num_stages, plan.pp_degree)
        cuts = {"activations forward": [j for j in stages if j < last], "activations backward": [j - 1 for j in stages if j]}
        for purpose, after in cuts.items():
            boundary = self.sizes["boundary_bytes"][self.split.boundary_group[after]] if after else np.zeros(0)
            sent = pipeline.sent_bytes(boundary, np.array(plan.sequence_parallel), np.array(plan.tp_degree))
            times = plan.num_microbatches
            yield _charge("send", "pp", plan.pp_degree, count=times * len(after), size=times * sent.sum(), purpose=purpose)

    def held(self) -> tuple[float, float, float, float]:
        """Parameters in whole messages and those outside the layers, both with padding; sharding units and whether one is the root."""
        sizes, is_unit = self.sizes, self.sizes["is_unit"]
        params = sizes["dense_params"] + sizes["expert_params"]
        units = volumes.sharding_units(
            *(np.array(self.total(v)) for v in (sizes["num_layers"], sizes["num_layers"] * is_unit, params * (1.0 - is_unit)))
        )
        padding = volumes.shard_padding(self.workload, self.runtime, self.shard_ranks if self.sharded else 1, self.plan.tp_degree)
        root = float(units.root_params)
        whole = (self.total(params) - root) * padding[0] + root * padding[1]
        return whole, root * padding[1], float(units.num_units), min(root, 1.0)

    @property
    def trainable(self) -> float:
        """Share of the rank's parameters that get gradients."""
        dense = self.sizes["dense_params"]
        return self.total(dense * self.sizes["trainable_share"]) / max(self.total(dense), 1.0)

    def sharding(self) -> Iterator[Charge]:
        """Parameters gathered layer by layer, gradients scattered."""
        if not self.sharded:
            return
        plan, runtime, (whole, root, units, has_root) = self.plan, self.runtime, self.held()
        gathers, times = runtime.fsdp_gathers if plan.zero_stage >= 3 else 1.0, plan.num_microbatches
        size = times * volumes.gather_bytes(self.workload)
        counts, again = (
            float(volumes.regathered(np.array(x), np.array(r), gathers=gathers, gathers_root=runtime.regathers_root))
            for x, r in ((units, has_root), (whole, root))
        )
        yield _charge("all-gather", "dp_shard", self.shard_ranks, count=times * units, size=size * whole, purpose="parameters forward")
        yield _charge("all-gather", "dp_shard", self.shard_ranks, count=times * counts, size=size * again, purpose="parameters backward")
        scattered = times * whole * self.trainable * self.fsdp_reduce_bytes
        yield _charge("reduce-scatter", "dp_shard", self.shard_ranks, count=times * units, size=scattered, purpose="gradients")

    def reduction(self, first_bucket_bytes: float | None) -> Iterator[Charge]:
        """Gradients at the end of the step: all-reduced; or scattered, gathered, and shards all-reduced between replicas."""
        plan, runtime, shard = self.plan, self.runtime, self.shard_ranks
        grads = self.total(self.sizes["dense_params"] * self.sizes["trainable_share"])
        reduced, calls = grads * self.reduce_bytes, self.num_reductions(first_bucket_bytes)
        broadcasts = plan.zero_stage == 1 and runtime.zero1_broadcasts > 0
        if plan.zero_stage == 0 or broadcasts:
            yield _charge("all-reduce", "dp_replicate", shard * plan.dp_replicate_degree, count=calls, size=reduced, purpose="gradients")
        if broadcasts:
            yield _charge(
                "broadcast",
                "dp_shard",
                shard,
                count=self.num_trainable_tensors,
                size=grads * self.workload.param_bytes,
                purpose="parameters",
            )
        elif plan.zero_stage and not self.sharded:
            times = plan.num_microbatches if plan.zero_stage == 2 and runtime.reduces_every_micro_batch else 1
            kind = "all-reduce" if runtime.zero_all_reduces else "reduce-scatter"
            yield _charge(kind, "dp_shard", shard, count=times * calls, size=times * reduced, purpose="gradients")
            yield _charge(
                "all-gather", "dp_shard", shard, count=calls, size=grads * volumes.gather_bytes(self.workload), purpose="parameters"
            )
        if plan.zero_stage and not broadcasts:
            size = self.held()[0] * self.trainable * self.fsdp_reduce_bytes if self.sharded else reduced
            yield _charge(
                "all-reduce", "dp_replicate", plan.dp_replicate_degree, count=calls, size=size / shard, purpose="gradients of shards"
            )
        yield from self.expert_banks()

    def ties(self) -> Iterator[Charge]:
        """Gradients of embeddings that the first and the last stage share."""
        plan, ends = self.plan, (0, self.plan.pp_degree - 1)
        if plan.pp_degree > 1 and self.stage in ends:
            runtime, ranks = self.runtime, (np.array(float(plan.tp_degree)), np.array(float(self.shard_ranks)))
            whole = volumes.tied_bytes(
                np.array(self.workload.tied_params), np.array(volumes.gradient_bytes(self.workload)),
                tied=np.array(runtime.tied_reduce_bytes), reduced=np.array(runtime.gradient_reduce_bytes),
            )  # fmt: skip
            size = float(whole / volumes.num_tied_parts(*ranks, is_whole=np.array(runtime.equal_tables), is_sharded=np.array(self.sharded)))
            yield _charge("all-reduce", "pp", 2, count=float(size > 0), size=size, purpose="gradients of shared embeddings")

    def expert_banks(self) -> Iterator[Charge]:
        """Experts are equal on fewer ranks than the rest."""
        plan = self.plan
        if self.sharded or plan.zero_stage >= 3:
            return
        ranks = max(self.shard_ranks * plan.dp_replicate_degree // plan.ep_degree, 1)
        experts = self.total(self.sizes["expert_params"]) * self.trainable
        count = float(experts > 0)
        yield _charge(
            "reduce-scatter",
            "dp_replicate",
            ranks,
            count=count,
            size=experts * volumes.EXPERT_SCATTER_BYTES,
            purpose="gradients of experts",
        )
        yield _charge("all-gather", "dp_replicate", ranks, count=count, size=experts * volumes.EXPERT_GATHER_BYTES, purpose="experts")

    @property
    def num_trainable_tensors(self) -> float:
        return self.total(np.array([sum(p.trainable for p in g.param_shapes) for g in self.workload.groups], dtype=np.float64))

    def num_reductions(self, first_bucket_bytes: float | None) -> float:
        """Buckets, or sharding units or single tensors where the runtime reduces those."""
        if self.runtime.pipeline_reduces_tensors and self.plan.pp_degree > 1 and not self.plan.zero_stage:
            return self.num_trainable_tensors
        if not self.runtime.bucket_bytes:
            return self.held()[2]
        ready = [
            p.num_elements * self.reduce_bytes
            for group, repeats in zip(self.workload.groups[::-1], self.repeats[::-1], strict=True)
            for _ in range(int(repeats))
            for p in group.param_shapes[::-1]
            if p.trainable
        ]
        limit = ddp_bucket_bytes(sum(ready))
        return float(max(len(bucket_sizes(ready, limit, first_bucket_bytes or limit)), 1))

    def buffers(self) -> Iterator[Charge]:
        """DDP sends rank 0's buffers once per optimizer step, before the first forward pass; priced as nothing."""
        if self.runtime.bucket_bytes:
            size = self.workload.buffer_bytes
            ranks = self.shard_ranks * self.plan.dp_replicate_degree
            yield _charge("broadcast", "dp_replicate", ranks, count=np.ceil(size / _BROADCAST_BYTES), size=size, purpose="buffers")
