"""Counts the collectives of a rank as torch dispatches them: what DDP, FSDP, DTensor, DeepSpeed and pipelines really send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Kind by operator of the namespaces c10d and _c10d_functional, and whether the whole tensor is among the outputs ("out") or the inputs ("in").
_C10D = {
    "allreduce_": "all-reduce", "allreduce_coalesced_": "all-reduce", "_allgather_base_": "all-gather", "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter", "broadcast_": "broadcast", "reduce_": "reduce", "gather_": "gather",
    "scatter_": "scatter", "alltoall_": "all-to-all", "alltoall_base_": "all-to-all", "send": "send",
}  # fmt: skip
_FUNCTIONAL = {
    "all_reduce": "all-reduce", "all_reduce_": "all-reduce", "all_reduce_coalesced": "all-reduce", "all_reduce_coalesced_": "all-reduce",
    "all_gather_into_tensor": "all-gather", "all_gather_into_tensor_out": "all-gather", "all_gather_into_tensor_coalesced": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter", "reduce_scatter_tensor_out": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter", "all_to_all_single": "all-to-all", "broadcast": "broadcast", "broadcast_": "broadcast",
}  # fmt: skip


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, notes kind, group size and bytes of each collective. Bytes are those of the whole tensor: what an all-gather
    leaves on a rank, what a reduce-scatter takes from it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[tuple[str, int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note it and go on; tensors of a subclass are unwrapped first, and come back as plain ones."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func, args, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name in _C10D:
            group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
            self._add(_C10D[name], group.size(), args)
        elif func.namespace == "_c10d_functional" and name in _FUNCTIONAL:
            names = [a for a in args if isinstance(a, str)]
            group = distributed_c10d._resolve_process_group(names[-1])  # type: ignore[attr-defined, arg-type]
            self._add(_FUNCTIONAL[name], group.size(), args if _FUNCTIONAL[name] == "all-reduce" else (args, result))

    def _add(self, kind: str, num_ranks: int, values: Any) -> None:
        sizes = [t.numel() * t.element_size() for t in _tensors(values)]
        many = kind in ("all-gather", "reduce-scatter") and len(sizes) > 2
        largest = max(sizes, default=0) * (num_ranks if many else 1)
        whole = largest if kind in ("all-gather", "reduce-scatter") else sum(sizes) // (2 if kind == "all-to-all" else 1)
        self.seen[kind, num_ranks, whole] += 1


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def counted(seen: Counter[tuple[str, int, int]]) -> list[dict[str, Any]]:
    """One plain row per kind, group size and size."""
    return [{"kind": kind, "ranks": ranks, "bytes": num_bytes, "count": count} for (kind, ranks, num_bytes), count in sorted(seen.items())]


def quietly(action: Callable[[], Any]) -> Any:
    """Do something whose collectives don't count."""
    with torch.utils._python_dispatch._disable_current_modes():
        return action()
