"""torch.distributed for a script that expects to be one of many: a world of one process whose collectives do nothing."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: What torchrun would have set.
LAUNCHER_ENVIRONMENT = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


_SHORT = (torch.bfloat16, torch.float16)


class OneDeviceWanted(BaseException):
    """DataParallel would split a batch over all devices; the step of one device is what we are after."""


def install(facts: dict[str, str], location: Callable[[], str]) -> None:
    """Patch torch.distributed, DistributedDataParallel, DataParallel and FSDP for this process.

    Args:
        facts: gets what was seen, by hazard id.
        location: tells the line of the script that is running.
    """
    if torch.distributed.is_available():
        _patch_groups(facts, location)
    _patch_spawn(facts, location)
    parallel: Any = torch.nn.parallel
    for name in ("DistributedDataParallel", "DataParallel"):
        _see_through(getattr(parallel, name), name, facts)
    with contextlib.suppress(ImportError):
        from torch.distributed import fsdp

        _see_through(fsdp.FullyShardedDataParallel, "FullyShardedDataParallel", facts)
        _patch_fully_shard(fsdp, facts)


def _patch_fully_shard(fsdp: Any, facts: dict[str, str]) -> None:
    """`fully_shard` makes a module an FSDPModule with methods that do nothing, in its policy's precision by means of autocast."""
    for name, method in vars(fsdp.FSDPModule).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(fsdp.FSDPModule, name, lambda *_, **__: _Finished())
    del fsdp.FSDPModule.__new__, fsdp.FSDPModule._apply

    def fully_shard(module: Any, *_: Any, mp_policy: Any = None, **__: Any) -> Any:
        facts.setdefault("already-distributed", "the script calls fully_shard")
        for part in module if isinstance(module, (list, tuple)) else [module]:
            plain, dtype = type(part), getattr(mp_policy, "param_dtype", None)
            members = {"forward": _in_precision(plain.forward, dtype)} if dtype in _SHORT else {}
            part.__class__ = type(plain.__name__, (fsdp.FSDPModule, plain), members)
        return module

    fsdp.fully_shard = fully_shard
    for place in map(sys.modules.get, ("torch.distributed._composable.fsdp", "torch.distributed._composable.fsdp.fully_shard")):
        if place is not None:
            setattr(place, "fully_shard", fully_shard)  # noqa: B010


def _in_precision(plain: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", dtype=dtype):
            return plain(self, *args, **kwargs)

    return forward


def _patch_groups(facts: dict[str, str], location: Callable[[], str]) -> None:
    dist: Any = torch.distributed

    def init_process_group(*_: Any, **__: Any) -> None:
        facts.setdefault("already-distributed", f"init_process_group is called at {location()}")
        for name, value in LAUNCHER_ENVIRONMENT.items():
            os.environ.setdefault(name, value)

    started: Callable[[], bool] = lambda: "already-distributed" in facts and "init_process_group" in facts["already-distributed"]  # noqa: E731
    dist.init_process_group = init_process_group
    dist.destroy_process_group = lambda *_, **__: None
    dist.is_initialized = started
    dist.get_rank = lambda *_, **__: 0
    dist.get_world_size = lambda *_, **__: 1
    dist.get_backend = lambda *_, **__: "nccl"
    dist.new_group = lambda *_, **__: None
    for name in ("barrier", "all_reduce", "broadcast", "reduce", "broadcast_object_list", "monitored_barrier", "send", "recv"):
        setattr(dist, name, lambda *_, **__: None)

    def all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        facts.setdefault("gathers-outputs", location())
        outputs[0] = tensor.detach().clone()

    def gather_into(output: torch.Tensor, tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        with torch.no_grad():
            output.copy_(tensor.reshape(output.shape))

    dist.all_gather = all_gather
    dist.all_gather_into_tensor = dist.reduce_scatter_tensor = gather_into
    dist.all_gather_object = lambda outputs, value, *_, **__: outputs.__setitem__(0, value)
    with contextlib.suppress(ImportError, AttributeError):
        from torch.distributed.nn import functional

        any_functional: Any = functional
        any_functional.all_gather = lambda tensor, *_, **__: (tensor,)
        any_functional.all_reduce = lambda tensor, *_, **__: tensor


class _Finished:
    """What `spawn(..., join=False)` and `unshard(async_op=True)` return: everything has run."""

    def join(self, *_: Any, **__: Any) -> bool:
        return True

    def wait(self) -> None:
        pass


def _patch_spawn(facts: dict[str, str], location: Callable[[], str]) -> None:
    """`torch.multiprocessing.spawn(fn, args, nprocs)` runs `fn(0, *args)` in this process and starts none."""

    def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any) -> Any:
        del nprocs
        facts.setdefault("already-distributed", f"processes are spawned at {location()}")
        os.environ.update({k: v for k, v in LAUNCHER_ENVIRONMENT.items() if k not in os.environ})
        fn(0, *args)
        return None if join else _Finished()

    module: Any = importlib.import_module("torch.multiprocessing.spawn")
    package: Any = torch.multiprocessing
    for place in (module, package):
        place.spawn = place.start_processes = spawn


def _see_through(wrapper: Any, name: str, facts: dict[str, str]) -> None:
    """Make a parallel wrapper a plain module around its module."""

    def init(self: Any, module: Any, *_: Any, mixed_precision: Any = None, **__: Any) -> None:
        if name == "DataParallel" and torch.cuda.device_count() > 1:
            raise OneDeviceWanted
        facts.setdefault("already-distributed", f"the model is wrapped in {name}")
        torch.nn.Module.__init__(self)
        self.module = module
        self.dtype = getattr(mixed_precision, "param_dtype", None)

    @contextlib.contextmanager
    def no_sync(_self: Any) -> Iterator[None]:
        yield

    wrapper.__init__ = init

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", dtype=self.dtype) if self.dtype in _SHORT else contextlib.nullcontext():
            return self.module(*args, **kwargs)

    wrapper.forward = forward
    wrapper.no_sync = no_sync
    wrapper.__getattr__ = _attribute
    wrapper.train = torch.nn.Module.train
    wrapper.clip_grad_norm_ = lambda self, max_norm, *_: torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm)
    for made in ("__getstate__", "__setstate__", "register_comm_hook", "_set_static_graph", "named_parameters", "named_buffers", "state_dict", "apply",
                 "_apply", "load_state_dict"):  # fmt: skip
        if made in vars(wrapper):
            delattr(wrapper, made)
    wrapper.register_comm_hook = lambda *_, **__: None


def _attribute(self: Any, name: str) -> Any:
    try:
        return torch.nn.Module.__getattr__(self, name)
    except AttributeError:
        return getattr(torch.nn.Module.__getattr__(self, "module"), name)
