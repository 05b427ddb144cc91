"""FSDP1: NO_SHARD over 8 ranks.

Once the process group is there and before the optimizer is built:

    model = parallelize(model)
"""

import re

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

BLOCKS = re.compile(r"blocks\.\d+")  # the repeated layers, by name


def parallelize(model: nn.Module) -> FullyShardedDataParallel:
    """Every rank holds the whole model."""
    on_gpu = torch.cuda.is_available()
    blocks = [module for name, module in model.named_modules() if BLOCKS.fullmatch(name)]
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.NO_SHARD,  # whole copies, as DDP has them; torch calls this one deprecated and DDP its successor
        auto_wrap_policy=ModuleWrapPolicy({type(block) for block in blocks}),  # the root keeps embeddings, last norm and head
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),  # the CPU must be named
        use_orig_params=True,  # parameters keep their names, and frozen ones may sit beside trained ones
    )
