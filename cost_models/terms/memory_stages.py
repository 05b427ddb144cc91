"""Pipeline stages: which repeats of which layer groups a stage holds, and the sums over them that memory needs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from cost_models.types import RECOMPUTES, FloatArray, LayerGroup, Workload

#: Sums over the layers of a stage, before any division. "unit" is the largest layer that is gathered or recomputed as one.
STAGE_COLUMNS = (
    "params_plain", "params_tp", "params_expert", "trainable_plain", "trainable_tp", "trainable_expert",
    "kept_inner", "kept_sequence", "kept_other", "again_inner", "again_sequence", "again_other",
    "temporary_inner", "temporary_sequence", "temporary_other",
    "unit_plain", "unit_tp", "unit_expert", "unit_trainable_share", "root_plain", "root_tp", "root_trainable_share",
    "boundary", "is_first", "is_last",
)  # fmt: skip
_COLUMN = {name: i for i, name in enumerate(STAGE_COLUMNS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """Stages of one pipeline degree that can be the fullest, in order."""

    index: FloatArray  # (stages,) position in the pipeline
    sums: FloatArray  # (recompute, stages, STAGE_COLUMNS)


def stage_repeats(workload: Workload, pp_degree: int, *, by_params: bool = False) -> FloatArray:
    """Repeats of each group on each stage, shape (pp_degree, groups).

    Equal layers are spread evenly; what is left over goes to stages after the first, which also hold the embedding. Ragged models
    are cut so that the costliest stage costs least (products of the operators).

    Args:
        workload: the model.
        pp_degree: stages.
        by_params: close a stage once it reaches its share of the parameters (nanotron's rule).
    """
    atoms, costs = _atoms(workload, by_params=by_params)
    if by_params:
        bounds = _greedy_bounds(costs, pp_degree)
    elif _is_uniform(atoms, workload):
        base, rest = divmod(len(atoms), pp_degree)
        sizes = np.full(pp_degree, base)
        sizes[1 : 1 + min(rest, pp_degree - 1)] += 1
        sizes[0] += rest - min(rest, pp_degree - 1)
        bounds = np.concatenate([[0], np.cumsum(sizes)])
    else:
        bounds = _balanced_bounds(costs, pp_degree)
    return np.array([atoms[a:b].sum(axis=0) for a, b in itertools.pairwise(bounds)])


def stage_table(workload: Workload, pp_degree: int, *, by_params: bool = False, rank: str = "fullest") -> StageTable:
    """Sums of the stages that can be the fullest (or of the first or last one, if only that is asked for)."""
    repeats = stage_repeats(workload, pp_degree, by_params=by_params)
    ties = _tied_on_last(workload, pp_degree)
    sums = np.array([[_sums(workload, row, i, pp_degree, mode, ties) for i, row in enumerate(repeats)] for mode in RECOMPUTES])
    if rank == "first":
        wanted = [0]
    elif rank == "last":
        wanted = [pp_degree - 1]
    elif rank == "ends":
        wanted = [0, pp_degree - 1][: min(pp_degree, 2)]
    else:
        wanted = _undominated(sums)
    return StageTable(index=np.array(wanted, dtype=np.float64), sums=sums[:, wanted])


def _atoms(workload: Workload, *, by_params: bool) -> tuple[FloatArray, FloatArray]:
    """Smallest pieces that stages are made of, as repeats per group, and their costs.

    What can't end a stage joins the next piece; what is left at the end joins the last.
    """
    size = len(workload.groups)
    pieces: list[FloatArray] = []
    open_piece = np.zeros(size)
    for g, group in enumerate(workload.groups):
        if not group.can_cut:
            open_piece[g] += group.num_repeats
            continue
        parts = max(group.num_layers, 1)
        for _ in range(group.num_repeats * parts):
            open_piece[g] += 1.0 / parts
            pieces.append(open_piece)
            open_piece = np.zeros(size)
    if not pieces:
        pieces.append(open_piece)
    elif open_piece.any():
        if by_params:
            pieces.append(open_piece)
        else:
            pieces[-1] = pieces[-1] + open_piece
    weights = np.array([g.num_params if by_params else _cost(g) for g in workload.groups])
    atoms = np.array(pieces)
    costs = atoms @ weights
    if by_params and not workload.groups[0].can_cut:
        costs[0] -= weights[0] * workload.groups[0].num_repeats  # the embedding is looked up, not multiplied
    return atoms, costs


def _cost(group: LayerGroup) -> float:
    products = float(np.sum(group.ops.m * group.ops.n * group.ops.k * group.ops.batch)) if len(group.ops) else 0.0
    return products or max(group.num_params, 1.0)


def _is_uniform(atoms: FloatArray, workload: Workload) -> bool:
    cut = [g for g, group in enumerate(workload.groups) if group.can_cut]
    costs = [_cost(workload.groups[g]) for g in cut]
    return len(atoms) <= 1 or not costs or max(costs) <= 1.5 * min(costs)


def _greedy_bounds(costs: FloatArray, stages: int) -> FloatArray:
    """A piece joins the stage, which then closes if the running cost exceeds its share."""
    share = costs.sum() / stages
    bounds, running = [0], 0.0
    for i, cost in enumerate(costs):
        running += cost
        if running > share * len(bounds) * (1 + 1e-9) and len(bounds) < stages:
            bounds.append(i + 1)
    bounds += [len(costs)] * (stages + 1 - len(bounds))
    return np.array(bounds)


def _balanced_bounds(costs: FloatArray, stages: int) -> FloatArray:
    """Contiguous split with the smallest largest sum: bisection on the bound, then first fit; every stage gets a piece if it can."""
    low, high = float(costs.max()), float(costs.sum())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(costs, middle) <= stages else (middle, high)
    bounds, running = [0], 0.0
    for i, cost in enumerate(costs):
        left = len(costs) - i
        must_close = left == stages - len(bounds) and i > bounds[-1]
        if i > bounds[-1] and len(bounds) < stages and (running + cost > high * (1 + 1e-9) or must_close):
            bounds.append(i)
            running = 0.0
        running += cost
    bounds += [len(costs)] * (stages + 1 - len(bounds))
    return np.array(bounds)


def _fits(costs: FloatArray, bound: float) -> int:
    stages, running = 1, 0.0
    for cost in costs:
        if running + cost > bound * (1 + 1e-12):
            stages, running = stages + 1, 0.0
        running += cost
    return stages


def _tied_on_last(workload: Workload, pp_degree: int) -> float:
    """Tied weights exist twice in a pipeline: on the first and on the last stage."""
    return workload.tied_params if pp_degree > 1 else 0.0


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
    return 0.0, min(group.boundary_bytes, _total_saved(group)), 0.0


def _total_saved(group: LayerGroup) -> float:
    return group.saved_inner_bytes + group.saved_sequence_bytes + group.saved_other_bytes


def _sums(workload: Workload, repeats: FloatArray, stage: int, pp_degree: int, recompute: str, ties: float) -> FloatArray:
    row = np.zeros(len(STAGE_COLUMNS))

    def add(prefix: str, names: tuple[str, str, str], values: tuple[float, float, float], times: float) -> None:
        for name, value in zip(names, values, strict=True):
            row[_COLUMN[f"{prefix}_{name}"]] += times * value

    kinds, splits = ("plain", "tp", "expert"), ("inner", "sequence", "other")
    unit_size = again_size = temporary_size = root_all = root_trained = 0.0
    for group, times in zip(workload.groups, repeats, strict=True):
        if not times:
            continue
        params = _split_params(group)
        trained = group.num_trainable_params / group.num_params if group.num_params else 0.0
        add("params", kinds, params, times)
        add("trainable", kinds, (params[0] * trained, params[1] * trained, params[2] * trained), times)
        kept = _saved(group, recompute)
        add("kept", splits, kept, times)
        whole = (group.saved_inner_bytes, group.saved_sequence_bytes, group.saved_other_bytes)
        share = min(1.0, times)
        again = tuple((w - k) * share for w, k in zip(whole, kept, strict=True))
        if sum(again) > again_size:
            again_size = sum(again)
            _put(row, "again", splits, again)
        if group.temporary_bytes > temporary_size:
            temporary_size, saved = group.temporary_bytes, sum(whole)
            _put(
                row,
                "temporary",
                splits,
                tuple(group.temporary_bytes * (w / saved if saved else float(i == 2)) for i, w in enumerate(whole)),
            )
        if _is_unit(group):
            if group.num_params > unit_size:
                unit_size = group.num_params
                _put(row, "unit", kinds, params)
                row[_COLUMN["unit_trainable_share"]] = trained
        else:
            row[_COLUMN["root_plain"]] += params[0] * times
            row[_COLUMN["root_tp"]] += (params[1] + params[2]) * times
            root_all += group.num_params * times
            root_trained += group.num_trainable_params * times
        row[_COLUMN["boundary"]] = group.boundary_bytes if group.boundary_bytes else row[_COLUMN["boundary"]]
    row[_COLUMN["root_trainable_share"]] = root_trained / root_all if root_all else 0.0
    row[_COLUMN["is_first"]], row[_COLUMN["is_last"]] = float(stage == 0), float(stage == pp_degree - 1)
    if ties and stage == pp_degree - 1:
        first = workload.groups[0]
        kind = "tp" if first.num_tp_params else "plain"
        for prefix in ("params", "trainable", "root"):
            row[_COLUMN[f"{prefix}_{kind}"]] += ties
        row[_COLUMN["root_trainable_share"]] = max(row[_COLUMN["root_trainable_share"]], 1.0)
    return row


def _put(row: FloatArray, prefix: str, names: tuple[str, str, str], values: tuple[float, ...]) -> None:
    for name, value in zip(names, values, strict=True):
        row[_COLUMN[f"{prefix}_{name}"]] = value


def _undominated(sums: FloatArray) -> list[int]:
    """Stages that no earlier stage exceeds in everything; earlier ones also hold at least as many micro-batches."""
    weights = np.concatenate([sums[mode] for mode in range(len(sums))], axis=1)  # (stages, all sums)
    weights = np.delete(weights, [m * len(STAGE_COLUMNS) + _COLUMN["is_first"] for m in range(len(sums))], axis=1)
    wanted: list[int] = []
    for stage, row in enumerate(weights):
        if not any(np.all(weights[earlier] >= row * (1 - 1e-12)) for earlier in wanted):
            wanted.append(stage)
    return wanted
