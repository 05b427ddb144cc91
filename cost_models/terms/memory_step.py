"""Bytes of the plans of one table at the fullest moment of the fullest stage: array arithmetic on gathered cells.

Four moments of a step can be the fullest: the loss (all activations in flight, logits), the backward pass of the heaviest layer
(activations, that layer recomputed, its temporaries), the end of the backward pass (gradients), and the optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from cost_models.terms.memory_cells import CELL_COLUMNS, Cells
from cost_models.types import MEMORY_PARTS, SCHEDULES, FloatArray, IntArray, PlanTable

BoolArray = npt.NDArray[np.bool_]
Columns = dict[str, FloatArray]
#: What is priced per plan: the parts but for the reserve, and what becomes one or the other of them later.
PRICED = (*(p for p in MEMORY_PARTS if p != "reserve"), "pooled", "held", "held_at_worst", "load", "save", "host")
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
    activation_scale: float  # multiple of the saved bytes counted


def step_bytes(job: StepJob, plans: PlanTable) -> Columns:
    """Bytes of every plan, by the names of PRICED."""
    columns = {f.name: getattr(plans, f.name) for f in fields(PlanTable) if f.name != "runtime_names"}
    out = {name: np.empty(len(plans)) for name in PRICED}
    for start in range(0, len(plans), CHUNK):
        part = slice(start, start + CHUNK)
        priced = _fullest_stage(job, {name: values[part] for name, values in columns.items()}, job.cells.code[part])
        for name in PRICED:
            out[name][part] = priced[name]
    return out


def in_flight(plan: Mapping[str, IntArray], stage: FloatArray) -> FloatArray:
    """Micro-batches (interleaved: their share of the stage's layers) whose activations a stage holds at once.

    GPipe holds all m (Huang et al. 2019), 1F1B min(m, pp - stage), interleaving with v chunks min(m v, 2 (pp - stage - 1) + (v - 1) pp
    + 1) / v (Narayanan et al. 2021).
    """
    m, pp, v = plan["num_microbatches"], plan["pp_degree"], np.maximum(plan["virtual_stages"], 1)
    left = np.maximum(pp - stage, 1.0)
    flight = np.minimum(m, left)
    interleaved = (plan["schedule"] == _INTERLEAVED) & (v > 1)
    if interleaved.any():
        flight = np.where(interleaved, np.minimum(m * v, 2 * (left - 1) + (v - 1) * pp + 1) / v, flight)
    return np.where(pp > 1, np.where(plan["schedule"] == _GPIPE, m, flight), 1.0)


def _fullest_stage(job: StepJob, plan: dict[str, IntArray], code: IntArray) -> Columns:
    """Parts at the fullest moment of the fullest stage, for some plans."""
    best = _stage(job, plan, code, 0)
    for candidate in range(1, job.cells.num_candidates):
        more = np.flatnonzero(job.cells.candidates[code] > candidate)
        if not len(more):
            break
        other = _stage(job, {name: values[more] for name, values in plan.items()}, code[more], candidate)
        larger = other["total"] > best["total"][more]
        for name, values in best.items():
            values[more[larger]] = other[name][larger]
    return best


def _stage(job: StepJob, plan: dict[str, IntArray], code: IntArray, candidate: int) -> Columns:
    """The same for one candidate stage of each plan."""
    c = dict(zip(CELL_COLUMNS, (column.take(code) for column in job.cells.sums[candidate]), strict=True))
    micro = job.activation_scale * plan["micro_batch"]
    states = _states(plan, c)
    flight = in_flight(plan, c["stage"])
    boundary = micro * c["boundary"]
    activations = flight * (micro * c["kept"] + np.where(plan["pp_degree"] > 1, c["boundary_copies"], 0.0) * boundary)
    whole = np.where(plan["tp_degree"] > 1, boundary, 0.0)  # one layer's output, not divided by tensor parallelism
    states["gathered"] = states["gathered"] + whole * c["gather_buffers"]
    backward = {"again": micro * c["again"], "freed": micro * c["freed"], "temporary": plan["micro_batch"] * c["temporary"]}
    step = _fullest_moment(plan, c, states | backward, activations, flight)
    inputs = _INPUT_COPIES * job.input_bytes * plan["micro_batch"] * c["is_first"]
    lasting = states["parameters"] + states["optimizer"]
    sharded = states["is_sharded"] > 0
    gathered16 = c["saves_gathered"] * c["compute_bytes"] * job.num_params
    built = c["builds_on_host"] * _BUILD_BYTES * job.num_params
    return step | {
        "parameters": states["parameters"] + job.resident_bytes, "optimizer": states["optimizer"], "buckets": states["buckets"], "inputs": inputs,
        "total": step["total"] + lasting + states["buckets"] + inputs,  # resident bytes are equal on all stages
        "held": whole * _held_outputs(plan, job.cells.held) if job.cells.held else np.zeros(len(code)),
        "held_at_worst": whole * c["held_outputs"],
        "load": np.where(sharded, states["parameters"] + c["param_bytes"] * c["unit"], np.where(plan["offload"] > 0, 0.0, c["param_bytes"] * c["params"])),
        "save": lasting + np.where(sharded, np.maximum(gathered16, c["compute_bytes"] * c["unit"]), 0.0),
        "host": np.where(plan["offload"] > 0, _HOST_BUFFERS * np.maximum(built, states["offloaded"]), built) * job.gpus_per_node,
    }  # fmt: skip


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

    def share(dense: FloatArray, expert: FloatArray, cut: BoolArray) -> FloatArray:
        return np.where(cut, dense * one + expert * expert_one, dense + expert)

    dense, trained = c["params"] - c["experts"], c["trainable"] - c["trainable_experts"]
    parameters = c["param_bytes"] * share(dense, c["experts"], is_sharded)
    gradients = c["grad_bytes"] * share(trained, c["trainable_experts"], zero >= 2)
    own = share(trained, c["trainable_experts"], zero >= 1)
    optimizer = (c["master_bytes"] + c["state_bytes"] + np.where(zero >= 1, c["sharded_grad_bytes"], 0.0)) * own
    layer_grad = c["unit_grad_bytes"] * c["unit_trainable"]
    gathered = np.where(zero >= 3, c["compute_bytes"] * (c["gathered_units"] * c["unit"] + c["root"]), c["compute_bytes"] * c["params"])
    casts = c["autocast_copies"] * (c["param_bytes"] > c["compute_bytes"]) * c["compute_bytes"] * c["params"]
    everything = offload & (c["offloads_parameters"] > 0) & (zero >= 2)
    buffers = np.where(data & (zero > 0), np.where(zero == 2, 2.0, 1.0) * np.minimum(c["comm_buffer_bytes"], 4.0 * c["trainable"]), 0.0)
    return {
        "parameters": np.where(everything, 0.0, parameters),
        "gradients": np.where(everything, 0.0, gradients),
        "optimizer": np.where(offload, 0.0, optimizer),
        "buckets": np.where(data, c["bucket_copies"] * gradients, 0.0) + buffers,
        "gathered": np.where(is_sharded, gathered + layer_grad, casts),
        "root_gradients": np.where(is_sharded & (zero >= 3), c["compute_bytes"] * c["root_trainable"], 0.0),
        "step": np.where(offload, 0.0, c["step_copies"] * c["param_bytes"] * own),
        "offloaded": np.where(offload, optimizer, 0.0) + np.where(everything, parameters + gradients, 0.0),
        "is_sharded": is_sharded.astype(np.float64),
    }  # fmt: skip


def _fullest_moment(plan: dict[str, IntArray], c: Columns, has: Columns, activations: FloatArray, flight: FloatArray) -> Columns:
    """What is alive beside the lasting states at the fullest of the four moments.

    Args:
        plan: columns of the plans.
        c: columns of their cells.
        has: gradients, gathered layers, and what a backward pass makes again, frees before and needs for a moment.
        activations: kept for backward by all micro-batches in flight.
        flight: micro-batches in flight.
    """
    accumulates = plan["num_microbatches"] > 1
    copies = np.where(plan["schedule"] == _GPIPE, flight, 1.0) + np.where(accumulates, c["carried_logits_share"], 0.0)
    logits = plan["micro_batch"] * c["logits"] * copies
    all_gradients, gathered = has["gradients"], has["gathered"]
    gradients = np.where(accumulates | (c["keeps_gradients"] > 0), all_gradients, 0.0)
    layer = has["again"] + has["temporary"] + has["root_gradients"]
    forward = gradients + activations + gathered + np.maximum(logits, layer - has["freed"])  # the loss, or the heaviest layer's backward
    last, step = all_gradients + gathered + layer, all_gradients + has["step"]
    total = np.maximum(np.maximum(forward, last), step)
    is_forward = forward >= total
    is_step = ~is_forward & (step >= total)
    is_loss = is_forward & (logits >= layer - has["freed"])
    in_backward = np.where(is_loss | is_step, 0.0, 1.0)
    now = np.where(is_forward, gradients, all_gradients)
    return {
        "total": total, "gradients": now, "logits": np.where(is_loss, logits, 0.0), "recomputed": has["again"] * in_backward,
        "activations": np.where(is_forward, activations - has["freed"] * in_backward, 0.0),
        "gathered": np.where(is_step, 0.0, gathered + has["root_gradients"] * in_backward),
        "temporaries": has["temporary"] * in_backward + np.where(is_step, has["step"], 0.0),
        "pooled": np.where((c["pools_gradients"] > 0) & (plan["zero_stage"] >= 2), all_gradients - now, 0.0),
    }  # fmt: skip


def _held_outputs(plan: dict[str, IntArray], held: Mapping[int, tuple[Mapping[str, float], ...]]) -> FloatArray:
    """Freed layer outputs that a runtime was seen to hold in such a plan (`held_where`); the first entry that applies counts."""
    out = np.zeros(len(plan["runtime"]))
    data = plan["dp_replicate_degree"] * plan["dp_shard_degree"]
    columns = {name: plan[name] for name in ("pp_degree", "tp_degree")} | {"dp_degree": data}
    columns["num_gpus"] = data * plan["tp_degree"] * plan["cp_degree"] * plan["pp_degree"]
    for runtime, alternatives in held.items():
        for entry in reversed(alternatives):
            inside = plan["runtime"] == runtime
            for name, bound in entry.items():
                if name != "outputs":
                    inside &= columns[name[4:]] >= bound if name.startswith("min_") else columns[name[4:]] <= bound
            out = np.where(inside, entry["outputs"], out)
    return out
