"""The profile's frames as small typed rows, and the module tree. Everything after this file works on these."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from advisor.profiling.schema import StepProfile

Shape = tuple[int, ...]

FLOAT_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")
#: Containers that only line their children up.
LIST_CLASSES = ("ModuleList", "Sequential", "ModuleDict")


def num_elements(shape: Shape) -> float:
    """Elements of a tensor of this shape."""
    return float(math.prod(shape))


def parent(path: str) -> str:
    """Path of the enclosing module; "" for the root and its children."""
    return path.rpartition(".")[0]


def ancestors(path: str) -> list[str]:
    """The path itself, then each enclosing module, up to the root ""."""
    found = [path]
    while path:
        path = parent(path)
        found.append(path)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator call; fields as in `OPERATOR_COLUMNS`, `name` without the "aten." prefix."""

    call: int
    module: str
    phase: str
    name: str
    op_class: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    dtype: str
    weight: str
    flops: float
    read_bytes: float
    written_bytes: float
    saved_bytes: float
    causal: bool
    num_kernels: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One unique parameter."""

    name: str
    aliases: tuple[str, ...]
    module: str
    shape: Shape
    dtype: str
    num_elements: float
    trainable: bool


def is_expert(p: Parameter) -> bool:
    """Whether a parameter belongs to one of several experts."""
    return "experts" in p.name.split(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One module; containers without a row of their own in the profile have `num_calls` 0 and class "ModuleList"."""

    path: str
    class_name: str = "ModuleList"
    num_calls: int = 0
    input_shape: Shape = ()
    output_shape: Shape = ()
    input_group: int = -1
    weight_layout: str = ""


@dataclass(frozen=True)
class Tree:
    """Everything of a profile that shaping needs."""

    ops: tuple[Op, ...]
    modules: dict[str, Module]
    parameters: tuple[Parameter, ...]

    @cached_property
    def children(self) -> dict[str, list[str]]:
        """Paths of the direct children, in the order of the profile."""
        found: dict[str, list[str]] = {path: [] for path in self.modules}
        for path in self.modules:
            if path:
                found[parent(path)].append(path)
        return found

    @cached_property
    def params_below(self) -> dict[str, list[Parameter]]:
        """Unique parameters of each module with its children."""
        found: dict[str, list[Parameter]] = {path: [] for path in self.modules}
        for p in self.parameters:
            for path in ancestors(p.module):
                found.setdefault(path, []).append(p)
        return found

    @cached_property
    def weighted(self) -> frozenset[str]:
        """Modules that own parameters, shared ones included, with everything around them."""
        owners = {p.module for p in self.parameters} | {parent(alias) for p in self.parameters for alias in p.aliases}
        return frozenset(above for path in owners for above in ancestors(path))

    @cached_property
    def forward_flops_below(self) -> dict[str, float]:
        """Flops of the forward pass of each module with its children."""
        found = dict.fromkeys(self.modules, 0.0)
        for op in self.ops:
            if op.phase == "forward" and op.flops:
                for path in ancestors(op.module):
                    found[path] = found.get(path, 0.0) + op.flops
        return found

    @cached_property
    def first_call_below(self) -> dict[str, int]:
        """Number of the first forward operator call of each module with its children; absent if there is none."""
        found: dict[str, int] = {}
        for op in self.ops:
            if op.phase == "forward":
                for path in ancestors(op.module):
                    found.setdefault(path, op.call)
        return found

    @cached_property
    def parameter_by_name(self) -> dict[str, Parameter]:
        """Parameters by their first name and by each alias."""
        return {name: p for p in self.parameters for name in (p.name, *p.aliases)}


def read_tree(profile: StepProfile) -> Tree:
    """Typed rows of a profile; operators in order of call, modules in order of their first call."""
    rows = _rows(profile.operators, (
        "call", "module", "phase", "operator", "op_class", "input_shapes", "output_shapes", "dtype", "weight", "flops", "read_bytes",
        "written_bytes", "saved_bytes", "causal", "num_kernels",
    ))  # fmt: skip
    ops = tuple(sorted(map(_op, rows), key=lambda op: op.call))
    rows = _rows(profile.parameters, ("name", "aliases", "module", "shape", "dtype", "num_elements", "requires_grad"))
    parameters = tuple(
        Parameter(name=name, aliases=tuple(aliases), module=module, shape=_shape(shape), dtype=dtype, num_elements=float(num),
                  trainable=bool(trainable))
        for name, aliases, module, shape, dtype, num, trainable in rows
    )  # fmt: skip
    modules: dict[str, Module] = {}
    rows = _rows(
        profile.modules, ("order", "module", "class_name", "num_calls", "input_shape", "output_shape", "input_group", "weight_layout")
    )
    for _order, path, class_name, num_calls, input_shape, output_shape, group, layout in sorted(rows, key=lambda r: (r[0] < 0, r[0])):
        modules[path] = Module(
            path=path, class_name=class_name, num_calls=int(num_calls), input_shape=_shape(input_shape), output_shape=_shape(output_shape),
            input_group=int(group), weight_layout=layout,
        )  # fmt: skip
    for path in [*modules, *(op.module for op in ops), *(p.module for p in parameters)]:
        for above in ancestors(path):
            modules.setdefault(above, Module(path=above))
    return Tree(ops=ops, modules=modules, parameters=parameters)


def _rows(frame: pd.DataFrame, columns: tuple[str, ...]) -> list[tuple[Any, ...]]:
    return list(zip(*(frame[c].tolist() for c in columns), strict=True))


def _shape(value: Any) -> Shape:
    return tuple(map(int, value))


def _op(row: tuple[Any, ...]) -> Op:
    call, module, phase, operator, op_class, inputs, outputs, dtype, weight, flops, read, written, saved, causal, kernels = row
    return Op(
        call=int(call), module=module, phase=phase, name=operator.removeprefix("aten."), op_class=op_class,
        inputs=tuple(map(_shape, inputs)), outputs=tuple(map(_shape, outputs)), dtype=dtype, weight=weight or "", flops=float(flops),
        read_bytes=float(read), written_bytes=float(written), saved_bytes=float(saved), causal=bool(causal), num_kernels=float(kernels),
    )  # fmt: skip
