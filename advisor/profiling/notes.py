"""What a reader of a profile must know about how its step was seen, and where in the script something happened."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from advisor.profiling.watcher import Watcher


def of_step(watcher: Watcher) -> list[str]:
    """Sentences about a step, for the profile's warnings."""
    found = []
    if watcher.processes:
        found.append(f"The script starts other processes ({', '.join(watcher.processes[:4])}): what they write is not held back, "
                     "and what they compute is not in the profile.")  # fmt: skip
    if watcher.num_closure_calls:
        found.append(f"{type(watcher.stepped[0]).__name__ if watcher.stepped else 'The optimizer'} evaluates its closure several times in a step: "
                     "the profile holds one forward and backward pass, a real step takes more.")  # fmt: skip
    if watcher.micro_shapes:
        first = next((r.input_shapes for r in watcher.roots.values() if r.has_grad), [])
        found.append(f"The micro-batches of a step differ in size: the first has inputs {first}, others {watcher.micro_shapes[:3]}; "
                     "all are taken to be like the first.")  # fmt: skip
    if watcher.without_saved:
        found.append(
            "torch.func transforms hide what is kept for backward: it was taken to be every floating-point output of the forward pass."
        )
    return found


def location(script: Path) -> str:
    """File and line of the script (or of the nearest library code outside torch) that is running."""
    frame: Any = sys._getframe(1)
    fallback = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name == str(script):
            return f"{script.name}:{frame.f_lineno}"
        if not fallback and "/torch/" not in name and "/advisor/" not in name and not name.startswith("<"):
            fallback = f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return fallback
