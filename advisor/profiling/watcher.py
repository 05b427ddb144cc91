"""Where in its training step a script is: micro-batches, backward passes, updates, and the module that is running.

The step that is kept is the first one: the operators of its first micro-batch, the number of its micro-batches, and its update.
It is over when a model is called again after the update (or when the script ends).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from advisor.profiling import notes, values
from advisor.profiling.calls import Frame, ModuleCalls, RootCall, all_modules, fields_of, signature
from advisor.profiling.recorder import Recorder
from advisor.profiling.rows import Row
from advisor.profiling.storages import StorageMap

#: Micro-batches without any update after which the script is taken to update by means we don't see.
MAX_MICRO_BATCHES = 4096
#: Calls without gradients after the step (validation, sampling) that are waited for to see the next step's inputs.
MAX_CALLS_AFTER = 64


class Stop(BaseException):
    """Ends the script from inside its own loop; BaseException, so that a script's `except Exception` doesn't swallow it."""


class Watcher:
    """State of the step, fed by the hooks of `hooks.py`."""

    def __init__(self, script: Path) -> None:
        self.script = script
        self.recorder: Recorder | None = None
        self.stack: list[Frame] = []
        self.stage = "before"  # before, forward, after (a backward pass)
        self.micro_batch = 0
        self.num_backward = 0
        self.backward_depth = 0
        self.update_depth = 0
        self.updates_in_backward = False  # an optimizer steps in a hook on a gradient
        self.num_manual_updates = 0
        self.is_done = False
        self.optimizers: list[torch.optim.Optimizer] = []  # constructed
        self.stepped: list[torch.optim.Optimizer] = []
        self.roots: dict[int, RootCall] = {}
        self.second_inputs: list[torch.Tensor] | None = None
        self.calls = ModuleCalls()
        self.parameters: dict[int, torch.nn.Parameter] = {}
        self.with_grad: set[int] = set()
        self.sparse: set[int] = set()  # parameters with sparse gradients
        self.leaves: list[torch.Tensor] = []  # trained tensors that belong to no module
        self.grads: StorageMap[bool] = StorageMap()
        self.rows_before: list[Row] = []
        self.evaluation: tuple[int, str] | None = None  # first row and stage before a call without gradients
        self.host_syncs: dict[str, int] = {}
        self.autocast_dtype: torch.dtype | None = None
        self.uses_grad_scaler = self.clips_gradients = False
        self.custom_functions: list[str] = []  # autograd functions that the script or a library wrote
        self.facts: dict[str, str] = {}  # seen on the way: hazard id -> evidence
        self.processes: list[str] = []  # lines that start another program
        self.num_closure_calls = 0  # forward passes that an optimizer's step asked for, beyond the first
        self.micro_shapes: list[list[list[int]]] = []  # input shapes of micro-batches that differ from the first
        self.replays = False  # later micro-batches of equal shape are answered from the first
        self.is_transforming = False  # the backward pass of a function transform, in which gradients stay enabled
        self.without_saved = False  # function transforms ran: what they keep for backward was not seen
        self.num_stops = self.num_calls_after = 0
        self.alive: list[torch.nn.Module] = []  # when the step was over; what a function holds is gone when it has ended
        self.finish: Callable[[], None] = lambda: None  # writes what was seen and ends the process

    def stop(self) -> None:
        """End the script; a script that catches even that is ended from here."""
        self.num_stops += 1
        if self.num_stops == 1:
            self.alive = all_modules()
        else:
            self.finish()
        raise Stop

    # -- modules -------------------------------------------------------------------------------------------------------------------

    def module(self) -> torch.nn.Module | None:
        return self.stack[-1].module if self.stack else None

    def enter(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A module is called."""
        tensors = values.tensors_in(args, [])
        values.tensors_in(kwargs.values(), tensors)
        in_backward, stage = self.backward_depth > 0, self.stage
        if not self.stack and not in_backward and any(True for _ in module.parameters()):
            self._enter_root(module, tensors)
        if not self.stack and not in_backward and not torch.is_grad_enabled():
            self.evaluation = (len(self.recorder.rows) if self.recorder is not None else 0, stage)
        if not in_backward and self.micro_batch == 0 and self.evaluation is None:
            self.calls.note(module, tensors, self.stack[-1] if self.stack else None)
        self.stack.append(Frame(module))

    def leave(self, module: torch.nn.Module, result: Any) -> None:
        """A module has returned (None as result after an exception)."""
        self.stack.pop()
        if not self.stack and self.evaluation is not None and not self.backward_depth:
            self._end_evaluation(module)
        call = self.calls.get(id(module))
        if result is not None and call is not None and not call.output_shape:
            outs = values.tensors_in((result,), []) or values.tensors_in(fields_of(result), [])
            call.output_shape = list(outs[0].shape) if outs else []
        root = self.roots.get(id(module)) if not self.stack else None
        if root is not None and root.result is None and result is not None:
            root.result = result
            root.outputs = values.tensors_in((result,), []) or values.tensors_in(fields_of(result), [])

    def _end_evaluation(self, module: torch.nn.Module) -> None:
        """A model was called without gradients: its rows count only if it is another model than the trained one."""
        start, self.stage = self.evaluation or (0, self.stage)
        self.evaluation = None
        if self.recorder is not None:
            for row in self.recorder.rows[start:]:
                row.evaluated = module

    def _enter_root(self, module: torch.nn.Module, tensors: list[torch.Tensor]) -> None:
        has_grad = torch.is_grad_enabled()
        if self.is_done or (self.num_backward and not self.optimizers and self.num_manual_updates and has_grad):
            if has_grad and id(module) in self.roots:
                self.second_inputs = tensors
            if has_grad or self.num_calls_after > MAX_CALLS_AFTER:
                self.stop()
            self.num_calls_after += 1
        if self.stage == "before":
            self.rows_before = self._take_rows()
        elif self.stage == "after" and has_grad and len(self.optimizers) < 2:
            self.second_inputs = self.second_inputs or tensors
            self.micro_batch += 1
            self.num_closure_calls += bool(self.update_depth)
            shapes, first = [list(t.shape) for t in tensors], self.roots.get(id(module))
            if (
                first is not None
                and first.has_grad
                and not self.is_done
                and shapes != first.input_shapes
                and shapes not in self.micro_shapes
            ):
                self.micro_shapes.append(shapes)
            if self.micro_batch >= MAX_MICRO_BATCHES:
                self.stop()
        if id(module) not in self.roots or (has_grad and not self.roots[id(module)].has_grad):
            self._note_root(module, tensors)
        self.stage = "forward"

    def _note_root(self, module: torch.nn.Module, tensors: list[torch.Tensor]) -> None:
        self.roots[id(module)] = RootCall(
            module, tensors, [list(t.shape) for t in tensors], signature(tensors), has_grad=torch.is_grad_enabled()
        )
        self.note_parameters(module)

    def note_parameters(self, module: torch.nn.Module) -> None:
        """These parameters may be trained."""
        for p in module.parameters():
            if isinstance(p, torch.nn.Parameter) or not torch._C._functorch.is_functorch_wrapped_tensor(p):
                self.parameters[id(p)] = p
                if self.recorder is not None and self.recorder.weights.get(p) is None:
                    self.recorder.weights.put(p, p)

    # -- phases --------------------------------------------------------------------------------------------------------------------

    def phase(self, tensors: Any) -> str:
        """Phase of an operator called now on these tensors."""
        if self.updates_in_backward:
            return "optimizer"
        if torch._C._current_graph_task_id() != -1:
            return "recompute" if torch.is_grad_enabled() and not self.is_transforming else "backward"
        if self.stack:
            return "forward"
        if self.update_depth:
            return "optimizer"
        if self.stage == "forward":
            return "forward"
        if self.stage == "after" and self.recorder is not None:
            weights = self.recorder.weights
            if any(weights.get(t) is not None for t in tensors):
                self.num_manual_updates += not self.stepped
                return "optimizer"
            if any(self.grads.get(t) is not None for t in tensors):
                return "optimizer"
        return "data"

    def wants(self, phase: str) -> bool:
        """Whether a row of this phase belongs to what is kept: of later micro-batches only the update."""
        return self.micro_batch == 0 or phase == "optimizer"

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Everything called inside belongs to the update of the parameters."""
        self.update_depth += 1
        try:
            yield
        finally:
            self.update_depth -= 1

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A backward pass, possibly inside another one."""
        if not self.roots and self.num_backward and self.num_manual_updates and not self.backward_depth:
            self.stop()  # no module is ever called: this is the second step
        self.backward_depth += 1
        outer, self.stack = self.stack, []
        try:
            yield
        finally:
            self.stack = outer
            self.backward_depth -= 1
        if not self.backward_depth:
            self.num_backward += 1
            self.stage = "after"
            for key, p in self.parameters.items():
                grad = p.grad
                if grad is not None:
                    self.with_grad.add(key)
                    self.grads.put(grad, True)
                    if grad.is_sparse:
                        self.sparse.add(key)

    def note_leaf(self, variable: torch.Tensor) -> None:
        """A gradient arrived in a tensor of a script that has no modules."""
        self.with_grad.add(id(variable))
        if self.recorder is not None and self.recorder.weights.get(variable) is None:
            self.leaves.append(variable)
            self.recorder.weights.put(variable, variable)

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        if any(o is optimizer for o in self.stepped) and self.is_done:
            self.stop()
        for group in optimizer.param_groups:
            self.with_grad.update(id(p) for p in group["params"] if p.grad is not None)
        self.updates_in_backward = self.backward_depth > 0
        self.update_depth += 1

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        self.update_depth -= 1
        self.updates_in_backward = False
        if not self.num_backward and not self.backward_depth:
            return
        if any(o is optimizer for o in self.stepped):
            self.is_done = True  # the second step of one of several optimizers
        else:
            self.stepped.append(optimizer)
        if len(self.stepped) >= max(1, len(self.optimizers)):
            self.is_done = True
        if self.is_done and not self.alive:
            self.alive = all_modules()

    def modules_alive(self) -> list[torch.nn.Module]:
        """All modules there were when the step was over, or that are there now if it was not noticed to be over."""
        return self.alive or all_modules()

    @property
    def has_step(self) -> bool:
        """Whether a whole step was seen."""
        return bool(self.num_backward and (self.stepped or self.num_manual_updates))

    @property
    def accumulation(self) -> int:
        """Micro-batches of the step."""
        return max(1, self.micro_batch + 1 - self.num_closure_calls) if self.stepped else 1

    def _take_rows(self) -> list[Row]:
        if self.recorder is None:
            return []
        rows, self.recorder.rows = self.recorder.rows, []
        return rows

    # -- facts ---------------------------------------------------------------------------------------------------------------------

    def saw_host_sync(self, tensor: torch.Tensor) -> None:
        """A value was read on the host: inside a model's forward or a backward pass the device waits for it."""
        if self.stack and self.micro_batch == 0 and self.evaluation is None and tensor.numel() == 1:
            where = self.location()
            self.host_syncs[where] = self.host_syncs.get(where, 0) + 1

    def location(self) -> str:
        """File and line that is running; see `notes.location`."""
        return notes.location(self.script)
