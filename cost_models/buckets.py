"""Buckets in which DDP reduces gradients together."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MIB = 2**20
_BUCKET_MIB, _GRADIENT_SHARE = 25, 0.8


def bucket_sizes(sizes_bytes: Sequence[float], bucket_bytes: float, first_bucket_bytes: float) -> list[float]:
    """DDP's buckets: gradients in the order they are ready join a bucket until it reaches its size (`_compute_bucket_assignment_by_size`)."""
    buckets: list[float] = []
    limit, filled = first_bucket_bytes, 0.0
    for size in sizes_bytes:
        filled += size
        if filled >= limit:
            buckets.append(filled)
            limit, filled = bucket_bytes, 0.0
    return [*buckets, filled] if filled else buckets


def ddp_bucket_bytes(gradient_bytes: float) -> float:
    """Bucket for all gradients together: whole MiB, DDP's default or four fifths of them, so that reducing can overlap backward."""
    return float(max(1, min(_BUCKET_MIB, math.floor(_GRADIENT_SHARE * gradient_bytes / _MIB))) * _MIB)
