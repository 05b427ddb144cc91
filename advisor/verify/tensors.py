"""Whole parameters and gradient sums of a rank, by the names the user's model gave them, whatever an engine made of them."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def summed(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, whole on every rank where it is still to be summed over them."""
    partial = isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements)
    return gradient.full_tensor() if partial and isinstance(gradient, DTensor) else gradient


def square_sum(gradient: torch.Tensor) -> float:
    """Sum of squares of a rank's part of a gradient."""
    return float(local(gradient).detach().double().square().sum())


def num_shards(tensor: torch.Tensor) -> int:
    """Into how many different parts a tensor is cut over ranks."""
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for i, placement in enumerate(tensor.placements):
        count *= 1 if placement.is_replicate() else tensor.device_mesh.size(i)
    return count


def fsdp1_roots() -> list[FullyShardedDataParallel]:
    """Outermost modules of the older FSDP."""
    found = [m for m in gc.get_objects() if issubclass(type(m), FullyShardedDataParallel)]
    inner = {id(child) for m in found for child in m.modules() if child is not m}
    return [m for m in found if id(m) not in inner]


def fsdp1_shards(roots: list[FullyShardedDataParallel]) -> int:
    """Ranks that share one copy; 1 where nothing is sharded."""
    group = roots[0].process_group if roots else None
    return 1 if group is None or roots[0].sharding_strategy == ShardingStrategy.NO_SHARD else int(group.size())


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    return re.sub(r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(?=\.)", "", name).lstrip(".")


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside of wrappers such as DistributedDataParallel."""
    inner = getattr(model, "module", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) and len(list(model.children())) == 1 else model


def mixed_by_deepspeed(root: nn.Module, trained: set[int]) -> bool:
    """Whether DeepSpeed lays gradients that ranks share and others into one tensor, so that their sum over ranks counts some twice.

    Args:
        root: the user's model.
        trained: ids of the optimizer's parameters.
    """
    cut = any(hasattr(module, "tp_world_size") for module in root.modules())  # by AutoTP
    copied = any(getattr(p, "ds_pipe_replicated", False) and id(p) not in trained for p in root.parameters())  # at a pipeline's end
    return cut or copied


@contextlib.contextmanager
def _gathered(roots: list[FullyShardedDataParallel], models: list[nn.Module], partitioned: list[nn.Parameter]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for root in roots:
            stack.enter_context(FullyShardedDataParallel.summon_full_params(root, writeback=False))
        for module in (m for model in models for m in model.modules() if hasattr(m, "tp_world_size")):
            from deepspeed.module_inject.layers import GatherReplacedLayerParams

            stack.enter_context(GatherReplacedLayerParams(list(module.parameters(recurse=False)), module))
        if partitioned:
            import deepspeed

            stack.enter_context(deepspeed.zero.GatheredParameters(partitioned))
        yield


def whole_parameters(
    named: Callable[[], Mapping[str, nn.Parameter]], wanted: set[int], models: list[nn.Module]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each whole parameter, one by one. A collective: all ranks that hold a parameter must go through it.

    Args:
        named: parameters by name, as the modules hold them now.
        wanted: ids of those that are trained on this rank; all where none is among them (engines that train copies).
        models: the user's.
    """
    roots = fsdp1_roots()
    before = named()
    trained = {name for name, p in before.items() if id(p) in wanted}
    with _gathered(roots, models, [p for p in before.values() if hasattr(p, "ds_id")]):
        for name, parameter in sorted(named().items()):
            if trained and name not in trained:
                continue
            value = parameter.detach()
            yield name, value.full_tensor() if isinstance(value, DTensor) else value


def holdings(optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Elements of parameters and optimizer states on this rank, each tensor once; placements and meshes of sharded parameters."""
    params = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
    states = {id(s): s for o in optimizers for state in o.state.values() if isinstance(state, Mapping)
              for s in state.values() if isinstance(s, torch.Tensor) and s.dim()}  # fmt: skip
    sharded = [p for p in params.values() if isinstance(p, DTensor)]
    return {
        "optimizers": sorted({type(o).__name__ for o in optimizers}),
        "shapes": [list(p.shape) for p in params.values()],
        "num_params": sum(p.numel() for p in params.values()),
        "num_local": sum(local(p).numel() for p in params.values()),
        "num_states": sum(local(s).numel() for s in states.values()),
        "num_plain_tensors": len(params) - len(sharded),
        "placements": sorted({str(tuple(p.placements)) for p in sharded}),
        "meshes": sorted({str(tuple(p.device_mesh.shape)) for p in sharded}),
    }
