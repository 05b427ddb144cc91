"""Which weight each matrix product multiplies, and which of its sides are tokens, inputs and outputs.

A linear layer y = x W shows up as three products: forward (tokens x in x out), input gradient (tokens x out x in) and weight
gradient (out x tokens x in, or in x tokens x out). Only the first two name a weight; the third is recognised by its sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from advisor.workload.assign import LocalOp
from advisor.workload.records import num_elements

PRODUCTS = ("mm", "addmm", "linear", "_scaled_mm", "mv", "addmv")
BATCHED_PRODUCTS = ("bmm", "baddbmm")
GROUPED_PRODUCTS = ("_grouped_mm", "_scaled_grouped_mm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Sides of one product and, where a weight is involved, what they mean."""

    m: float
    n: float
    k: float
    batch: float = 1.0
    weight: str = ""  # relative name; "" where both factors are activations
    role: str = ""  # "forward", "input-gradient", "weight-gradient"; "" without a weight
    out_side: str = ""  # which of m, n, k is the weight's output side
    in_side: str = ""


def sides(local: LocalOp) -> Product | None:
    """Sides of an operator that is a matrix product; None if it is none or has unexpected arguments."""
    op = local.op
    shapes = [s for s in op.inputs if s]
    if op.name in ("linear",) and len(shapes) >= 2 and len(shapes[1]) == 2:
        return Product(m=num_elements(shapes[0][:-1]), n=shapes[1][0], k=shapes[1][1])
    if op.name in ("mv", "addmv"):
        matrix = next((s for s in shapes if len(s) == 2), None)
        return Product(m=matrix[0], n=1.0, k=matrix[1]) if matrix else None
    if op.name in ("mm", "addmm", "_scaled_mm"):
        pair = _chained([s for s in shapes if len(s) == 2])
        return Product(m=pair[0][0], n=pair[1][1], k=pair[0][1]) if pair else None
    if op.name in BATCHED_PRODUCTS:
        pair = _chained([s for s in shapes if len(s) == 3])
        return Product(m=pair[0][1], n=pair[1][2], k=pair[0][2], batch=pair[0][0]) if pair else None
    if op.name in GROUPED_PRODUCTS:
        return _grouped(shapes)
    return None


def _chained(shapes: list[tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The last two factors whose inner sides agree (an added matrix may come before them, scales after)."""
    for a, b in reversed(list(pairwise(shapes))):
        if a[-1] == b[-2]:
            return a, b
    return None


def _grouped(shapes: list[tuple[int, ...]]) -> Product | None:
    """Products of a bank of experts: tokens sorted by expert times a stack of weights, or tokens times tokens for the gradient."""
    a, b = shapes[0], shapes[1]
    if len(a) == 2 and len(b) == 3:
        return Product(m=a[0] / b[0], n=b[2], k=a[1], batch=b[0])
    if len(a) == 2 and len(b) == 2:
        groups = shapes[2][0] if len(shapes) > 2 and len(shapes[2]) == 1 else 1
        return Product(m=a[0], n=b[1], k=a[1] / groups, batch=groups)
    return None


def find_products(ops: tuple[LocalOp, ...]) -> dict[int, Product]:
    """Products of a mean repeat by position in `ops`, with the weight that each multiplies."""
    known: dict[str, list[Product]] = {}
    found: dict[int, Product] = {}
    for i, local in enumerate(ops):
        product = sides(local)
        if product is None:
            continue
        if local.weight and local.op.phase == "forward":
            product = _with_weight(product, local.weight, "forward")
            known.setdefault(local.module, []).append(product)
        found[i] = product
    for i, local in enumerate(ops):
        if i in found and local.op.phase == "backward":
            found[i] = _gradient(found[i], local, known.get(local.module, []))
    return found


def _with_weight(product: Product, weight: str, role: str, *, out_side: str = "n", in_side: str = "k") -> Product:
    return Product(m=product.m, n=product.n, k=product.k, batch=product.batch, weight=weight, role=role, out_side=out_side, in_side=in_side)


def _gradient(product: Product, local: LocalOp, forward: list[Product]) -> Product:
    """Match a backward product with a forward one of the same module."""
    for f in forward:
        if local.weight == f.weight and _near((product.m, product.n, product.k), (f.m, f.k, f.n)):
            return _with_weight(product, f.weight, "input-gradient", out_side="k", in_side="n")
    for f in forward:
        if local.weight in ("", f.weight):
            if _near((product.m, product.n, product.k), (f.n, f.k, f.m)):
                return _with_weight(product, f.weight, "weight-gradient", out_side="m", in_side="n")
            if _near((product.m, product.n, product.k), (f.k, f.n, f.m)):
                return _with_weight(product, f.weight, "weight-gradient", out_side="n", in_side="m")
            if not local.weight and _near((product.m, product.n, product.k), (f.m, f.k, f.n)):
                return _with_weight(product, f.weight, "input-gradient", out_side="k", in_side="n")
    if local.weight:
        return _with_weight(product, local.weight, "input-gradient", out_side="k", in_side="n")
    return product


def _near(a: tuple[float, float, float], b: tuple[float, float, float]) -> bool:
    return all(abs(x - y) < 1e-6 * max(x, 1.0) for x, y in zip(a, b, strict=True))
