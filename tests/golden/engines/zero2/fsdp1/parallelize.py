"""FSDP1: SHARD_GRAD_OP over 8 ranks.

Once the process group is there and before the optimizer is built:

    model = parallelize(model)
"""

import re

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

BLOCKS = re.compile(r"stages\.\d+\.\d+")  # the repeated layers, by name


def in_fp32(_model, _inputs, output):
    """Scores come back in fp32, so that the loss is computed in fp32."""
    return output.float() if isinstance(output, torch.Tensor) else output


def parallelize(model: nn.Module) -> FullyShardedDataParallel:
    """Every rank keeps its part of each layer's weights."""
    on_gpu = torch.cuda.is_available()
    blocks = [module for name, module in model.named_modules() if BLOCKS.fullmatch(name)]
    sharded = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,  # ZeRO-2: layers stay gathered from forward to backward
        # by a mesh shards are DTensors in checkpoints, which can be written beside training
        device_mesh=init_device_mesh("cuda" if on_gpu else "cpu", (8,), mesh_dim_names=("shard",)),
        auto_wrap_policy=ModuleWrapPolicy({type(block) for block in blocks}),  # the root keeps embeddings, last norm and head
        # gathers and products in bf16, reductions in fp32; shards stay in fp32
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,  # the next layer is gathered while this one's gradients are computed
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),  # the CPU must be named
        use_orig_params=True,  # parameters keep their names, and frozen ones may sit beside trained ones
    )
    sharded.register_forward_hook(in_fp32)
    return sharded
