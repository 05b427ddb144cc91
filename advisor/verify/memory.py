"""Whether a model fits this machine as many times as there are processes."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from advisor.engines import EngineInput
from advisor.words import counted

#: Of the free memory, what may be taken; and bytes per parameter of gradients, optimizer states and a whole copy for the comparison.
_USABLE_SHARE, _STATE_BYTES = 0.7, 16
_PARAM_BYTES = {"fp64": 8, "fp16": 2, "bf16": 2, "fp8": 1}


def why_too_large(inp: EngineInput, num_processes: int, *, trained: bool) -> str:
    """Empty when every process can hold the model in the host's memory, else by how much it can't.

    Args:
        inp: the plan; its profile knows the number of parameters.
        num_processes: that hold it.
        trained: with gradients and optimizer states; otherwise it is only built.
    """
    free = free_bytes()
    if free is None:
        return ""
    each = inp.meta.num_params * (_PARAM_BYTES.get(inp.meta.param_dtype, 4) + (_STATE_BYTES if trained else 0))
    if num_processes * each <= _USABLE_SHARE * free:
        return ""
    how = "give the script arguments that make it smaller after --" if inp.form == "script" else "verify on a machine with more memory"
    return (
        f"{counted(num_processes, 'process')} with {inp.meta.num_params / 1e9:.3g} billion parameters each would take about "
        f"{num_processes * each / 2**30:.3g} GiB of memory, of which {free / 2**30:.3g} are free; {how}"
    )


def free_bytes() -> int | None:
    """Memory that new processes can take without swapping (Linux); None unknown."""
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    return None
