"""DistributedDataParallel on 8 ranks, selective recomputation.

Once the process group is there and before the optimizer is built:

    model = parallelize(model)
"""

import functools
import re

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
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


def in_bf16(forward, device_type: str):
    """Forward under autocast; scores come back in fp32, so that the loss is computed in fp32."""

    def run(*args, **kwargs):
        with torch.autocast(device_type, dtype=torch.bfloat16):
            output = forward(*args, **kwargs)
        return output.float() if isinstance(output, torch.Tensor) else output

    return run


def parallelize(model: nn.Module) -> DistributedDataParallel:
    """Every rank holds the whole model; gradients are averaged in buckets while backward still runs."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    model.to(device)
    for name, block in model.named_modules():
        if BLOCKS.fullmatch(name):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=keep_every_second_product)
    model.forward = in_bf16(model.forward, device.type)
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=25,  # the default
        gradient_as_bucket_view=True,  # gradients live in the buckets: no second copy, and clipping works as ever
    )
