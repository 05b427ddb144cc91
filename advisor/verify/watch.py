"""Watches a training from inside its process: losses, gradient norms, parameters, collectives, seconds and memory of each optimizer step.

Nothing in the train file or in the user's file is changed; global hooks of torch see every optimizer and module. A step begins when an
optimizer is about to step and a module ran since the last time, so an engine's nested or split optimizer steps count once.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from advisor.verify import parameters, tensors
from advisor.verify.counter import Collectives, counted, quietly
from advisor.verify.smaller import make_smaller, without_dropout

#: The step after which collectives are counted; engines are set up in the first, and DDP arranges its buckets after it.
_COUNTED_FROM = 1


class Finished(BaseException):
    """Enough steps were seen."""


class Watch:
    """The record of one run on one rank.

    Args:
        cell: `script`, `entry`, `removed_blocks`, `num_steps`, `reference` (file of the parameters to compare with; written where `alone`
            is set), `stop` (end the script after the last step), `kill` (`rank` and `step`). A script that ends by itself before
            `num_steps` is compared after the last step but one that it takes alone.
    """

    def __init__(self, cell: Mapping[str, Any]) -> None:
        self.cell = cell
        self._num_steps: int = cell["num_steps"]
        self.steps: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self._roots: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._modules: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._losses: list[float] = []
        self._ran = False
        self._since_s = 0.0
        self._counter: Collectives | None = None
        self._trained: set[int] = set()
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._loudest: dict[str, torch.Tensor] = {}
        self._fsdp1_shards = 1
        self._base_bytes = 0

    def install(self) -> None:
        """Set the hooks; once in a process."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        register_module_forward_pre_hook(self._on_forward)
        without_dropout()
        self._watch_file()
        if self.cell["form"] == "script":
            self._watch_backward()
        self._base_bytes = _start_peak()

    def _on_forward(self, *_: Any) -> None:
        self._ran = True

    def _watch_file(self) -> None:
        """The user's functions, as soon as a train file has loaded them."""
        plain = importlib.machinery.SourceFileLoader.exec_module

        def exec_module(loader: Any, module: Any) -> None:
            plain(loader, module)
            if Path(loader.path).resolve() == Path(self.cell["script"]).resolve():
                self._wrap(vars(module))

        importlib.machinery.SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign, assignment]

    def _wrap(self, names: dict[str, Any]) -> None:
        """Stand between a train file and the user's functions."""
        build, loss_fn = names.get(self.cell["entry"]), names.get("loss_fn")
        if callable(build):
            names[self.cell["entry"]] = self._building(build)
        if callable(loss_fn):
            names["loss_fn"] = self._losing(loss_fn)

    def _building(self, build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def build_model(*args: Any, **kwargs: Any) -> nn.Module:
            model = make_smaller(build(*args, **kwargs), self.cell["removed_blocks"])
            self.remember(model)
            return model

        return build_model

    def _losing(self, loss_fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def loss_of(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = loss_fn(*args, **kwargs)
            if torch.is_grad_enabled():
                self._losses.append(float(quietly(lambda: loss.detach().float())))
            return loss

        return loss_of

    def _watch_backward(self) -> None:
        """Scripts have no loss function: a loss is what they call backward on."""
        plain = torch.Tensor.backward

        def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if loss.numel() == 1:
                self._losses.append(float(loss.detach()))
            plain(loss, *args, **kwargs)  # type: ignore[no-untyped-call]

        torch.Tensor.backward = backward  # type: ignore[method-assign, assignment]

    def remember(self, model: nn.Module) -> None:
        """Keep the names of a model's modules; modules that an engine drops on this rank are forgotten."""
        self._roots[model] = ""
        for path, module in model.named_modules():
            self._modules[module] = path

    def _named(self) -> dict[str, nn.Parameter]:
        """Parameters by the names of the user's model, also of modules that an engine put in the place of others."""
        found: dict[str, nn.Parameter] = {}
        for root in list(self._roots):
            found |= {tensors.plain_name(name): p for name, p in root.named_parameters(remove_duplicate=False)}
        for module, path in list(self._modules.items()):
            for name, p in module._parameters.items():
                if p is not None:
                    found.setdefault(tensors.plain_name(f"{path}.{name}" if path else name), p)
        return found

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._note_step(optimizer)
            return None

        def watched() -> Any:  # forward and backward happen inside of the step, as in Lightning
            loss = closure()
            self._note_step(optimizer)
            return loss

        return (args[0],), {**kwargs, "closure": watched}

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are there, and parameters as the step before left them."""
        if not self._ran and not self.steps:
            return  # a step without a forward pass only makes the states, before a checkpoint is read
        if self._ran:
            self._begin(time.perf_counter())
        if len(self.steps) <= self._num_steps:
            quietly(lambda: self._note_gradients(optimizer))
        self._optimizers[id(optimizer)] = optimizer
        self._since_s = time.perf_counter()

    def _begin(self, now_s: float) -> None:
        index = len(self.steps)
        if self.steps:
            self.steps[-1]["seconds"] = now_s - self._since_s  # up to here from the step before, without what the hooks took
        if not self._modules:
            self._find_model()
        if index == 0 and self._may_be_short and not self.cell.get("alone"):
            self._num_steps = min(self._num_steps, parameters.steps_before(Path(self.cell["reference"])))
        self._kill(index)
        self._count(index)
        self.steps.append({"losses": self._losses, "squares": {}, "shards": {}, "counted": index == _COUNTED_FROM})
        self._losses, self._ran = [], False
        if index == self._num_steps or (index and self._may_be_short and self.cell.get("alone")):
            self.summary["peak_bytes"] = _peak_bytes() - self._base_bytes
            quietly(self._finish)

    @property
    def _may_be_short(self) -> bool:
        return bool(self.cell["form"] == "script")

    def _find_model(self) -> None:
        """In scripts nobody says which the model is: the roots among the modules that are alive."""
        import gc

        alive = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
        inner = {id(child) for m in alive for child in m.children()}
        for root in alive:
            if id(root) not in inner and not isinstance(root, nn.modules.loss._Loss):
                self.remember(tensors.unwrapped(root))

    def _kill(self, index: int) -> None:
        kill = self.cell.get("kill")
        if kill and kill["rank"] == int(os.environ["RANK"]) and kill["step"] == index:
            os.kill(os.getpid(), signal.SIGKILL)

    def _count(self, index: int) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.summary["collectives"] = counted(self._counter.seen)
            self._counter = None
        if index == _COUNTED_FROM and dist.is_initialized():
            self._counter = Collectives()
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    def _note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        names = {id(p): name for name, p in self._named().items()}
        step = self.steps[-1]
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        if len(self.steps) == 1:
            self._fsdp1_shards = tensors.fsdp1_shards(tensors.fsdp1_roots())
            self.summary["hides_gradients"] = any(tensors.mixed_by_deepspeed(root, set(map(id, trained))) for root in self._roots)
        for i, p in enumerate(trained):
            self._trained.add(id(p))
            name = names.get(id(p), f"flat {type(optimizer).__name__} {i} {id(p)}")
            gradient = None if p.grad is None else tensors.summed(p.grad)
            if gradient is None and self._fsdp1_shards == 1:
                continue
            step["squares"][name] = 0.0 if gradient is None else tensors.square_sum(gradient)  # FSDP1 deals out nothing of it to this rank
            step["shards"][name] = self._fsdp1_shards if gradient is None or self._fsdp1_shards > 1 else tensors.num_shards(gradient)
            if self.cell.get("alone") and gradient is not None:
                self._loudest[name] = parameters.louder(gradient, self._loudest.get(name))

    def _finish(self) -> None:
        """After the last compared step: parameters against the reference, and who holds what."""
        if self.cell.get("alone"):
            parameters.save(Path(self.cell["reference"]), self._whole(), self._loudest, num_steps=len(self.steps) - 1)
        elif Path(self.cell["reference"]).is_file():
            self.summary["differences"] = parameters.differences(Path(self.cell["reference"]), self._whole())

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        return tensors.whole_parameters(self._named, self._trained, list(self._roots))

    def _after_step(self, *_: Any) -> None:
        if len(self.steps) == self._num_steps + 1 or (self._may_be_short and self.cell.get("alone")):
            self.summary["holdings"] = tensors.holdings(list(self._optimizers.values()))
            self.summary["world_size"] = dist.get_world_size() if dist.is_initialized() else 1
            self.summary["backend"] = dist.get_backend() if dist.is_initialized() else ""
        self._since_s = time.perf_counter()
        if self.cell.get("stop") and len(self.steps) > self._num_steps:
            raise Finished

    def record(self) -> dict[str, Any]:
        """Plain values of everything seen."""
        return {"steps": self.steps, **self.summary}


def _start_peak() -> int:
    """Bytes of this process before the model is built; its peak is counted from here on (a GPU's from nothing)."""
    if torch.cuda.is_available():
        return 0
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Linux: the highest resident size starts again
    return _peak_bytes()


def _peak_bytes() -> int:
    """Most memory so far: of the GPU where there is one, else resident memory of the process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0
