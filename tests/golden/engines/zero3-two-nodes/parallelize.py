"""FSDP2: parameters, gradients and optimizer states sharded over 16 ranks, full recomputation.

Once the process group is there and before the optimizer is built:

    model = parallelize(model)
"""

import functools
import itertools
import re

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

BLOCKS = re.compile(r"model\.layers\.\d+")  # the repeated layers, by name


def parallelize(model: nn.Module) -> nn.Module:
    """Shard everything; a layer's weights are gathered just before it runs, forward and backward."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, (16,), mesh_dim_names=("shard",))
    shard = functools.partial(fully_shard, mesh=mesh)
    for name, module in list(model.named_modules()):
        if BLOCKS.fullmatch(name):
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
            shard(module)
    for block, following in itertools.pairwise([m for m in model.modules() if isinstance(m, FSDPModule)]):
        block.set_modules_to_forward_prefetch([following])  # gathered while this one computes, even where the host falls behind
    shard(model)  # what is left: embeddings, last norm and head
    return model
