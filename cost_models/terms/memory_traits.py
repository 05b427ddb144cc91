"""What each runtime keeps in device memory, read from `runtimes/<name>.memory.toml`, and the constants fitted for all.

A trait is a fact about a runtime's code; a constant is a number fitted on measured runs. A runtime without a file gets the traits of
`GENERIC_RUNTIME`, i.e. of plain PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

GIB = 2.0**30
GENERIC_RUNTIME = "torch"
_SUFFIX = ".memory.toml"
#: How blocks are cut into pipeline stages: as in `cost_models.stages`, or "cost", nanotron's rule.
STAGE_SPLITS = ("", "even", "balanced", "greedy", "cost")
#: Bounds of `held_where`; "layer_flops": of a layer's products in one forward pass of a micro-batch on one rank. Of micro-batches only few
#: (1 or 2) and more are told apart.
_BOUNDED = ("pp_degree", "tp_degree", "dp_degree", "num_gpus", "layer_flops", "num_microbatches")
HELD_BOUNDS = tuple(f"{side}_{name}" for side in ("min", "max") for name in _BOUNDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTraits:
    """One runtime's habits. "Per parameter" means per parameter on the rank, before data-parallel sharding."""

    name: str = GENERIC_RUNTIME
    param_bytes: float | None = None  # working copy per parameter in 16-bit training; None: as the workload's own script has it
    grad_bytes: float | None = None  # lasting gradient, likewise
    master_bytes: float | None = None  # fp32 master copy, likewise
    state_bytes: float | None = None  # optimizer moments per parameter, likewise (torch keeps them in the parameters' own dtype)
    reused_grad_bytes: float = 0.0  # of grad_bytes: short-lived gradients that come to lie where activations were freed
    sharded_grad_bytes: float = 0.0  # gradients of the optimizer step, sharded with its states (ZeRO stage 1 and up)
    bucket_copies: float = 0.0  # reduction buckets that the gradients do not share, as a multiple of the gradients
    comm_buffer_bytes: float = 0.0  # fixed reduce and gather buffers of sharded optimizers, at most 4 bytes per parameter
    gathered_units: float = 2.0  # layers whose whole parameters are on the device at once under stage 3
    unit_grad_bytes: float = 6.0  # per parameter of one layer: gradient not yet reduced and its reduction buffer
    zero2_gathers: bool = False  # stage 2 keeps sharded parameters and a gathered working copy (FSDP without resharding)
    autocast_copies: bool = False  # weights are cast inside autocast; the 16-bit copies live until the backward pass is over
    keeps_gradients: bool = True  # gradients live through forward (main-gradient buffers); False: freed by zero_grad
    accumulates_whole: bool = False  # sharded gradients are reduced after the last micro-batch only (FSDP's no_sync); whole until then
    pools_gradients: bool = False  # reduced gradients come from a stream of their own, whose memory the forward pass cannot reuse
    step_copies: float = 0.0  # temporaries of the optimizer step, as a multiple of the sharded parameters (foreach optimizers)
    vocab_parallel: bool = True  # tensor parallelism divides logits and loss
    cuts_loss: bool = False  # it does so where nothing but a cross-entropy sees the logits, and the head is divided
    carried_logits_share: float = 0.0  # of a micro-batch's logits, still referenced when the next one peaks
    boundary_copies: float = 0.0  # a stage's outputs kept whole until their backward, as multiples (pipelines only)
    gather_buffers: float = 0.0  # lasting buffers for gathered tensor-parallel inputs, as multiples of a layer's undivided output
    held_outputs: float = 0.0  # freed tensors that may wait for another stream while the host runs ahead, in the same unit
    held_where: tuple[Mapping[str, float], ...] = ()  # plans in which that was seen: bounds like {"max_pp_degree": 1}, and "outputs"
    reserved_factor: float | None = None  # reserved over allocated; None: the fitted constant
    stage_split: str = ""  # "": as the runtime's `pipeline_cut`
    offloads_gradients: bool = False  # optimizer offload also takes sharded gradients off the device, as they are reduced
    offloads_parameters: bool = False  # optimizer offload also moves sharded parameters and gradients to the host
    builds_on_host: bool = True  # each rank builds the whole model in host memory before it is sharded
    saves_gathered: bool = False  # a checkpoint gathers the whole 16-bit model on each device
    # activations of a transformer block (cost_models.transformer_memory)
    saves_gate: bool = True  # a gated MLP keeps the activation's output beside its input
    quantized_activations: float = 1.0  # what a block with 4-bit weights keeps, as a multiple
    norm_bytes: float = 0.0  # extra bytes per hidden element kept by unfused norms
    logit_bytes: float = 6.0  # bytes alive per logit at the loss
    fused_logit_bytes: float = 6.0  # the same where the loss is compiled, fused or chunked
    fuses_loss: bool = False  # its own loss is one of those unless a run says otherwise
    selective: str = "attention"  # "attention": all but the inside of attention is kept; "matmul": every second product is kept
    measured: bool = False  # published figures of this runtime were compared with the model
    # which of the above were read off published runs rather than code or documentation
    inferred: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.stage_split not in STAGE_SPLITS:
            raise ValueError(f'runtime {self.name}: stage_split is "{self.stage_split}", not one of {", ".join(STAGE_SPLITS[1:])}')
        if self.selective not in {"attention", "matmul"}:
            raise ValueError(f'runtime {self.name}: selective is "{self.selective}", not "attention" or "matmul"')
        for entry in self.held_where:
            for name in entry.keys() - {*HELD_BOUNDS, "outputs"}:
                raise ValueError(f'runtime {self.name}: held_where has no bound "{name}"; known: {", ".join(HELD_BOUNDS)}')
            if "outputs" not in entry:
                raise ValueError(f'runtime {self.name}: an entry of held_where does not say how many "outputs" are held')


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConstants:
    """Numbers that code reading does not give; the shipped values are fitted on measured runs (see the accuracy tests)."""

    activation_scale: float = 1.0  # multiple of the structural count of saved bytes
    floor_bytes: float = 0.1 * GIB  # always allocated: cuBLAS workspace, position tables, scalars
    reserved_factor: float = 1.12  # reserved / allocated: fragmentation and rounding of the caching allocator
    least_reserved_factor: float = 1.02  # the same when memory runs short and the allocator gives its unused blocks back
    context_bytes: float = 1.2 * GIB  # CUDA context and libraries, outside the allocator
    group_bytes: float = 0.5 * GIB  # communication buffers per process group that spans more than one rank
    high_factor: float = 1.08  # cautious upper end, peak x factor + bytes: 99% of unseen runs are not over it by more than 5%
    high_bytes: float = 0.5 * GIB
    unmeasured_high_factor: float = 1.25  # for runtimes of which no published figure was compared: 92% of runs taken for plain PyTorch's

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> MemoryConstants:
        """Constants of a calibration's `memory` table; what it does not name keeps the shipped value.

        Raises:
            ValueError: a name that is no constant of the memory model, or a value that is no finite number.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ValueError(f'unknown memory constant "{name}"; known: {", ".join(sorted(known))}')
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"memory constant {name} is {value!r}, not a finite number of 0 or more")
        return cls(**{name: float(value) for name, value in values.items()})


@functools.cache
def runtime_names() -> tuple[str, ...]:
    """Runtimes with a memory file."""
    folder = resources.files("cost_models") / "runtimes"
    return tuple(sorted(f.name.removesuffix(_SUFFIX) for f in folder.iterdir() if f.name.endswith(_SUFFIX)))


@functools.cache
def memory_traits(runtime: str) -> MemoryTraits:
    """Traits of a runtime by name; those of plain PyTorch where the runtime has no file.

    Raises:
        ValueError: the runtime's file has an unknown field or value.
    """
    name = runtime if runtime in runtime_names() else GENERIC_RUNTIME
    return MemoryTraits(name=name, **_table(name))


def documented_traits(runtime: str) -> MemoryTraits:
    """Traits of a runtime without those read off published runs: what would be known of it had nobody published any."""
    traits, generic = memory_traits(runtime), MemoryTraits()
    values = {f.name: getattr(generic if f.name in traits.inferred else traits, f.name) for f in dataclasses.fields(MemoryTraits)}
    return MemoryTraits(**values)


def _table(name: str) -> dict[str, Any]:
    """The `memory` table of a runtime's file over that of the runtime it is `like`."""
    text = (resources.files("cost_models") / "runtimes" / f"{name}{_SUFFIX}").read_text(encoding="utf8")
    own: dict[str, Any] = tomllib.loads(text).get("memory", {})
    base = _table(own.pop("like")) if "like" in own else {}
    known = {f.name for f in dataclasses.fields(MemoryTraits)} - {"name"}
    for unknown in own.keys() - known:
        raise ValueError(f'runtime {name}: unknown memory trait "{unknown}"; known: {", ".join(sorted(known))}')
    merged = base | own
    for key in ("held_where", "inferred"):
        merged[key] = tuple(merged.get(key, ()))
    return merged
