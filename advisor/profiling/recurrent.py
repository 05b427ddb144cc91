"""Recurrent layers as one row each, whatever the CPU makes of them, and packed sequences in a world without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from advisor.profiling import values
from advisor.profiling.recorder import Recorder
from advisor.profiling.world import World

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def fold(recorder: Recorder) -> None:
    """Patch the recurrent layers of torch and, on fake tensors, the packing of sequences."""
    for name in _LAYERS:
        setattr(torch._VF, name, _layer(recorder, name, getattr(torch._VF, name)))
    if recorder.world.fake:
        functions: Any = torch._VF
        functions._pack_padded_sequence = _pack(recorder.world)
        functions._pad_packed_sequence = _pad(recorder.world)


def _layer(recorder: Recorder, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(data: torch.Tensor, *args: Any) -> Any:
        weights = next((a for a in args if isinstance(a, (list, tuple)) and len(a) >= 2 and any(t.dim() == 2 for t in a)), ())
        positions = data.numel() // max(data.shape[-1], 1)
        matrices = [t for t in weights if t.dim() == 2]
        # What the GPU's kernel reserves for backward, which the CPU's hides: gates (and an LSTM's cell) of every position and layer.
        kept = positions * sum(t.shape[0] + (t.shape[1] if name == "lstm" else 0) for t in matrices[1::2]) * data.element_size()
        with recorder.folded(f"aten.{name}", [data, *matrices], flops_of_call=2 * positions * sum(t.numel() for t in matrices),
                             num_kernels=len(matrices) * _num_time_steps(data, args), kept_bytes=kept):  # fmt: skip
            if recorder.world.fake and _is_packed(data, args):
                return _unpacked(plain, data, *args)
            return plain(data, *args)

    return call


def _is_packed(data: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a layer got packed sequences: all positions in one dimension, and the number of samples at each step."""
    return data.dim() == 2 and isinstance(args[0], torch.Tensor) and args[0].dim() == 1


def _num_time_steps(data: torch.Tensor, args: tuple[Any, ...]) -> int:
    if _is_packed(data, args):
        return int(args[0].numel())
    return int(data.shape[1] if data.dim() == 3 and args[-1] is True else data.shape[0])


def _unpacked(plain: Callable[..., Any], data: torch.Tensor, _batch_sizes: torch.Tensor, state: Any, *rest: Any) -> Any:
    """One step of as many samples as there are positions has the shapes of the packed call, which reads its batch sizes."""
    states = state if isinstance(state, (list, tuple)) else (state,)
    num_samples = states[0].shape[1]
    wide = [s[:, :1].expand(-1, data.shape[0], -1) for s in states]
    out, *last = plain(data.unsqueeze(0), wide if isinstance(state, (list, tuple)) else wide[0], *rest, False)
    return (out.squeeze(0), *(s[:, :num_samples] for s in last))


def _pack(world: World) -> Callable[..., Any]:
    def pack(data: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
        known = world.value_of(lengths)
        samples, longest = (data.shape[0], data.shape[1]) if batch_first else (data.shape[1], data.shape[0])
        with unset_fake_temporarily():
            ends = known if known is not None else torch.full((samples,), longest)  # unknown lengths: no padding
            is_filled = ends[None, :] > torch.arange(int(ends.max()))[:, None]
            sizes = is_filled.sum(1)
        steps, columns = _places(world, is_filled)
        packed = data[columns, steps] if batch_first else data[steps, columns]
        return packed, values.as_fake(world, sizes)

    return pack


def _pad(world: World) -> Callable[..., Any]:
    def pad(
        data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding: float, total_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with unset_fake_temporarily():
            sizes = world.real_values(batch_sizes)
            is_filled = torch.arange(int(sizes[0]))[None, :] < sizes[:, None]
            lengths = is_filled.sum(0)
        steps, columns = _places(world, is_filled)
        length = max(total_length, is_filled.shape[0])
        sides = (is_filled.shape[1], length) if batch_first else (length, is_filled.shape[1])
        padded = data.new_full((*sides, *data.shape[1:]), padding)
        padded = padded.index_put((columns, steps) if batch_first else (steps, columns), data)
        return padded, values.as_fake(world, lengths)

    return pad


def _places(world: World, is_filled: torch.Tensor) -> list[torch.Tensor]:
    """Step and sample of every position that is no padding."""
    with unset_fake_temporarily():
        places = is_filled.nonzero().unbind(1)
    return [values.as_fake(world, place) for place in places]
