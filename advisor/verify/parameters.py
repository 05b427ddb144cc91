"""Final parameters: saved by the single process, compared on every rank of the distributed run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

#: Elements whose gradient never exceeds this share of the root mean square of all are rounding noise: Adam divides by the gradient's own
#: size, and makes whole steps of it (the bias of attention keys, for one, has no gradient in exact arithmetic).
_NOISE_SHARE = 1e-5
_NOISE = "noise:"
#: How a tensor engine names the products that lie side by side in one weight, once it has cut them apart.
_PART = re.compile(r"\.parts\.\d+(\.\w+)$")


def louder(gradient: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Largest size so far of each element of a gradient."""
    size = gradient.detach().float().abs()
    return size if before is None else torch.maximum(before, size)


def save(file: Path, values: Iterable[tuple[str, torch.Tensor]], loudest: Mapping[str, torch.Tensor], *, num_steps: int = 0) -> None:
    """Write parameters as `num_steps` left them, and which elements can't be compared."""
    total = sum(float(size.double().square().sum()) for size in loudest.values())
    count = sum(size.numel() for size in loudest.values())
    limit = _NOISE_SHARE * (total / max(count, 1)) ** 0.5
    noise = {_NOISE + name: ((size > 0) & (size < limit)).cpu().numpy() for name, size in loudest.items()}
    np.savez(file, **{name: _array(value) for name, value in values}, **{name: mask for name, mask in noise.items() if mask.any()})
    _count_file(file).write_text(str(num_steps), encoding="ascii")


def steps_before(file: Path) -> int:
    """How many steps the saved parameters have behind them; 0 where none were saved."""
    return int(_count_file(file).read_text(encoding="ascii")) if _count_file(file).is_file() else 0


def _count_file(file: Path) -> Path:
    return file.with_suffix(".steps")


def differences(file: Path, values: Iterable[tuple[str, torch.Tensor]]) -> dict[str, dict[str, float] | None]:
    """By name: norms of the difference and of the reference over the elements that can be compared, and how many can't.

    None where the reference has no such parameter, or another shape.
    """
    found: dict[str, dict[str, float] | None] = {}
    parts: dict[str, list[Any]] = {}
    with np.load(file) as reference:
        for name, value in values:
            whole = _PART.sub(r"\1", name)
            if name not in reference and whole in reference:
                parts.setdefault(whole, []).append(_array(value).ravel())
            else:
                found[name] = _difference(_array(value), reference, name)
        for name, pieces in parts.items():
            found[name] = _difference(np.concatenate(pieces), reference, name)
    return found


def _difference(value: Any, reference: Mapping[str, Any], name: str) -> dict[str, float] | None:
    if name not in reference or reference[name].size != value.size:
        return None
    theirs = reference[name].astype(np.float64).ravel()
    kept = ~reference[_NOISE + name].ravel() if _NOISE + name in reference else np.ones(theirs.size, dtype=bool)
    difference = (value.astype(np.float64).ravel() - theirs)[kept]
    return {
        "difference_norm": float(np.linalg.norm(difference)),
        "reference_norm": float(np.linalg.norm(theirs[kept])),
        "num_left_out": int(theirs.size - kept.sum()),
    }


def _array(value: torch.Tensor) -> Any:
    return value.detach().float().cpu().clone().numpy()  # a copy: an array would hold on to storage that FSDP frees
