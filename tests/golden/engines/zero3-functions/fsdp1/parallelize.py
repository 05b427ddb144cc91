"""FSDP1: FULL_SHARD over 8 ranks.

Once the process group is there and before the optimizer is built:

    model = parallelize(model)
"""

import re

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

BLOCKS = re.compile(r"stages\.\d+\.\d+")  # the repeated layers, by name


def parallelize(model: nn.Module) -> FullyShardedDataParallel:
    """Every rank keeps its part of each layer's weights."""
    on_gpu = torch.cuda.is_available()
    blocks = [module for name, module in model.named_modules() if BLOCKS.fullmatch(name)]
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.FULL_SHARD,  # ZeRO-3: a layer is gathered just before it runs, forward and backward
        # by a mesh shards are DTensors in checkpoints, which can be written beside training
        device_mesh=init_device_mesh("cuda" if on_gpu else "cpu", (8,), mesh_dim_names=("shard",)),
        auto_wrap_policy=ModuleWrapPolicy({type(block) for block in blocks}),  # the root keeps embeddings, last norm and head
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,  # the next layer is gathered while this one's gradients are computed
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),  # the CPU must be named
        use_orig_params=True,  # parameters keep their names, and frozen ones may sit beside trained ones
    )
