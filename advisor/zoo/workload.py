"""A network of the zoo as a Workload, by the same code as a user's script: one traced step, then its shape."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from advisor.profiling.schema import StepProfile
from advisor.zoo.names import family_of
from cost_models.types import LayerGroup, Workload

if TYPE_CHECKING:
    from advisor.zoo.network import Network

#: Samples in the traced step; a size that channels and heads are no multiples of, so that no dimension is mistaken for the batch.
TRACED_BATCH = 7
#: By precision of a table of runs: what `shape` is asked for, how the step is traced, and bytes per gradient.
_PRECISIONS = {
    "fp32": ("fp32", "fp32", 4.0), "tf32": ("tf32", "fp32", 4.0), "amp16": ("fp16", "autocast", 4.0), "amp": ("bf16", "autocast", 4.0),
    "fp16": ("fp16", "16-bit", 2.0), "bf16": ("bf16", "16-bit", 2.0), "fp8": ("fp8", "16-bit", 4.0), "fp4": ("fp8", "16-bit", 4.0),
}  # fmt: skip


def zoo_workload(name: str, precision: str, seq_len: int = 0) -> Workload:
    """The workload of a network of the zoo. The first call in a process imports torch and traces for about a second.

    Args:
        name: as `find_network` returns it.
        precision: fp32, tf32, amp (autocast to bf16), amp16 (to fp16), or fp16, bf16, fp8, fp4: 16-bit weights with fp32 master copies.
        seq_len: tokens of a sample for networks that read text; 0: what its authors trained it with.

    Raises:
        ValueError: unknown network or precision, or a sequence that no memory in the world could hold.
    """
    return _workload(name, precision, seq_len if zoo_network(name).unit == "tokens" else 0)


@functools.cache
def _workload(name: str, precision: str, seq_len: int) -> Workload:
    if precision not in _PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; known: {', '.join(_PRECISIONS)}")
    from advisor.workload import shape

    dtype, way, grad_bytes = _PRECISIONS[precision]
    network = zoo_network(name, seq_len)
    workload = shape(_profile(name, seq_len, way), precision=dtype, optimizer=network.optimizer)
    if way == "16-bit":  # master copies and moments are kept in fp32
        optimizer = dataclasses.replace(workload.optimizer, state_bytes_per_param=2.0 * workload.optimizer.state_bytes_per_param)
        workload = dataclasses.replace(workload, compute_dtype=precision, optimizer=optimizer, master_bytes=4.0, grad_bytes=grad_bytes)
    if network.repeats:
        groups = tuple(part for g in workload.groups for part in _repeated(g, dict(network.repeats)))
        workload = dataclasses.replace(workload, groups=groups)
    if network.cuts_all_stacks:
        groups = tuple(dataclasses.replace(g, can_cut=g.can_cut or (g.can_recompute and g.num_repeats > 1)) for g in workload.groups)
        workload = dataclasses.replace(workload, groups=groups, can_pipeline=True)
    is_text = network.unit == "tokens"
    return dataclasses.replace(
        workload, name=name, sample_unit=network.unit, tokens_per_sample=network.units_per_sample if is_text else 1.0,
        seq_len=network.units_per_sample if is_text else 0.0,
    )  # fmt: skip


def _repeated(group: LayerGroup, repeats: Mapping[str, int]) -> tuple[LayerGroup, ...]:
    """A group, and its further runs with the same weights where it is run more often than it was traced."""
    if group.name not in repeats:
        return (group,)
    further = dataclasses.replace(
        group,
        name=f"{group.name} (further)",
        num_repeats=repeats[group.name] - 1,
        num_params=0.0,
        num_trainable_params=0.0,
        param_shapes=(),
    )
    return group, further


def zoo_network(name: str, seq_len: int = 0) -> Network:
    """Functions and facts of a network; builds nothing yet.

    Raises:
        ValueError: no such network.
    """
    made: Network = importlib.import_module(f"advisor.zoo.{family_of(name)}").network(name, seq_len)
    return made


@functools.cache
def _profile(name: str, seq_len: int, way: str) -> StepProfile:
    import torch

    from advisor.zoo.trace import trace

    options = {"fp32": {}, "autocast": {"autocast": torch.float16}, "16-bit": {"weights": torch.bfloat16}}[way]
    try:
        return trace(zoo_network(name, seq_len), name, batch_size=TRACED_BATCH, **options)
    except (RuntimeError, OverflowError) as error:  # torch counts bytes in 64 bits
        where = f" for sequences of {seq_len} tokens" if seq_len else ""
        raise ValueError(f"{name} can't be traced{where}: {error}") from error
