"""Pipeline of 2 stages, 1F1B; optimizer states sharded over 2 ranks; selective recomputation.

Once the process group is there (`deepspeed.init_distributed()`), in the place of forward, backward and step:

    layers, micro_batches = cut_into_stages(model, loss_fn)  # the model then has this rank's weights only
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=layers, optimizer=optimizer, config="ds_config.json")
    pipeline = DeepSpeedPipeline(engine, micro_batches)
    loss = pipeline.step(batches)  # 4 micro-batches of equal shape; their mean loss
"""

import collections
import functools
import re

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from deepspeed_stages import SharedWeight, StageLayer
from stages import StandIn, keep_stages

STAGES = [  # modules in the order in which they run, cut where the plan's price assumes it
    ["wte", "wpe", "h.0", "h.1"],
    ["h.2", "h.3", "ln_f", "lm_head"],
]
TIED = [("wte.weight", "lm_head.weight")]  # one weight: the first and the last stage each hold a copy

BLOCKS = re.compile(r"h\.\d+")  # the repeated layers, by name
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


def cut_into_stages(model: nn.Module, loss_fn) -> tuple[PipelineModule, collections.deque]:
    """The model as DeepSpeed's list of layers, one entry a stage; and the queue from which every stage takes its micro-batches."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    mine = dist.get_rank() // (dist.get_world_size() // len(STAGES))  # DeepSpeed's order: replicas of a stage have neighbouring ranks
    keep_stages(model, STAGES, [mine], device, torch.bfloat16)
    for name, layer in model.named_modules():
        if BLOCKS.fullmatch(name) and not isinstance(layer, StandIn):
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, context_fn=keep_every_second_product)
    # scores come out in fp32, so that the loss is computed in fp32
    model.register_forward_hook(lambda _model, _inputs, scores: scores.float() if isinstance(scores, torch.Tensor) else scores)
    micro_batches: collections.deque = collections.deque()
    # specifications are built on their own stage alone
    layers = [LayerSpec(StageLayer, model, loss_fn, STAGES, index, micro_batches) for index in range(len(STAGES))]
    for number, (first, last) in enumerate(TIED):
        ends = [TiedLayerSpec(f"shared {number}", SharedWeight, model, name) for name in (first, last)]
        layers = [ends[0], *layers, ends[1]]
    with torch.no_grad():  # shared weights are sent from one end to the other
        module = PipelineModule(layers, num_stages=len(STAGES), partition_method="type:StageLayer")  # each stage has one of that type
    return module, micro_batches
