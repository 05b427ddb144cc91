"""Rows of a StepProfile from trace events: who launched a kernel, in which phase, and what class of work it is."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from advisor.classify.operators import kernel_class, operator_class
from advisor.profiling.imported_events import Event
from advisor.profiling.imported_shapes import DTYPES, input_bytes, input_dtype, input_shapes, operator_flops, output_bytes

_EVALUATE = "autograd::engine::evaluate_function"
#: Operators whose inner operators all belong to them: "aten::embedding" runs an index_select, "aten::lstm" products.
_COMPOSITES = ("attention", "recurrent", "convolution", "normalization", "embedding")
_NCCL_TYPES = {
    "float": 4,
    "half": 2,
    "bfloat16": 2,
    "double": 8,
    "long": 8,
    "int": 4,
    "int8": 1,
    "char": 1,
    "byte": 1,
    "uint8": 1,
    "bool": 1,
}


def device_rows(events: Sequence[Event], launches: Mapping[float, Event], operators: Mapping[float, Event]) -> list[dict[str, Any]]:
    """One row per operator call with the kernels it launched, one per copy, in the order they started.

    Args:
        events: kernels, copies and fills of one step.
        launches: launching runtime calls by correlation.
        operators: operators by external id, for traces without runtime calls.
    """
    rows: dict[tuple[object, ...], dict[str, Any]] = {}
    for event in events:
        origin = _origin(event, launches, operators)
        chain = [origin, *origin.ancestors()] if origin else []
        row = _row(event, chain)
        caller = next((e for e in chain if e.kind == "operator"), None)
        key = (id(caller) if caller and event.kind != "copy" else id(event), row["op_class"], row["operator"])
        if key in rows:
            rows[key]["measured_s"] += event.duration_s
            rows[key]["num_kernels"] += 1
        else:
            rows[key] = row
    return list(rows.values())


def host_rows(events: Sequence[Event]) -> tuple[list[dict[str, Any]], list[Event]]:
    """Rows of a trace without device, and the operators they are of: each operator's own time, without that of operators inside it.

    Views and allocations count for the operator around them; outside of any they are gaps. Flops and bytes belong to the innermost
    operator that has any.
    """
    rows: dict[int, dict[str, Any]] = {}
    kept = []
    has_inner = _around_work(events)
    for event in events:
        own_s = event.duration_s - event.children_s
        if event.kind != "operator" or own_s <= 0:
            continue
        if event.name.startswith(_EVALUATE):
            continue  # autograd's own bookkeeping is a gap
        if operator_class(event.name) == "other" and not _is_unknown(event.name):
            around = next((rows[id(e)] for e in event.ancestors() if id(e) in rows), None)
            if around:
                around["measured_s"] += own_s
            continue
        chain = [event, *event.ancestors()]
        phase = _phase(chain)
        shapes = _NO_SHAPES if id(event) in has_inner else _shape_columns(event)
        rows[id(event)] = {**shapes, "operator": _operator_name(event.name), "op_class": _chain_class(chain, phase), "phase": phase,
                           "num_kernels": 1, "device": "cpu", "copy_from": "", "copy_to": "", "measured_s": own_s}  # fmt: skip
        kept.append(event)
    return list(rows.values()), kept


def _around_work(events: Sequence[Event]) -> set[int]:
    """Ids of the operators that have an operator with flops inside them, or no flops themselves and any known operator inside."""
    around_flops, around_any = set(), set()
    for event in events:
        if event.kind == "operator" and operator_class(event.name) != "other":
            above = [id(e) for e in event.ancestors()]
            around_any.update(above)
            if operator_flops(event.name, event.args):
                around_flops.update(above)
    return {id(e) for e in events if id(e) in around_flops or (id(e) in around_any and not operator_flops(e.name, e.args))}


def _is_unknown(name: str) -> bool:
    """Whether an operator of no family may yet do work: a library's own, not one of torch's views and allocations."""
    return not name.startswith(("aten::", "torch::", "detach")) and not re.search(r"Backward\d*$", name)


def _origin(event: Event, launches: Mapping[float, Event], operators: Mapping[float, Event]) -> Event | None:
    correlation = event.number("correlation", "Correlation")
    launch = launches.get(correlation) if correlation is not None else None
    if launch:
        return launch
    external = event.number("External id", "external id", "External Id")
    return operators.get(external) if external is not None else None


def _row(event: Event, chain: Sequence[Event]) -> dict[str, Any]:
    """Columns of a device event; `chain` is what launched it, innermost first."""
    caller = next((e for e in chain if e.kind == "operator"), None)
    device = f"cuda:{int(event.number('device', 'Device') or 0)}"
    phase = _phase(chain)
    by_kernel = kernel_class(event.name)
    row = {**(_shape_columns(caller) if caller else _NO_SHAPES), "num_kernels": 1, "device": device, "copy_from": "", "copy_to": "",
           "measured_s": event.duration_s, "operator": _operator_name(caller.name) if caller else event.name, "phase": phase}  # fmt: skip
    if event.kind == "copy":
        return {**row, **_copy_columns(event, chain, device, phase)}
    if by_kernel == "collective":
        return {**row, **_collective_columns(event, chain)}
    op_class = _chain_class(chain, phase) if chain else "other"
    return {**row, "op_class": op_class if op_class != "other" else "optimizer" if phase == "optimizer" else by_kernel}


def _chain_class(chain: Sequence[Event], phase: str) -> str:
    """Class of what runs innermost, unless something around it owns all of its work: a composite or an autograd node."""
    if phase == "optimizer":
        return "optimizer"
    named = [(e, operator_class(e.name)) for e in chain if e.kind == "operator" and not e.name.startswith(_EVALUATE)]
    innermost = next((op_class for _, op_class in named if op_class != "other"), "other")
    if innermost == "collective":
        return innermost
    owners = [op_class for e, op_class in named if op_class in _COMPOSITES or (_is_node(e) and op_class not in ("other", "collective"))]
    return owners[-1] if owners else innermost


def _is_node(event: Event) -> bool:
    """Whether an event is an autograd node at work; what runs beside it under "evaluate_function" only adds up gradients."""
    return event.parent is not None and event.parent.name == f"{_EVALUATE}: {event.name}"


def _phase(chain: Sequence[Event]) -> str:
    for event in chain:
        if event.name.startswith(_EVALUATE):
            return "recompute" if "CheckpointFunction" in event.name else "backward"
        if event.name.startswith("Optimizer."):
            return "optimizer"
        if event.name.startswith("enumerate(DataLoader)"):
            return "data"
    return "forward"


def _copy_columns(event: Event, chain: Sequence[Event], device: str, phase: str) -> dict[str, Any]:
    """Direction and bytes of a copy: "Memcpy HtoD (Pinned -> Device)"; peer copies name their devices in the arguments."""
    found = re.search(r"memcpy ?([hdp])to([hdp])", event.name.lower()) or re.search(
        r"([hdp])to([hdp])", str(event.args.get("kind", "")).lower()
    )
    sides = found.groups() if found else ("d", "d")
    if "p" in sides:
        source, target = event.number("fromDevice", "inDevice", "srcDevice"), event.number("toDevice", "outDevice", "dstDevice")
        copy_from = f"cuda:{int(source)}" if source is not None else device
        copy_to = f"cuda:{int(target)}" if target is not None else "cuda:peer"
    else:
        copy_from, copy_to = (device if side == "d" else "cpu" for side in sides)
    num_bytes = event.number("bytes", "Bytes")
    if num_bytes is None:
        launch = next((e for e in chain if e.kind == "launch"), None)
        num_bytes = (launch.number("size") if launch else None) or 0.0
    op_class = operator_class("aten.copy_", phase=phase, copy_from=copy_from, copy_to=copy_to)
    return {"op_class": op_class, "copy_from": copy_from, "copy_to": copy_to, "read_bytes": int(num_bytes), "written_bytes": int(num_bytes),
            "flops": 0.0, "phase": "data" if op_class == "copy-host-to-device" and phase == "forward" else phase}  # fmt: skip


def _collective_columns(event: Event, chain: Sequence[Event]) -> dict[str, Any]:
    """Name and message of a collective, from the kernel's arguments or from the operator that started it."""
    called = next((e.name for prefix in ("c10d::", "nccl:") for e in chain if e.name.startswith(prefix)), event.name)
    row = {"op_class": "collective", "operator": _operator_name(called), "flops": 0.0}
    args = next((e.args for e in (event, *chain) if e.args.get("Collective name")), None)
    if args:
        size = _NCCL_TYPES.get(str(args.get("dtype", "")).lower().removeprefix("c10::"), 1)
        return {**row, "read_bytes": _count(args.get("In msg nelems")) * size, "written_bytes": _count(args.get("Out msg nelems")) * size}
    started = next((e for e in chain if e.name.startswith(("nccl:", "c10d::", "record_param_comms")) and input_shapes(e.args)), None)
    num_bytes = _first_tensor_bytes(started.args) if started else 0
    return {**row, "read_bytes": num_bytes, "written_bytes": num_bytes}


def _first_tensor_bytes(args: Mapping[str, Any]) -> int:
    shapes = input_shapes(args)
    types = args.get("Input type") or []
    size = DTYPES.get(str(types[0]).lower(), ("", 1))[1] if isinstance(types, list) and types else 1
    return math.prod(shapes[0]) * size if shapes and shapes[0] else 0


def _shape_columns(operator: Event) -> dict[str, Any]:
    shapes = [shape for shape in input_shapes(operator.args) if shape]
    return {"input_shapes": shapes, "output_shapes": [], "dtype": input_dtype(operator.args),
            "flops": operator_flops(operator.name, operator.args), "read_bytes": input_bytes(operator.args),
            "written_bytes": output_bytes(operator.name, operator.args)}  # fmt: skip


_NO_SHAPES: Mapping[str, Any] = {"input_shapes": [], "output_shapes": [], "dtype": "", "flops": 0.0, "read_bytes": 0, "written_bytes": 0}


def _operator_name(name: str) -> str:
    return re.sub(r"^(aten|c10d|torchvision|fbgemm|prims)::", r"\1.", name)


def _count(value: object) -> int:
    try:
        return int(float(str(value)))
    except (ValueError, OverflowError):
        return 0
