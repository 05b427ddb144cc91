"""What is changed in a model before it is verified: fewer blocks, no dropout. The same for every process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def make_smaller(model: nn.Module, removed_blocks: Iterable[str]) -> nn.Module:
    """The model without some blocks; its recurrent layers drop nothing.

    Raises:
        TypeError: a block lies in no ModuleList, Sequential or ModuleDict.
    """
    remove_blocks(model, removed_blocks)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
    return model


def remove_blocks(model: nn.Module, paths: Iterable[str]) -> None:
    """Take blocks out of the lists that hold them.

    Raises:
        TypeError: a block lies in no ModuleList, Sequential or ModuleDict.
    """
    for path in reversed(list(paths)):
        home, _, name = path.rpartition(".")
        parent = model.get_submodule(home)
        if isinstance(parent, nn.ModuleDict):
            del parent[name]
        elif isinstance(parent, nn.ModuleList | nn.Sequential):
            del parent[int(name)]
        else:
            raise TypeError(f"{path} lies in a {type(parent).__name__}, from which no layer can be taken")


def without_dropout() -> None:
    """From now on nothing is dropped: ranks and a single process draw different masks, which would hide what is compared."""

    def keep(value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return value

    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(functional, name, keep)
    attention = functional.scaled_dot_product_attention

    def plain_attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *others: Any, **options: Any
    ) -> torch.Tensor:
        del dropout_p
        return attention(query, key, value, attn_mask, 0.0, *others, **options)

    functional.scaled_dot_product_attention = plain_attention
