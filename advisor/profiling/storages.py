"""Facts about tensors' storages that outlive the tensors without keeping memory."""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes a kernel touches to read or write a tensor; expanded dimensions are one element wide."""
    if 0 in tensor.stride():
        return math.prod(n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s) * tensor.element_size()
    return tensor.numel() * tensor.element_size()


#: Whether a tensor is one of a function transform's, which stands for another and has no storage.
_is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor


class StorageMap(Generic[T]):
    """From a tensor's storage to a value. Views share the entry."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, T]] = {}

    def put(self, tensor: torch.Tensor, value: T) -> None:
        if tensor.layout == torch.strided and not _is_wrapped(tensor):
            storage = tensor.untyped_storage()
            weak: Any = StorageWeakRef
            self._entries[storage._cdata] = (weak(storage), value)

    def get(self, tensor: torch.Tensor) -> T | None:
        if not self._entries or tensor.layout != torch.strided or _is_wrapped(tensor):
            return None
        # A weak reference keeps the address from being used again, so equal addresses mean the same storage.
        found = self._entries.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def clear(self) -> None:
        self._entries.clear()
