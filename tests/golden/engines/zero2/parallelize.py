"""FSDP2: gradients and optimizer states sharded over 8 ranks.

Once the process group is there and before the optimizer is built:

    model = parallelize(model)
"""

import functools
import itertools
import re

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

BLOCKS = re.compile(r"stages\.\d+\.\d+")  # the repeated layers, by name


def parallelize(model: nn.Module) -> nn.Module:
    """Shard everything between steps; a layer's weights are gathered in forward and stay for backward."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, (8,), mesh_dim_names=("shard",))
    shard = functools.partial(
        fully_shard,
        mesh=mesh,
        reshard_after_forward=False,  # layers stay gathered from forward to backward: one gather a step instead of two
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),  # fp32 shards; gathers and products in bf16, reductions in fp32
    )
    for name, module in list(model.named_modules()):
        if BLOCKS.fullmatch(name):
            shard(module)
    for block, following in itertools.pairwise([m for m in model.modules() if isinstance(m, FSDPModule)]):
        block.set_modules_to_forward_prefetch([following])  # gathered while this one computes, even where the host falls behind
    # what is left (embeddings, last norm and head); its outputs come back in fp32, so that the loss is computed in fp32
    shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32))
    return model
