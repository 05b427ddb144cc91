"""Pipeline of 4 stages, 1F1B; optimizer states sharded over 2 ranks, layers and sequence split over 4 ranks; selective recomputation.

Once the process group is there, in the place of forward and backward:

    model, pipeline = parallelize(model, loss_fn)  # the model then has this rank's weights only
    optimizer = torch.optim.AdamW(model.parameters())
    total = pipeline.step(micro_batches)  # 8 of equal shape; the sum of their losses where the last stage is, elsewhere 0
    pipeline.clip_gradients(1.0)
    optimizer.step()
"""

import functools
import re

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cut_loss import keep_logits_cut
from run_stages import Pipeline
from split_layers import FirstCall, Whole, join_sequence, split_layers, split_sequence
from stages import Stage, StandIn, keep_stages

NUM_MICROBATCHES = 8
STAGES = [  # modules in the order in which they run, cut where the plan's price assumes it
    ["model.embed_tokens", *(f"model.layers.{i}" for i in range(8))],
    [f"model.layers.{i}" for i in range(8, 17)],
    [f"model.layers.{i}" for i in range(17, 26)],
    [*(f"model.layers.{i}" for i in range(26, 32)), "model.norm", "lm_head"],
]

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


def parallelize(model: nn.Module, loss_fn) -> tuple[nn.Module, Pipeline]:
    """Leave this rank its stage, with optimizer states sharded over 2 ranks, layers and sequence split over 4 ranks."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    mesh = init_device_mesh(device.type, (4, 2, 4), mesh_dim_names=("pipeline", "shard", "tensor"))
    line = mesh["pipeline"]
    mine = [line.get_local_rank()]
    aside = keep_stages(model, STAGES, mine, device)
    layers = {name: module for name, module in model.named_modules() if BLOCKS.fullmatch(name) and not isinstance(module, StandIn)}
    tensor = mesh["tensor"]
    inside = {module for layer in layers.values() for module in layer.modules()}
    outside = {name: m for name, m in model.named_modules() if m not in inside and any(True for _ in m.parameters(recurse=False))}
    if "model.layers.0" in layers:
        layers["model.layers.0"].register_forward_pre_hook(functools.partial(split_sequence, tensor))
        FirstCall(layers["model.layers.0"].to(device), tensor)
    if "model.layers.31" in layers:
        layers["model.layers.31"].register_forward_hook(functools.partial(join_sequence, tensor))
    shard = functools.partial(
        fully_shard,
        mesh=mesh["shard"],
        reshard_after_forward=False,  # one gather a step instead of two for each micro-batch
    )
    for layer in layers.values():
        split_layers(layer.to(device), tensor)
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, context_fn=keep_every_second_product)
        shard(layer)
    head_style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    by_vocabulary = {  # each rank has its rows of them
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": head_style,
    }
    for name, module in outside.items():  # embeddings, last norm and head
        cut = getattr(module, "padding_idx", None) is None  # DTensor would look for the padding row on every rank
        parallelize_module(module.to(device), tensor, (cut and by_vocabulary.get(name)) or Whole())
        if by_vocabulary.get(name) is head_style:
            keep_logits_cut(module)
    stages = []
    for index in mine:
        stage = Stage(model, loss_fn, STAGES, index, aside)
        shard(stage)  # what is left: embeddings, last norm and head
        stages.append(PipelineStage(stage, index, len(STAGES), device, group=line.get_group()))
    schedule = Schedule1F1B(stages[0], NUM_MICROBATCHES, loss_fn=lambda loss, _: loss)
    return model, Pipeline(model, stages, schedule, mesh, [])
