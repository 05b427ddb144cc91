"""Tensor parallelism: 4 ranks split every layer and its sequence; parameters over 2 data ranks.

Once the process group is there and before the optimizer is built:

    model = parallelize(model)
"""

import functools
import re

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cut_loss import keep_logits_cut
from split_layers import FirstCall, Whole, join_sequence, split_layers, split_sequence

BLOCKS = re.compile(r"model\.layers\.\d+")  # the repeated layers, by name
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


def parallelize(model: nn.Module, *, gather_logits: bool = False) -> nn.Module:
    """Cut the layers over 4 ranks, then shard what each holds over the data ranks.

    While the model trains, its logits stay cut over the vocabulary: DTensors, made for a cross-entropy. `gather_logits` is for code that reads more of them.
    """
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, (2, 4), mesh_dim_names=("shard", "tensor"))
    tensor = mesh["tensor"]
    shard = functools.partial(fully_shard, mesh=mesh["shard"])
    blocks = [module for name, module in model.named_modules() if BLOCKS.fullmatch(name)]
    inside = {module for block in blocks for module in block.modules()}
    outside = {name: m for name, m in model.named_modules() if m not in inside and any(True for _ in m.parameters(recurse=False))}
    blocks[0].register_forward_pre_hook(functools.partial(split_sequence, tensor))
    blocks[-1].register_forward_hook(functools.partial(join_sequence, tensor))
    FirstCall(blocks[0].to(device_type), tensor)
    for block in blocks:
        split_layers(block.to(device_type), tensor)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=keep_every_second_product)
        shard(block)
    head_style = ColwiseParallel(output_layouts=Replicate() if gather_logits else Shard(-1), use_local_output=gather_logits)
    by_vocabulary = {  # each rank has its rows of them
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": head_style,
    }
    for name, module in outside.items():  # embeddings, last norm and head
        cut = getattr(module, "padding_idx", None) is None  # DTensor would look for the padding row on every rank
        parallelize_module(module.to(device_type), tensor, (cut and by_vocabulary.get(name)) or Whole())
        if by_vocabulary.get(name) is head_style and not gather_logits:
            keep_logits_cut(module)
    shard(model)
    return model
