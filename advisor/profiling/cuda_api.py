"""`torch.cuda` as a script finds it in the child: devices that are there, streams that are always done, memory without end."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from advisor.profiling.world import World


class _Properties(types.SimpleNamespace):
    """Device properties of a card with room for anything."""


class _Event:
    """A CUDA event or stream that has always happened."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def elapsed_time(self, _other: Any) -> float:
        return 1.0

    def query(self) -> bool:
        return True

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def __enter__(self) -> _Event:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def install(world: World) -> None:
    """Patch `torch.cuda`, `torch.accelerator` and `torch.Generator` for this process."""
    properties = _Properties(
        name="NVIDIA H100 80GB HBM3", total_memory=80 << 30, major=9, minor=0, multi_processor_count=132, uuid="", warp_size=32,
        max_threads_per_multi_processor=2048, gcnArchName="", is_multi_gpu_board=False, shared_memory_per_block_optin=232448,
    )  # fmt: skip

    @contextlib.contextmanager
    def on_device(device: Any = None) -> Iterator[None]:
        before = world.current_device
        set_device(device)
        try:
            yield
        finally:
            world.current_device = before

    def set_device(device: Any = None) -> None:
        found = world.device(device)
        if found is not None and found.type == "cuda" and found.index is not None:
            world.current_device = found.index

    answers: dict[str, Any] = {
        "is_available": True, "device_count": world.num_devices, "get_device_capability": (9, 0), "get_device_name": properties.name,
        "get_device_properties": properties, "is_bf16_supported": True, "memory_allocated": 0, "memory_reserved": 0,
        "max_memory_allocated": 0, "max_memory_reserved": 0, "mem_get_info": (80 << 30, 80 << 30), "memory_stats": {}, "is_initialized": True,
        "memory_summary": "", "can_device_access_peer": True, "get_arch_list": ["sm_90"], "utilization": 0, "initial_seed": 0,
    }  # fmt: skip
    quiet = (
        "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "seed", "seed_all", "reset_peak_memory_stats", "init", "_lazy_init",
        "reset_max_memory_allocated", "set_per_process_memory_fraction", "set_rng_state", "set_rng_state_all", "ipc_collect", "_lazy_call",
        "reset_accumulated_memory_stats", "set_stream",
    )  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    for name in quiet:
        setattr(torch.cuda, name, lambda *_, **__: None)
    cuda: Any = torch.cuda
    cuda.current_device = lambda: world.current_device
    cuda.set_device, cuda.device, cuda.device_of = set_device, on_device, lambda tensor: on_device(tensor.device)
    cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    cuda.get_rng_state_all = lambda *_: [torch.zeros(16, dtype=torch.uint8)] * world.num_devices
    cuda.Event, cuda.Stream, cuda.ExternalStream = _Event, _Event, _Event
    cuda.current_stream = cuda.default_stream = lambda *_: _Event()
    cuda.stream = lambda *_: contextlib.nullcontext()
    plain_generator = torch.Generator

    class Generator(plain_generator):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            return plain_generator(world.real_device(device))

    any_torch: Any = torch
    any_torch.Generator = Generator
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is not None:
        accelerator.is_available = lambda *_: True
        accelerator.device_count = lambda *_: world.num_devices
        accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
        accelerator.current_device_index = lambda *_: world.current_device
        accelerator.current_stream = lambda *_: _Event()
        for name in ("synchronize", "set_device_index", "set_device_idx", "set_stream", "empty_cache"):
            setattr(accelerator, name, lambda *_, **__: None)
