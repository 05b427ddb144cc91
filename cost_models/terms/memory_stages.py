"""Pipeline stages: which repeats of which layer groups a stage holds, and the sums over them that memory needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_models.stages import stage_split
from cost_models.types import RECOMPUTES, FloatArray, LayerGroup, Workload

#: Sums over the layers of a stage, before any division. "unit" is the largest layer that is gathered as one; "again", "temporary" and
#: "freed" belong to the layer at whose backward pass most is alive: made again, short-lived, and freed before by later layers.
STAGE_COLUMNS = (
    "params_plain", "params_tp", "params_expert", "trainable_plain", "trainable_tp", "trainable_expert",
    "kept_inner", "kept_sequence", "kept_other", "again_inner", "again_sequence", "again_other",
    "temporary_inner", "temporary_sequence", "temporary_other", "freed_inner", "freed_sequence", "freed_other",
    "unit_plain", "unit_tp", "unit_expert", "unit_trained_share", "root_plain", "root_tp", "root_trainable",
    "boundary", "is_first", "is_last",
)  # fmt: skip
_COLUMN = {name: i for i, name in enumerate(STAGE_COLUMNS)}
_KINDS, _SPLITS = ("plain", "tp", "expert"), ("inner", "sequence", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """Stages of one pipeline degree that can be the fullest, in order."""

    index: FloatArray  # (stages,) position in the pipeline
    sums: FloatArray  # (recompute, stages, STAGE_COLUMNS)


def stage_repeats(workload: Workload, pp_degree: int, cut: str) -> FloatArray:
    """Repeats of each group on each stage, shape (pp_degree, groups).

    Args:
        workload: the model.
        pp_degree: stages.
        cut: as in `stage_split`, or "cost": nanotron's rule, by which a block joins the stage, which closes if the running cost
            exceeds its share; a block costs its weights, the head too, the embedding nothing.
    """
    if cut != "cost":
        return stage_split(workload, pp_degree, cut=cut).counts.astype(np.float64)
    size = len(workload.groups)
    pieces = [g for g, group in enumerate(workload.groups) for _ in range(group.num_repeats)]
    weights = np.array([group.num_params for group in workload.groups])
    if not workload.groups[0].can_cut:
        weights[0] = 0.0
    if workload.tied_params:
        weights[-1] = max(weights[-1], workload.tied_params)
    counts, stage, running, total = np.zeros((pp_degree, size)), 0, 0.0, float(weights[pieces].sum())
    for g in pieces:
        counts[stage, g] += 1
        running += weights[g]
        if running > total * (stage + 1) / pp_degree * (1 + 1e-9) and stage < pp_degree - 1:
            stage += 1
    return counts


def stage_table(workload: Workload, pp_degree: int, cut: str, *, rank: str = "fullest") -> StageTable:
    """Sums of the stages that can be the fullest (or of the first or last one, if only that is asked for)."""
    repeats = stage_repeats(workload, pp_degree, cut)
    sums = _all_sums(workload, repeats)
    if rank == "first":
        wanted = [0]
    elif rank == "last":
        wanted = [pp_degree - 1]
    elif rank == "ends":
        wanted = [0, pp_degree - 1][: min(pp_degree, 2)]
    else:
        wanted = _undominated(sums)
    return StageTable(index=np.array(wanted, dtype=np.float64), sums=sums[:, wanted])


def _all_sums(workload: Workload, repeats: FloatArray) -> FloatArray:
    """(recompute, stages, columns); equal stages are summed once."""
    rows, inverse = np.unique(repeats, axis=0, return_inverse=True)
    once = np.array([[_sums(workload, row, mode) for row in rows] for mode in RECOMPUTES])
    sums = once[:, inverse.ravel()]
    _place(sums, workload)
    return sums


def _is_unit(group: LayerGroup) -> bool:
    """Whether engines shard and gather this group's repeats one by one; everything else is one root unit."""
    return group.num_repeats > 1 or group.can_cut or group.can_recompute


def _split_params(group: LayerGroup) -> tuple[float, float, float]:
    """Parameters divided by neither, by tensor parallelism only, and by expert (and tensor) parallelism."""
    expert = group.num_expert_params
    both = min(expert, max(0.0, group.num_tp_params + expert - group.num_params))
    tensor = max(group.num_tp_params - both, 0.0)
    return max(group.num_params - tensor - expert, 0.0), tensor, expert


def _saved(group: LayerGroup, recompute: str) -> tuple[float, float, float]:
    if recompute == "none" or not group.can_recompute:
        return group.saved_inner_bytes, group.saved_sequence_bytes, group.saved_other_bytes
    if recompute == "selective":
        kept = (group.selective_inner_bytes, group.selective_sequence_bytes, group.selective_other_bytes)
        return kept if sum(kept) > 0 else (group.saved_inner_bytes, group.saved_sequence_bytes, group.saved_other_bytes)
    return 0.0, min(group.boundary_bytes, sum(_saved(group, "none"))), 0.0


def _sums(workload: Workload, repeats: FloatArray, recompute: str) -> FloatArray:
    """STAGE_COLUMNS of one stage, but for its place in the pipeline."""
    row = np.zeros(len(STAGE_COLUMNS))
    held = [(group, times) for group, times in zip(workload.groups, repeats, strict=True) if times]
    for group, times in held:
        params, share = _split_params(group), _trained_share(group)
        _add(row, "params", _KINDS, params, times)
        _add(row, "trainable", _KINDS, params, times * share)
        _add(row, "kept", _SPLITS, _saved(group, recompute), times)
        if not _is_unit(group):
            _add(row, "root", ("plain", "tp"), (params[0], params[1] + params[2]), times)
            row[_COLUMN["root_trainable"]] += group.num_trainable_params * times
        row[_COLUMN["boundary"]] = group.boundary_bytes or row[_COLUMN["boundary"]]
    _add_heaviest(row, workload, held, recompute)
    units = [g for g, _ in held if _is_unit(g)]
    if units:
        largest = max(units, key=lambda g: g.num_params)
        _add(row, "unit", _KINDS, _split_params(largest), 1.0)
        row[_COLUMN["unit_trained_share"]] = _trained_share(largest)
    return row


def _add_heaviest(row: FloatArray, workload: Workload, held: list[tuple[LayerGroup, float]], recompute: str) -> None:
    """The layer at whose backward pass most is alive. Backward runs from the last layer to the first, so what later ones kept is gone."""
    last = workload.groups[-1]
    freed, best, largest = np.zeros(3), None, -np.inf
    for group, times in reversed(held):
        again = np.array(_again(group, recompute)) * min(times, 1.0)
        saved = np.array(_saved(group, "none"))
        is_loss = group is last and workload.logits_bytes > 0 and not _is_unit(group)  # the loss has its own moment
        shares = saved / saved.sum() if saved.sum() else np.array([0.0, 0.0, 1.0])
        temporary = shares * (0.0 if is_loss else group.temporary_bytes)
        alive = float((again + temporary - freed).sum())
        if alive > largest:
            largest, best = alive, (again, temporary, freed)
        freed = freed + np.array(_saved(group, recompute)) * times
    if best:
        for prefix, values in zip(("again", "temporary", "freed"), best, strict=True):
            _add(row, prefix, _SPLITS, tuple(values), 1.0)


def _trained_share(group: LayerGroup) -> float:
    return group.num_trainable_params / group.num_params if group.num_params else 0.0


def _again(group: LayerGroup, recompute: str) -> tuple[float, ...]:
    """Bytes of one repeat that its backward pass makes again."""
    return tuple(whole - kept for whole, kept in zip(_saved(group, "none"), _saved(group, recompute), strict=True))


def _add(row: FloatArray, prefix: str, names: tuple[str, ...], values: tuple[float, ...], times: float) -> None:
    for name, value in zip(names, values, strict=False):
        row[_COLUMN[f"{prefix}_{name}"]] += times * value


def _place(sums: FloatArray, workload: Workload) -> None:
    """Mark first and last stage, and put a copy of tied weights on the last: they exist on both ends of a pipeline."""
    sums[:, 0, _COLUMN["is_first"]] = 1.0
    sums[:, -1, _COLUMN["is_last"]] = 1.0
    if workload.tied_params and sums.shape[1] > 1:
        kind = "tp" if workload.groups[0].num_tp_params else "plain"
        for column in (f"params_{kind}", f"trainable_{kind}", f"root_{kind}", "root_trainable"):
            sums[:, -1, _COLUMN[column]] += workload.tied_params


def _undominated(sums: FloatArray) -> list[int]:
    """Stages that no earlier stage exceeds in everything; earlier ones also hold at least as many micro-batches."""
    sign = np.array([-1.0 if name.startswith("freed") else float(name != "is_first") for name in STAGE_COLUMNS])
    weights = np.concatenate(list(sums * sign), axis=1)  # (stages, all sums): more is fuller
    wanted: list[int] = []
    for stage, row in enumerate(weights):
        if not any(np.all(weights[earlier] >= row - 1e-12 * np.abs(row)) for earlier in wanted):
            wanted.append(stage)
    return wanted
