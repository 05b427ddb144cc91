"""A StepProfile out of what the recorder and the watcher saw."""

from __future__ import annotations

import bisect
import platform
import sys
from typing import Any

import torch

from advisor.classify.operators import operator_class
from advisor.profiling import hazards, headline, tables
from advisor.profiling.recorder import Recorder
from advisor.profiling.rows import Row, dtype_name
from advisor.profiling.schema import MODULE_COLUMNS, OPERATOR_COLUMNS, PARAMETER_COLUMNS, ProfileMeta, StepProfile, frame
from advisor.profiling.source import Source
from advisor.profiling.watcher import Watcher
from advisor.profiling.world import World


def build(source: Source, script: str, *, watcher: Watcher, recorder: Recorder, world: World, warnings: list[str],
          asked_workers: list[int], batch_size: int | None) -> StepProfile:  # fmt: skip
    """The profile of the step that was seen.

    `saved_bytes` of rows in phase "forward" is what this script keeps as it is; rows in phase "recompute" carry what the
    checkpointed blocks would keep without checkpointing, so the two together are the bytes without any checkpointing
    (and the inputs of the blocks, which only checkpointing keeps).
    """
    model = tables.find_model(watcher)
    rows = _step_rows(watcher, recorder, model)
    operators = frame(_operator_rows(rows, model), OPERATOR_COLUMNS)
    modules = frame(tables.module_rows(model, watcher), MODULE_COLUMNS)
    parameters = frame(tables.parameter_rows(model, watcher), PARAMETER_COLUMNS)
    step = headline.Step(watcher=watcher, model=model, rows=rows, world=world, batch_size=batch_size)
    trainable = [p for key, p in model.parameters.items() if key in model.trainable]
    meta = ProfileMeta(
        script=script, entry=source.entry, form=source.form, source="traced", framework=f"torch {torch.__version__.split('+')[0]}",
        model_class=model.class_name, num_params=sum(p.numel() for p in model.parameters.values()),
        num_trainable_params=sum(p.numel() for p in trainable), tied=[names for names in model.names.values() if len(names) > 1],
        buffer_bytes=sum(b.numel() * b.element_size() for _, root in model.roots for b in root.buffers()), other_models=model.others,
        saved_bytes=sum(r.saved_bytes for r in rows if r.phase == "forward"), uses_checkpointing=any(r.phase == "recompute" for r in rows),
        uses_grad_scaler=watcher.uses_grad_scaler, clips_gradients=watcher.clips_gradients,
        autocast_dtype=dtype_name(watcher.autocast_dtype) if watcher.autocast_dtype else "",
        hazards=hazards.find(source, step, recorder, asked_workers), warnings=warnings, versions=_versions(), **headline.fields(step),
    )  # fmt: skip
    return StepProfile(meta=meta, operators=operators, modules=modules, parameters=parameters)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "accelerate", "lightning", "timm"):
        if name in sys.modules and (version := getattr(sys.modules[name], "__version__", "")):
            found[name] = str(version)
    return found


def _step_rows(watcher: Watcher, recorder: Recorder, model: tables.Model) -> list[Row]:
    """Rows of one steady step: input work seen between two steps stands for that of the first."""
    _charge_saved(recorder)
    rows = list(recorder.rows)
    if not watcher.roots:
        for row in (*watcher.rows_before, *rows):
            row.phase = "forward" if row.phase == "data" else row.phase
        return [*watcher.rows_before, *rows]
    trained = {id(m) for _, m in model.roots}
    rows = [r for r in rows if r.evaluated is None or id(r.evaluated) not in trained]
    if watcher.second_inputs is not None:
        data = [r for r in rows if r.phase == "data"]
        rows = data + [r for r in rows if r.phase != "data"]
    else:
        rows = [r for r in watcher.rows_before if r.phase == "data" and r.copy_from] + rows
    return _merged_backward(rows)


def _charge_saved(recorder: Recorder) -> None:
    """Give each row the bytes that its autograd node keeps; nodes of views pass them to the operator before them."""
    nodes = sorted(n for n, row in recorder.rows_of_node.items() if row is not None)
    for (node, phase), num_bytes in recorder.saved_of_node.items():
        row = recorder.rows_of_node.get(node)
        i = bisect.bisect_right(nodes, node)
        while (row is None or row.phase not in (phase, "data")) and i > 0:
            i -= 1
            row = recorder.rows_of_node[nodes[i]]
        if row is not None:
            row.saved_bytes += num_bytes


def _merged_backward(rows: list[Row]) -> list[Row]:
    """Backward calls of one folded forward call become one row."""
    merged: list[Row] = []
    of_forward: dict[int, Row] = {}
    for row in rows:
        forward = row.forward
        last = of_forward.get(id(forward))
        if row.phase != "backward" or forward is None or not forward.is_folded:
            merged.append(row)
        elif last is not None:
            last.flops += row.flops
            last.num_kernels += row.num_kernels
            last.output_shapes, last.written_bytes = row.output_shapes, last.written_bytes + row.written_bytes
        else:
            row.operator, row.is_folded = f"{forward.operator}_backward", True
            row.input_shapes, row.read_bytes = [*row.input_shapes[:1], *forward.input_shapes], row.read_bytes + forward.read_bytes
            row.causal, row.weight = forward.causal, row.weight if row.weight is not None else forward.weight
            merged.append(row)
            of_forward[id(forward)] = row
    for row in merged:
        if (
            row.is_folded
            and row.phase == "backward"
            and row.forward is not None
            and row.operator.startswith(("aten.lstm", "aten.gru", "aten.rnn"))
        ):
            row.flops, row.num_kernels = 2 * row.forward.flops, 2 * row.forward.num_kernels
    return merged


def _operator_rows(rows: list[Row], model: tables.Model) -> list[dict[str, Any]]:
    return [_operator_row(i, row, model) for i, row in enumerate(rows)]


def _operator_row(call: int, row: Row, model: tables.Model) -> dict[str, Any]:
    own = operator_class(row.operator, phase=row.phase, copy_from=row.copy_from, copy_to=row.copy_to)
    forward = row.forward
    if forward is not None and not row.copy_from and own != "collective":
        inherited = operator_class(forward.operator, copy_from=forward.copy_from, copy_to=forward.copy_to)
        own = inherited if inherited != "other" else own
    key = id(row.module)
    path = model.paths.get(key, model.other_paths.get(key, "")) if row.module is not None else ""
    if row.weight is not None and not path and id(row.weight) in model.owners and row.phase == "backward":
        path = model.owners[id(row.weight)]
    return {
        "call": call, "module": path, "phase": row.phase, "operator": row.operator, "op_class": own, "input_shapes": row.input_shapes,
        "output_shapes": row.output_shapes, "dtype": row.dtype, "weight": (model.names.get(id(row.weight)) or [""])[0] if row.weight is not None else "",
        "flops": row.flops, "read_bytes": row.read_bytes, "written_bytes": row.written_bytes, "saved_bytes": row.saved_bytes, "causal": row.causal,
        "num_kernels": row.num_kernels, "device": row.device, "copy_from": row.copy_from, "copy_to": row.copy_to, "measured_s": float("nan"),
    }  # fmt: skip
