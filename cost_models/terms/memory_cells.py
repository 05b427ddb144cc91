"""What plans of one workload share: sums per (pipeline degree, tensor degree, ..., runtime), priced once and gathered per plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cost_models.numbering import distinct, ragged
from cost_models.terms.memory_stages import STAGE_COLUMNS, StageTable, stage_table
from cost_models.terms.memory_traits import MemoryTraits
from cost_models.terms.volumes import leaves_root_whole
from cost_models.traits import load_runtime
from cost_models.traits import runtime_names as known_runtimes
from cost_models.types import FloatArray, IntArray, PlanTable, Workload

_TRAIT_COLUMNS = (
    "bucket_copies", "comm_buffer_bytes", "gathered_units", "unit_grad_bytes", "zero2_gathers", "autocast_copies", "keeps_gradients",
    "accumulates_whole", "pools_gradients", "step_copies", "carried_logits_share", "boundary_copies", "gather_buffers", "held_outputs",
    "offloads_gradients", "offloads_parameters", "builds_on_host", "saves_gathered",
)  # fmt: skip
_STATE_COLUMNS = ("param_bytes", "grad_bytes", "master_bytes", "state_bytes", "sharded_grad_bytes", "compute_bytes")
#: Columns of a cell: parameters on the rank before data-parallel sharding, bytes per sample, and the runtime's traits.
CELL_COLUMNS = (
    "params", "experts", "trainable", "trainable_experts", "kept", "again", "temporary", "freed", "logits", "boundary",
    "unit", "unit_trainable", "root", "root_trainable", "stage", "is_first", *_STATE_COLUMNS, *_TRAIT_COLUMNS,
)  # fmt: skip
_ADAM_BYTES = 8.0
_KEY = ("pp_degree", "tp_degree", "cp_degree", "ep_degree", "sequence_parallel", "recompute", "runtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Cells of a plan table, each with the pipeline stages that can be its fullest."""

    code: IntArray  # cell of each plan
    sums: FloatArray  # (CELL_COLUMNS, stages of all cells)
    start: IntArray  # of each cell: its first stage in `sums`
    candidates: IntArray  # and how many it has
    held: Mapping[int, tuple[Mapping[str, float], ...]]  # runtime code -> plans in which it holds freed tensors, and how many


def make_cells(workload: Workload, plans: PlanTable, traits: Sequence[MemoryTraits], *, rank: str = "fullest") -> Cells:
    """Group plans into cells and price those."""
    first, code = distinct(*(getattr(plans, name) for name in _KEY), _root_whole(workload, plans))
    keys = plans.take(first)
    cuts = [t.stage_split or _pipeline_cut(name) for t, name in zip(traits, plans.runtime_names, strict=True)]
    wanted = [(int(pp), cuts[int(runtime)]) for pp, runtime in zip(keys.pp_degree, keys.runtime, strict=True)]
    tables = {key: stage_table(workload, *key, rank=rank) for key in dict.fromkeys(wanted)}
    own = [tables[key] for key in wanted]
    candidates = np.array([len(t.index) for t in own], dtype=np.int64)
    start = np.cumsum(candidates) - candidates
    place, cell = ragged(np.zeros_like(start), candidates)
    held = {i: t.held_where for i, t in enumerate(traits) if t.held_where}
    sums = _price(workload, keys.take(cell), traits, [own[i] for i in cell], place)
    return Cells(code=code, sums=sums, start=start, candidates=candidates, held=held)


def _root_whole(workload: Workload, plans: PlanTable) -> IntArray:
    """1 for plans whose tensor ranks hold embeddings and head whole."""
    runtimes = [load_runtime(name) if name in known_runtimes() else None for name in plans.runtime_names]
    ranks = plans.tp_degree * plans.dp_shard_degree * plans.cp_degree
    whole = [leaves_root_whole(workload, r, ranks) for r in runtimes]
    return np.array(whole, dtype=np.int64)[plans.runtime, np.arange(len(plans))]


def _pipeline_cut(runtime: str) -> str:
    return load_runtime(runtime).pipeline_cut if runtime in known_runtimes() else "balanced"


def _price(workload: Workload, keys: PlanTable, traits: Sequence[MemoryTraits], tables: list[StageTable], place: IntArray) -> FloatArray:
    """Cell columns of stages, given by a plan, the stages that can be its fullest, and the stage's place among those."""
    if not len(keys):
        return np.zeros((len(CELL_COLUMNS), 0))
    raw = np.array([t.sums[mode, i] for t, mode, i in zip(tables, keys.recompute, place, strict=True)])
    s = dict(zip(STAGE_COLUMNS, raw.T, strict=True))
    tp, cp = keys.tp_degree.astype(np.float64), keys.cp_degree.astype(np.float64)
    outer = np.where(keys.sequence_parallel > 0, tp, 1.0)
    expert_cut = tp * keys.ep_degree
    trait = {
        name: np.array([float(getattr(t, name)) for t in traits])[keys.runtime] for name in (*_TRAIT_COLUMNS, "vocab_parallel", "cuts_loss")
    }

    def per_sample(prefix: str) -> FloatArray:
        return (s[f"{prefix}_inner"] / tp + s[f"{prefix}_sequence"] / outer + s[f"{prefix}_other"]) / cp  # type: ignore[no-any-return]

    unit = s["unit_plain"] + s["unit_tp"] / tp + s["unit_expert"] / expert_cut
    root_whole = _root_whole(workload, keys)
    cuts_logits = (trait["vocab_parallel"] > 0) | ((trait["cuts_loss"] > 0) & (root_whole == 0) & workload.cuts_loss)
    whole = s["root_tp"] * root_whole * (1.0 - 1.0 / tp)  # embeddings and head that tensor ranks don't share
    root = s["root_plain"] + s["root_tp"] / tp + whole
    root_share = s["root_trainable"] / np.maximum(s["root_plain"] + s["root_tp"], 1.0)
    experts = s["params_expert"] / expert_cut
    trainable_experts = s["trainable_expert"] / expert_cut
    columns = {
        "params": s["params_plain"] + s["params_tp"] / tp + whole + experts, "experts": experts,
        "trainable": s["trainable_plain"] + s["trainable_tp"] / tp + whole * root_share + trainable_experts, "trainable_experts": trainable_experts,
        "kept": per_sample("kept"), "again": per_sample("again"), "temporary": per_sample("temporary"), "freed": per_sample("freed"),
        "logits": s["is_last"] * workload.logits_bytes / (cp * np.where(cuts_logits, tp, 1.0)),
        "boundary": s["boundary"] / cp, "unit": unit, "unit_trainable": unit * s["unit_trained_share"],
        "root": root, "root_trainable": root * root_share, "is_first": s["is_first"],
        "stage": np.array([t.index[i] for t, i in zip(tables, place, strict=True)]),
    }  # fmt: skip
    columns |= _state_columns(workload, keys, traits) | {name: trait[name] for name in _TRAIT_COLUMNS}
    return np.stack([columns[name] for name in CELL_COLUMNS])


def _state_columns(workload: Workload, keys: PlanTable, traits: Sequence[MemoryTraits]) -> dict[str, FloatArray]:
    """Bytes per parameter: the runtime's where it trains in 16 bits its own way, else those of the script."""
    low = workload.compute_dtype not in {"fp32", "tf32"}
    own = {name: float(getattr(workload, name)) for name in ("param_bytes", "grad_bytes", "master_bytes")}
    own["state_bytes"] = workload.optimizer.state_bytes_per_param
    out: dict[str, FloatArray] = {}
    for name, value in own.items():
        theirs = [getattr(t, name) for t in traits]
        if name == "state_bytes":  # a runtime's is that of Adam's two moments, in fp32 elsewhere
            theirs = [None if v is None else v * min(value / _ADAM_BYTES, 1.0) for v in theirs]
        is_quantized = name == "param_bytes" and value < 2.0  # which no runtime undoes
        table = np.array([value if v is None or not low or is_quantized else v for v in theirs], dtype=np.float64)
        out[name] = table[keys.runtime]
    out["grad_bytes"] = out["grad_bytes"] - np.array([t.reused_grad_bytes if low else 0.0 for t in traits])[keys.runtime]
    out["sharded_grad_bytes"] = np.array([t.sharded_grad_bytes if low else 0.0 for t in traits])[keys.runtime]
    out["compute_bytes"] = np.minimum(2.0 if low else 4.0, out["param_bytes"])
    return out
