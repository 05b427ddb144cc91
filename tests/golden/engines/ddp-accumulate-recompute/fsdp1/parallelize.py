"""FSDP1: NO_SHARD over 8 ranks, selective recomputation.

Once the process group is there and before the optimizer is built:

    model = parallelize(model)
"""

import functools
import re

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

BLOCKS = re.compile(r"blocks\.\d+")  # the repeated layers, by name
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.convolution.default}
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def keep_every_second_product():
    """What a checkpointed layer keeps: attention and every second matrix product; all else runs again in backward."""
    seen = {False: 0, True: 0}  # products so far, in forward and in recomputation

    def policy(context, operator, *_args, **_kwargs):
        seen[context.is_recompute] += operator in PRODUCTS
        keep = operator in ATTENTION or (operator in PRODUCTS and seen[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def in_fp32(_model, _inputs, output):
    """Scores come back in fp32, so that the loss is computed in fp32."""
    return output.float() if isinstance(output, torch.Tensor) else output


def parallelize(model: nn.Module) -> FullyShardedDataParallel:
    """Every rank holds the whole model."""
    on_gpu = torch.cuda.is_available()
    blocks = [module for name, module in model.named_modules() if BLOCKS.fullmatch(name)]
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=keep_every_second_product)
    sharded = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.NO_SHARD,  # whole copies, as DDP has them; torch calls this one deprecated and DDP its successor
        auto_wrap_policy=ModuleWrapPolicy({type(block) for block in blocks}),  # the root keeps embeddings, last norm and head
        # gathers and products in bf16, reductions in fp32; shards stay in fp32
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),  # the CPU must be named
        use_orig_params=True,  # parameters keep their names, and frozen ones may sit beside trained ones
    )
    sharded.register_forward_hook(in_fp32)
    return sharded
