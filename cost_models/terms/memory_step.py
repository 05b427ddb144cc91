"""Bytes of plans at the fullest moment of the fullest stage: array arithmetic on gathered cells.

Four moments of a step can be the fullest: the loss (all activations in flight, logits), the backward pass of the heaviest layer
(activations, that layer recomputed, its temporaries), the end of the backward pass (gradients), and the optimizer step.

Plans that differ in nothing but their number of micro-batches are one kind. `stage_sizes` prices what a kind has in common, for each
stage that can be the fullest; `step_bytes` adds the micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from cost_models.numbering import ragged
from cost_models.terms.memory_cells import CELL_COLUMNS, Cells
from cost_models.types import MEMORY_PARTS, SCHEDULES, FloatArray, IntArray, PlanTable

BoolArray = npt.NDArray[np.bool_]
Columns = dict[str, FloatArray]
#: What is priced per plan: the parts but for the reserve, and what becomes one or the other of them later.
PRICED = (*(p for p in MEMORY_PARTS if p != "reserve"), "pooled", "held", "held_at_worst", "load", "save", "host")
#: Sizes of a stage that plans keep whatever the moment and the number of micro-batches.
_LASTING = ("parameters", "optimizer", "buckets", "inputs", "held", "held_at_worst", "load", "save", "host")
#: The others. forward, loss, heaviest and late: bytes alive in the forward pass before activations, at the loss, in the heaviest layer's
#: backward pass and at the largest later moment; kept_gradients: alive in the forward pass, accumulated_gradients: only after a first one.
_SIZES = (
    *_LASTING, "forward", "in_flight", "loss", "loss_in_flight", "carried_logits", "heaviest", "late", "step_is_latest", "gradients",
    "kept_gradients", "accumulated_gradients", "gathered", "root_gradients", "again", "freed", "temporary", "step", "pools_gradients",
    "most_chunks", "chunks", "held_by_few",
)  # fmt: skip
_FEW = 2  # micro-batches: with so few the host has no time to run far ahead of the device
#: Plans priced at once: working arrays stay in the processor's cache.
CHUNK = 8192
_GPIPE, _INTERLEAVED = SCHEDULES.index("gpipe"), SCHEDULES.index("interleaved")
_INPUT_COPIES = 2.0  # the batch in use and the next one
_BUILD_BYTES = 4.0  # per parameter while a model is built on the host: fp32
_HOST_BUFFERS = 1.5  # pinned copies beside offloaded states, as DeepSpeed's own estimator has it


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJob:
    """What all plans of a table share."""

    cells: Cells
    num_params: float
    input_bytes: float  # per sample
    resident_bytes: float  # on every rank
    gpus_per_node: int
    tokens_per_sample: float
    activation_scale: float  # multiple of the saved bytes counted
    padding: FloatArray  # (kinds, 2): what equal shards of the layers and of the root take over what they hold


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSizes:
    """Sizes of the stages that can be the fullest, for each kind of plans."""

    columns: Columns  # by _SIZES, one element per stage
    start: IntArray  # of each kind: its first stage
    candidates: IntArray  # and how many it has


def stage_sizes(job: StepJob, plans: PlanTable) -> StageSizes:
    """Sizes of kinds of plans, one plan for each."""
    cells = job.cells
    candidates = cells.candidates[cells.code]
    entry, kind = ragged(cells.start[cells.code], candidates)
    given = {f.name: getattr(plans, f.name) for f in fields(PlanTable) if f.name != "runtime_names"}
    columns = {name: np.empty(len(kind)) for name in _SIZES}
    for begin in range(0, len(kind), CHUNK):
        part = slice(begin, begin + CHUNK)
        c = dict(zip(CELL_COLUMNS, cells.sums.take(entry[part], axis=1), strict=True))
        c |= dict(zip(("layer_padding", "root_padding"), job.padding[kind[part]].T, strict=True))
        sizes = _stage(job, {name: values.take(kind[part]) for name, values in given.items()}, c)
        for name in _SIZES:
            columns[name][part] = sizes[name]
    return StageSizes(columns=columns, start=np.cumsum(candidates) - candidates, candidates=candidates)


def step_bytes(sizes: StageSizes, kind: IntArray, num_microbatches: IntArray) -> Columns:
    """Bytes of plans on their fullest stage, by the names of PRICED.

    Args:
        sizes: of the kinds.
        kind: of each plan.
        num_microbatches: of each plan.
    """
    at = sizes.start.take(kind)
    largest = _total(sizes.columns, at, num_microbatches)
    candidates = sizes.candidates.take(kind)
    for candidate in range(1, int(candidates.max(initial=1))):
        more = np.flatnonzero(candidates > candidate)
        total = _total(sizes.columns, at_more := sizes.start.take(kind[more]) + candidate, num_microbatches[more])
        larger = total > largest[more]
        at[more[larger]], largest[more[larger]] = at_more[larger], total[larger]
    return _parts({name: values.take(at) for name, values in sizes.columns.items()}, num_microbatches)


def chunks_in_flight(plan: Mapping[str, IntArray], stage: FloatArray) -> tuple[FloatArray, IntArray]:
    """Most model chunks whose activations a stage holds at once, and chunks per micro-batch and stage.

    With m micro-batches min(m x chunks, most) / chunks are in flight. GPipe holds all m (Huang et al. 2019), 1F1B min(m, pp - stage),
    interleaving with v chunks min(m v, 2 (pp - stage - 1) + (v - 1) pp + 1) / v (Narayanan et al. 2021).
    """
    pp, v = plan["pp_degree"], np.maximum(plan["virtual_stages"], 1)
    left = np.maximum(pp - stage, 1.0)
    chunks = np.where((plan["schedule"] == _INTERLEAVED) & (pp > 1), v, 1)
    most = np.where(chunks > 1, 2 * (left - 1) + (v - 1) * pp + 1, np.where(plan["schedule"] == _GPIPE, np.inf, left))
    return np.where(pp > 1, most, 1.0), chunks


def _stage(job: StepJob, plan: dict[str, IntArray], c: Columns) -> Columns:
    """_SIZES of stages."""
    micro = job.activation_scale * plan["micro_batch"]
    has = _states(plan, c)
    boundary = micro * c["boundary"]
    whole = np.where(plan["tp_degree"] > 1, boundary, 0.0)  # one layer's output, not divided by tensor parallelism
    sharded, offload = has["is_sharded"] > 0, plan["offload"] > 0
    layer_flops = 2.0 * c["unit"] * job.tokens_per_sample * plan["micro_batch"]
    lasting = has["parameters"] + has["optimizer"]
    gathered16 = c["saves_gathered"] * c["compute_bytes"] * job.num_params
    built = c["builds_on_host"] * _BUILD_BYTES * job.num_params
    has |= {
        "inputs": _INPUT_COPIES * job.input_bytes * plan["micro_batch"] * c["is_first"],
        "gathered": has["gathered"] + whole * c["gather_buffers"],
        "in_flight": micro * c["kept"] + np.where(plan["pp_degree"] > 1, c["boundary_copies"], 0.0) * boundary,
        "again": micro * c["again"], "freed": micro * c["freed"], "temporary": plan["micro_batch"] * c["temporary"],
        "held": whole * _held_outputs(plan, layer_flops, np.inf, job.cells.held),
        "held_by_few": whole * _held_outputs(plan, layer_flops, _FEW, job.cells.held),
        "held_at_worst": whole * c["held_outputs"],
        "load": np.where(sharded, has["parameters"] + c["param_bytes"] * c["unit"], np.where(offload, 0.0, c["param_bytes"] * c["params"])),
        "save": lasting + np.where(sharded, np.maximum(gathered16, c["compute_bytes"] * c["unit"]), 0.0),
        "host": np.where(offload, _HOST_BUFFERS * np.maximum(built, has["offloaded"]), built) * job.gpus_per_node,
    }  # fmt: skip
    moments = _moments(plan, c, has)
    return has | moments | {"parameters": has["parameters"] + job.resident_bytes}  # which are equal on all stages


def _states(plan: dict[str, IntArray], c: Columns) -> Columns:
    """Parameters, gradients, optimizer states, buffers and gathered layers of one stage, after sharding.

    ZeRO divides optimizer states from stage 1, gradients from 2, parameters at 3 (Rajbhandari et al. 2020), among data-shard and
    context ranks; experts among those of them that hold the same experts.
    """
    zero, offload = plan["zero_stage"], plan["offload"] > 0
    shard = (plan["dp_shard_degree"] * plan["cp_degree"]).astype(np.float64)
    one, expert_one = 1.0 / shard, 1.0 / np.maximum(shard / plan["ep_degree"], 1.0)
    data = plan["dp_replicate_degree"] * plan["dp_shard_degree"] > 1
    gathers2 = (c["zero2_gathers"] > 0) & (zero == 2)
    is_sharded = ((zero >= 3) | gathers2) & (shard > 1)

    def share(dense: FloatArray, root: FloatArray, expert: FloatArray, cut: BoolArray) -> FloatArray:
        padded = (dense - root) * c["layer_padding"] + root * c["root_padding"]
        return np.where(cut, padded * one + expert * expert_one, dense + expert)

    dense, trained = c["params"] - c["experts"], c["trainable"] - c["trainable_experts"]
    parameters = c["param_bytes"] * share(dense, c["root"], c["experts"], is_sharded)
    gradients = c["grad_bytes"] * share(trained, c["root_trainable"], c["trainable_experts"], zero >= 2)
    own = share(trained, c["root_trainable"], c["trainable_experts"], zero >= 1)
    optimizer = (c["master_bytes"] + c["state_bytes"] + np.where(zero >= 1, c["sharded_grad_bytes"], 0.0)) * own
    layer_grad = c["unit_grad_bytes"] * c["unit_trainable"]
    gathered = np.where(zero >= 3, c["compute_bytes"] * (c["gathered_units"] * c["unit"] + c["root"]), c["compute_bytes"] * c["params"])
    casts = c["autocast_copies"] * (c["param_bytes"] > c["compute_bytes"]) * c["compute_bytes"] * c["params"]
    everything = offload & (c["offloads_parameters"] > 0) & (zero >= 2)
    no_gradients = everything | (offload & (c["offloads_gradients"] > 0) & (zero >= 2))
    buffers = np.where(
        (data | offload) & (zero > 0), np.where(zero == 2, 2.0, 1.0) * np.minimum(c["comm_buffer_bytes"], 4.0 * c["trainable"]), 0.0
    )
    return {
        "parameters": np.where(everything, 0.0, parameters),
        "gradients": np.where(no_gradients, 0.0, gradients),
        "whole_gradients": np.where((c["accumulates_whole"] > 0) & (zero >= 2), c["compute_bytes"] * c["trainable"], 0.0),
        "optimizer": np.where(offload, 0.0, optimizer),
        "buckets": np.where(data, c["bucket_copies"] * gradients, 0.0) + buffers,
        "gathered": np.where(is_sharded, gathered + layer_grad, casts),
        "root_gradients": np.where(is_sharded & (zero >= 3), c["compute_bytes"] * c["root_trainable"], 0.0),
        "step": np.where(offload, 0.0, c["step_copies"] * c["param_bytes"] * own),
        "offloaded": np.where(offload, optimizer, 0.0) + np.where(everything, parameters + gradients, 0.0),
        "is_sharded": is_sharded.astype(np.float64),
    }  # fmt: skip


def _moments(plan: dict[str, IntArray], c: Columns, has: Columns) -> Columns:
    """What a step's moments need, but for what grows with the number of micro-batches.

    Args:
        plan: columns of the plans.
        c: columns of their cells.
        has: states, gathered layers, and what a backward pass makes again, frees before and needs for a moment.
    """
    lasting = has["parameters"] + has["optimizer"] + has["buckets"] + has["inputs"]
    kept = np.where(c["keeps_gradients"] > 0, has["gradients"], 0.0)
    layer = has["again"] + has["temporary"] + has["root_gradients"]
    last_backward = has["gathered"] + layer
    logits, all_at_once = plan["micro_batch"] * c["logits"], plan["schedule"] == _GPIPE
    most_chunks, chunks = chunks_in_flight(plan, c["stage"])
    return {
        "forward": lasting + has["gathered"] + kept, "kept_gradients": kept,
        "accumulated_gradients": np.maximum(has["gradients"], has["whole_gradients"]) - kept,
        "loss": np.where(all_at_once, 0.0, logits), "loss_in_flight": np.where(all_at_once, logits, 0.0),
        "carried_logits": logits * c["carried_logits_share"], "heaviest": layer - has["freed"],
        "late": lasting + has["gradients"] + np.maximum(last_backward, has["step"]),
        "step_is_latest": (has["step"] >= last_backward).astype(np.float64),
        "pools_gradients": ((c["pools_gradients"] > 0) & (plan["zero_stage"] >= 2)).astype(np.float64),
        "most_chunks": most_chunks, "chunks": chunks.astype(np.float64),
    }  # fmt: skip


def _total(columns: Columns, at: IntArray, num_microbatches: IntArray) -> FloatArray:
    """Bytes of some stages at their fullest moment."""
    names = (
        "forward", "accumulated_gradients", "in_flight", "loss", "loss_in_flight", "carried_logits", "heaviest", "late", "most_chunks", "chunks",
    )  # fmt: skip
    s = {name: columns[name].take(at) for name in names}
    flight, loss, forward = _forward(s, num_microbatches)
    return np.maximum(forward + flight * s["in_flight"] + np.maximum(loss, s["heaviest"]), s["late"])


def _forward(s: Columns, num_microbatches: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Micro-batches in flight, bytes of the loss, and bytes of the forward pass beside activations and loss."""
    accumulates = num_microbatches > 1
    flight = np.minimum(num_microbatches * s["chunks"], s["most_chunks"]) / s["chunks"]
    loss = s["loss"] + flight * s["loss_in_flight"] + accumulates * s["carried_logits"]
    return flight, loss, s["forward"] + accumulates * s["accumulated_gradients"]


def _parts(s: Columns, num_microbatches: IntArray) -> Columns:
    """What is alive at the fullest of the four moments, by the names of PRICED."""
    flight, loss, forward = _forward(s, num_microbatches)
    activations = flight * s["in_flight"]
    is_forward = forward + activations + np.maximum(loss, s["heaviest"]) >= s["late"]
    is_step = ~is_forward & (s["step_is_latest"] > 0)
    is_loss = is_forward & (loss >= s["heaviest"])
    in_backward = ~(is_loss | is_step)
    gradients = np.where(is_forward, s["kept_gradients"] + (num_microbatches > 1) * s["accumulated_gradients"], s["gradients"])
    return {name: s[name] for name in _LASTING} | {
        "gradients": gradients, "logits": np.where(is_loss, loss, 0.0), "recomputed": s["again"] * in_backward,
        "activations": np.where(is_forward, activations - s["freed"] * in_backward, 0.0),
        "gathered": np.where(is_step, 0.0, s["gathered"] + s["root_gradients"] * in_backward),
        "temporaries": s["temporary"] * in_backward + np.where(is_step, s["step"], 0.0),
        "held": np.where(num_microbatches > _FEW, s["held"], s["held_by_few"]),
        "pooled": s["pools_gradients"] * np.maximum(s["gradients"] - gradients, 0.0),
    }  # fmt: skip


def _held_outputs(
    plan: dict[str, IntArray], layer_flops: FloatArray, num_microbatches: float, held: Mapping[int, tuple[Mapping[str, float], ...]]
) -> FloatArray:
    """Freed layer outputs that a runtime was seen to hold in such a plan (`held_where`); the first entry that applies counts."""
    out = np.zeros(len(plan["runtime"]))
    if not held:
        return out
    data = plan["dp_replicate_degree"] * plan["dp_shard_degree"]
    columns: dict[str, FloatArray | IntArray] = {
        "layer_flops": layer_flops, "num_microbatches": np.full(len(out), num_microbatches), "dp_degree": data,
        "pp_degree": plan["pp_degree"], "tp_degree": plan["tp_degree"],
    }  # fmt: skip
    columns["num_gpus"] = data * plan["tp_degree"] * plan["cp_degree"] * plan["pp_degree"]
    for runtime, alternatives in held.items():
        for entry in reversed(alternatives):
            inside = plan["runtime"] == runtime
            for name, bound in entry.items():
                if name != "outputs":
                    inside &= columns[name[4:]] >= bound if name.startswith("min_") else columns[name[4:]] <= bound
            out = np.where(inside, entry["outputs"], out)
    return out
