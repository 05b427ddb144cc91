"""Sharding and recomputation of a row, as tables spell them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.measure.run_values import Fields, Skip
from cost_models.traits import Runtime

#: Words of the columns "sharding" and "framework" (lower case, "_" and "-" as blanks), and the ZeRO stage that they mean; the first that is found counts.
_STAGES: Sequence[tuple[str, int]] = (
    (r"zero ?3|full shard|hybrid shard|hsdp", 3), (r"zero ?2|shard grad op", 2), (r"zero ?1|distributed optimizer|sharded optimizer", 1),
    (r"zero ?0|no shard|^none\b|\bddp\b", 0), (r"fsdp|fully shard", 3),
)  # fmt: skip
_IN_NODES = r"hybrid shard|hsdp"
#: The same of the column "activation_ckpt".
_RECOMPUTE: Sequence[tuple[str, str]] = (
    (r"selective|\bcore attn\b|\bsac\b|per op", "selective"), (r"none|no|false|off|0|0\.0", "none"),
    (r"full.*|yes|true|on|1|1\.0|block.*|uniform.*|all|layers?|activation checkpoint.*|gradient checkpoint.*", "full"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Over what the data ranks of a row shard."""

    zero_stage: int
    in_nodes: bool  # within each node only, replicated between nodes


def sharding_of(row: Fields, runtime: Runtime, num_data_ranks: int) -> Sharding:
    """Stated as a stage, else in words, else the runtime's habit, which is then named.

    Raises:
        Skip: there is no such stage.
    """
    words = [re.sub(r"[_-]", " ", row.text(name).lower()) for name in ("sharding", "framework")]
    stated = row.number("zero_stage")
    if stated is not None:
        if stated > 3:
            raise Skip(f"there is no ZeRO stage {stated:g}")
        return Sharding(zero_stage=int(stated), in_nodes=stated == 3 and re.search(_IN_NODES, words[0]) is not None)
    for text in words:
        for pattern, stage in _STAGES:
            if re.search(pattern, text):
                return Sharding(zero_stage=stage, in_nodes=re.search(_IN_NODES, text) is not None)
    if num_data_ranks > 1:
        row.assumed.append("zero_stage")
    return Sharding(zero_stage=runtime.zero_stage, in_nodes=False)


def recompute_of(row: Fields) -> str:
    """One of RECOMPUTE; blank is none."""
    text = re.sub(r"[_-]", " ", row.text("activation_ckpt").lower())
    for pattern, mode in _RECOMPUTE:
        if re.search(pattern, text) if mode == "selective" else re.fullmatch(pattern, text):
            return mode
    if text:
        row.assumed.append(f'activation_ckpt ("{row.text("activation_ckpt")}" is not known)')
    return "none"
