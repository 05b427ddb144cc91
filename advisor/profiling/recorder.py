"""Every operator call of the step as a row: a dispatch mode that sits above the fake tensors.

Backward calls are traced to the forward call they belong to by autograd's sequence number: the node made for a forward operator
carries the number that was current when the operator ran, and shows up as the current node in backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.profiling import dynamic, flops, rows, values
from advisor.profiling.rows import Row, dtype_name
from advisor.profiling.storages import StorageMap, num_bytes
from advisor.profiling.world import CPU, World

_NOT_WORK = {
    "aten.detach", "aten.lift_fresh", "aten._unsafe_view", "aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided",
    "aten.new_empty_strided", "aten.alias", "aten.is_same_size", "aten.resize_", "aten.set_", "aten._reshape_alias", "aten.is_pinned",
    "aten._has_same_storage_numel", "aten.record_stream", "aten.empty_permuted", "aten.set_data", "aten._assert_async", "aten.lift",
    "aten._version", "aten.sym_size", "aten.sym_numel", "aten.sym_stride", "aten.sym_storage_offset", "aten._nested_tensor_size", "aten.unsafe_split", "aten.unsafe_chunk", "aten.unsafe_split_with_sizes",
}  # fmt: skip
#: Allocations made by the first optimizer step only: its state.
_STATE_MAKERS = {"aten.zeros_like", "aten.zeros", "aten.full_like", "aten.ones_like", "aten.full", "aten.new_zeros", "aten.scalar_tensor"}
#: Their results after the first are lengths, which stay on the host.
_HOST_LENGTHS = {"aten._pack_padded_sequence"}
_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention")


@dataclass(frozen=True, slots=True)
class _Operator:
    name: str
    is_work: bool
    mutates: bool
    is_multi_tensor: bool
    is_attention: bool


_Mode: Any = TorchDispatchMode


class Recorder(_Mode):  # type: ignore[misc]
    """Rows of the operators called while `is_recording`.

    Args:
        world: intended devices and known values.
        phase_of: tells phase and module of a call, given its tensor arguments.
    """

    def __init__(self, world: World, watcher: Any) -> None:
        super().__init__()
        self.world, self.watcher = world, watcher
        self.rows: list[Row] = []
        self.is_recording = False
        self.rows_of_node: dict[int, Row | None] = {}
        self.module_of_node: dict[int, torch.nn.Module | None] = {}
        self.saved_of_node: dict[tuple[int, str], int] = {}
        self.weights: StorageMap[torch.Tensor] = StorageMap()
        self.kept: StorageMap[bool] = StorageMap()
        self.dynamic_shapes: dict[str, str] = {}
        self.guesses = False  # shapes that depend on unknown values are made up, half of every mask being true
        self._operators: dict[Any, _Operator] = {}
        self.estimates_saved = False  # what is kept for backward can't be seen: every floating-point output counts
        self._fold_depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        operator = self._operators.get(func) or self._describe(func)
        if operator.name == "aten._local_scalar_dense":
            return self._read_scalar(args[0])
        ins = values.tensors_in(args, [])
        if kwargs:
            values.tensors_in(kwargs.values(), ins)
        self.world.num_inside += 1
        try:
            out = self._call(func, operator, args, kwargs, ins)
        finally:
            self.world.num_inside -= 1
        outs = values.tensors_in((out,), [])
        device = self._spread_device(operator, ins, outs)
        if self.is_recording and not self.world.is_copying:
            if operator.is_work:
                self._add(func, operator, args, kwargs, ins=ins, outs=outs, out=out, device=device)
            elif not self.watcher.roots and operator.name == "aten.detach" and torch._C._current_graph_task_id() != -1:
                variable = getattr(torch._C._current_autograd_node(), "variable", None)
                if variable is not None:
                    self.watcher.note_leaf(variable)
            elif torch.is_grad_enabled() and (node := torch._C._autograd._get_sequence_nr() - 1) not in self.module_of_node:
                self.module_of_node[node] = self.watcher.module()
                if operator.name not in ("aten.detach", "aten.alias"):  # a view made this node: no operator of ours
                    self.rows_of_node.setdefault(node, None)
        return out

    def _call(self, func: Any, operator: _Operator, args: Any, kwargs: Any, ins: list[torch.Tensor]) -> Any:
        if not self.world.fake:
            return func(*args, **kwargs)
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._data_dependent(func, operator, args, kwargs)
        values.keep(self.world, func, args, kwargs, ins=ins, outs=values.tensors_in((out,), []), mutates=operator.mutates)
        return out

    def _data_dependent(self, func: Any, operator: _Operator, args: Any, kwargs: Any) -> Any:
        """Result of an operator whose shape or Python value depends on values: right where they are known."""
        if self.watcher.roots:
            self.dynamic_shapes.setdefault(operator.name, self.watcher.location())
        found = dynamic.result(self.world, func, operator.name, args, kwargs)
        if found is not None:
            return found
        if operator.name == "aten.equal":
            return True
        if not self.guesses:
            raise DynamicOutputShapeException(func)
        return values.as_fake(self.world, values.guess(self.world, func, args, kwargs))

    def _read_scalar(self, tensor: torch.Tensor) -> Any:
        self.watcher.saw_host_sync(tensor)
        value = self.world.scalar(tensor)
        if self.is_recording and self.watcher.micro_batch == 0 and self.world.has_label(tensor):
            source = self.world.device_of(tensor)
            self.rows.append(Row(self.watcher.phase((tensor,)), "aten._local_scalar_dense", self.watcher.module(), [[]], [], dtype_name(tensor.dtype),
                                 read_bytes=tensor.element_size(), written_bytes=tensor.element_size(), device=str(source), copy_from=str(source),
                                 copy_to="cpu"))  # fmt: skip
        return value

    def _describe(self, func: Any) -> _Operator:
        schema = func._schema
        namespace, _, name = schema.name.partition("::")
        full = f"{namespace}.{name}"
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        mutates = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        multi = full.startswith(("aten._foreach_", "aten._fused_", "aten._amp_foreach_"))
        made = _Operator(full, not is_view and full not in _NOT_WORK and namespace not in ("prim", "profiler"), mutates, multi,
                         any(a in name for a in _ATTENTION))  # fmt: skip
        self._operators[func] = made
        return made

    def _spread_device(self, operator: _Operator, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> torch.device:
        """Intended device of a result: of the first argument that is on a device (scalars on the host don't count)."""
        world = self.world
        device = CPU
        for t in ins:
            if world.has_label(t):
                device = world.device_of(t)
                break
        if not ins:
            device = world.factory_device
        if device is not CPU:
            for t in outs[:1] if operator.name in _HOST_LENGTHS else outs:
                if not world.has_label(t):
                    world.set_device(t, device)
        return device

    def _add(self, func: Any, operator: _Operator, args: Any, kwargs: Any, *, ins: list[torch.Tensor], outs: list[torch.Tensor], out: Any,
             device: torch.device) -> None:  # fmt: skip
        watcher = self.watcher
        if operator.name == "aten.copy_" and len(ins) == 2 and self.world.device_of(ins[0]) != self.world.device_of(ins[1]):
            self.add_copy(ins[1], ins[0], self.world.device_of(ins[1]), self.world.device_of(ins[0]))
            return
        phase = watcher.phase(ins)
        if not watcher.wants(phase) or (phase == "optimizer" and operator.name in _STATE_MAKERS):
            return
        row = Row(phase, operator.name, watcher.module(), device=str(device))
        written = outs if not operator.mutates or outs else ins[:1]
        if operator.is_multi_tensor:
            rows.sum_up_lists(row, args, ins, outs or ins)
        else:
            row.input_shapes = [list(t.shape) for t in ins]
            row.output_shapes = [list(t.shape) for t in written]
            row.read_bytes = sum(map(num_bytes, ins))
            row.written_bytes = sum(map(num_bytes, written))
        row.dtype = rows.dtype_of(outs, ins)
        row.flops = flops.count(func._overloadpacket, operator.name, args, kwargs, out)
        if self.estimates_saved and phase == "forward":
            row.saved_bytes = sum(num_bytes(t) for t in outs if t.dtype.is_floating_point)
        self._place(row)
        if operator.is_attention:
            row.causal = int(rows.is_causal(func, args, kwargs))
        if phase != "optimizer":
            row.weight = row.weight if row.weight is not None else next((w for t in ins if (w := self.weights.get(t)) is not None), None)
            if operator.name == "aten._to_copy" and row.weight is not None:
                self.weights.put(outs[0], row.weight)
        self.rows.append(row)

    def _place(self, row: Row) -> None:
        """Tie a forward row to its autograd node, and a backward row to the forward row of its node."""
        if row.phase in ("forward", "recompute", "data"):
            node = torch._C._autograd._get_sequence_nr() - 1
            self.rows_of_node.setdefault(node, row)
            self.module_of_node.setdefault(node, row.module)
        elif row.phase == "backward":
            current = torch._C._current_autograd_node()
            if current is None:
                return
            if current.name() == "torch::autograd::AccumulateGrad":
                row.weight = getattr(current, "variable", None)
                return
            node = self._known_node(current._sequence_nr())
            row.forward = self.rows_of_node.get(node)
            row.module = row.forward.module if row.forward is not None else self.module_of_node.get(node)
            written_by = getattr(type(current), "_forward_cls", None)
            if written_by is not None and not written_by.__module__.startswith(("torch.", "advisor.")) and row.flops:
                row.forward = None  # a product in a backward that somebody wrote counts as what it is

    def _known_node(self, node: int) -> int:
        """The node itself, or the one before it that was seen: in-place work on views is wrapped in a node of its own."""
        for number in range(node, node - 8, -1):
            if number in self.rows_of_node or number in self.module_of_node:
                return number
        return node

    def add_copy(self, source: torch.Tensor, target: torch.Tensor, copy_from: torch.device, copy_to: torch.device) -> None:
        """A copy between two intended devices."""
        if not self.is_recording:
            return
        phase = self.watcher.phase((source,))
        if not self.watcher.wants(phase):
            return
        row = Row(phase, "aten._to_copy", self.watcher.module(), [list(source.shape)], [list(target.shape)],
                  dtype_name(target.dtype), read_bytes=num_bytes(source), written_bytes=num_bytes(target),
                  device=str(copy_to if copy_to.type == "cuda" else copy_from), copy_from=str(copy_from), copy_to=str(copy_to))  # fmt: skip
        self._place(row)
        self.rows.append(row)

    def saved(self, tensor: torch.Tensor) -> None:
        """Autograd keeps this tensor for backward: charge its storage once, to the call that keeps it."""
        if not self.is_recording or self.watcher.micro_batch or self.weights.get(tensor) is not None or self.kept.get(tensor) is not None:
            return
        self.kept.put(tensor, True)
        key = (torch._C._autograd._get_sequence_nr() - 1, "recompute" if torch._C._current_graph_task_id() != -1 else "forward")
        self.saved_of_node[key] = self.saved_of_node.get(key, 0) + tensor.untyped_storage().nbytes()

    @contextlib.contextmanager
    def folded(self, operator: str, inputs: list[torch.Tensor], *, causal: bool = False, flops_of_call: int = 0, num_kernels: int = 0,
               kept_bytes: int = 0) -> Iterator[None]:  # fmt: skip
        """Everything called inside becomes one row, unless it is one fused attention call already."""
        start, first_node = len(self.rows), torch._C._autograd._get_sequence_nr()
        self._fold_depth += 1
        try:
            yield
        finally:
            self._fold_depth -= 1
        inside = self.rows[start:]
        if (
            self._fold_depth
            or not self.is_recording
            or not inside
            or any(r.operator.startswith("aten._scaled_dot_product_") for r in inside)
        ):
            return
        last = inside[-1]
        row = Row(inside[0].phase, operator, last.module, [list(t.shape) for t in inputs], last.output_shapes, last.dtype, is_folded=True)
        row.flops = flops_of_call or sum(r.flops for r in inside)
        row.read_bytes, row.written_bytes = sum(map(num_bytes, inputs)), last.written_bytes
        row.causal, row.device, row.num_kernels = int(causal), last.device, num_kernels or sum(r.num_kernels for r in inside)
        row.saved_bytes = kept_bytes if torch.is_grad_enabled() else 0
        row.weight = next((r.weight for r in inside if r.weight is not None), None)
        self.rows[start:] = [row]
        for node in range(first_node, torch._C._autograd._get_sequence_nr()):
            self.rows_of_node[node] = row
