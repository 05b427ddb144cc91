"""Other cluster sizes: how the best plan scales, the fewest GPUs that fit, and what would fit when nothing does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from advisor.search.rank import Request, family, search
from advisor.search.space import divisors
from advisor.search.types import Candidate, Rejected
from cost_models.types import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What one cluster size gives: its best candidate, or the plan that comes closest."""

    num_gpus: int
    best: Candidate | None
    closest: Rejected | None
    families: tuple[str, ...] = ()  # strategies with a plan that fits


def resized(cluster: Cluster, num_gpus: int) -> Cluster:
    """The same kind of cluster with another number of GPUs: part of a node, or whole nodes.

    Raises:
        ValueError: the number is neither.
    """
    if num_gpus <= cluster.gpus_per_node:
        return dataclasses.replace(cluster, gpus_per_node=num_gpus, num_nodes=1)
    if num_gpus % cluster.gpus_per_node:
        raise ValueError(f"{num_gpus} GPUs are no whole number of nodes of {cluster.gpus_per_node}")
    return dataclasses.replace(cluster, num_nodes=num_gpus // cluster.gpus_per_node)


def sizes_around(cluster: Cluster, *, most: int) -> list[int]:
    """Sizes worth showing: powers of two within a node, then doubling nodes, up to `most` GPUs; the cluster's own among them."""
    per_node = cluster.gpus_per_node
    inside = [n for n in divisors(per_node) if n & (n - 1) == 0 or n == per_node]
    nodes, outside = 2, []
    while nodes * per_node <= most:
        outside.append(nodes * per_node)
        nodes *= 2
    return sorted({*inside, *outside, cluster.num_gpus})


def at_size(request: Request, num_gpus: int) -> Size:
    """Search one size at the request's global batch."""
    part = dataclasses.replace(request, cluster=resized(request.cluster, num_gpus))
    result = search(part)
    closest = [r for r in result.rejected if r.needed_bytes is not None]
    best = result.candidates[0] if result.candidates else None
    return Size(
        num_gpus=num_gpus, best=best, closest=min(closest, key=lambda r: r.needed_bytes or 0.0) if closest else None,
        families=tuple(dict.fromkeys(family(c.plan) + (" + offload" if c.plan.offload else "") for c in result.candidates)),
    )  # fmt: skip


def scaling(request: Request, sizes: Iterable[int]) -> tuple[Size, ...]:
    """Each size searched at the same global batch; sizes at which no plan is legal are left out."""
    found = (at_size(request, n) for n in sizes)
    return tuple(size for size in found if size.best or size.closest)


def fewest_gpus(request: Request, *, most: int) -> Size | None:
    """The smallest size with a plan that fits and has files, up to `most` GPUs; where none has files, that fits; None when none does."""
    first: Size | None = None
    for num_gpus in sizes_around(request.cluster, most=most):
        size = at_size(request, num_gpus)
        if size.best and not size.best.no_files:
            return size
        if size.best and first is None:
            first = size
    return first
