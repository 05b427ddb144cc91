"""The largest share of a model's elements that a rank may hold when its tensors are cut over ranks; computed from their shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

Shapes = Sequence[Sequence[int]]
#: Flattened tensors begin at multiples of 16 bytes: of so many elements in fp32, twice as many in 16 bits.
_ALIGNED = 8


def by_rows(shapes: Shapes, num_ranks: int) -> float:
    """Each tensor cut by rows, as FSDP2 does: the first rank has the rounded-up number of rows of every tensor."""
    held = sum(math.ceil(shape[0] / num_ranks) * math.prod(shape[1:]) if shape else 1 for shape in shapes)
    return held / _total(shapes)


def by_elements(shapes: Shapes, num_ranks: int) -> float:
    """Tensors flattened and laid side by side, as FSDP1 and DeepSpeed do, in units unknown here: each may be padded and aligned."""
    return 1 / num_ranks + len(shapes) * (1 + _ALIGNED / num_ranks) / _total(shapes)


def by_tensors(shapes: Shapes, num_ranks: int) -> float:
    """Whole tensors dealt out, each to the rank that has least, as ZeroRedundancyOptimizer does: the last one may come on top."""
    largest = max((math.prod(shape) for shape in shapes), default=0)
    return 1 / num_ranks + largest / _total(shapes) * (1 - 1 / num_ranks)


def _total(shapes: Shapes) -> int:
    return max(sum(math.prod(shape) for shape in shapes), 1)
