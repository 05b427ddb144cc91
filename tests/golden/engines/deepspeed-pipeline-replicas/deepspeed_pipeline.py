"""Pipeline of 2 stages, 1F1B; 2 replicas.

Once the process group is there (`deepspeed.init_distributed()`), in the place of forward, backward and step:

    layers, micro_batches = cut_into_stages(model, loss_fn)  # the model then has this rank's weights only
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=layers, optimizer=optimizer, config="ds_config.json")
    pipeline = DeepSpeedPipeline(engine, micro_batches)
    loss = pipeline.step(batches)  # 4 micro-batches of equal shape; their mean loss
"""

import collections

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from deepspeed_stages import SharedWeight, StageLayer
from stages import keep_stages

STAGES = [  # modules in the order in which they run, cut where the plan's price assumes it
    ["wte", "wpe", "h.0", "h.1"],
    ["h.2", "h.3", "ln_f", "lm_head"],
]
TIED = [("wte.weight", "lm_head.weight")]  # one weight: the first and the last stage each hold a copy


def cut_into_stages(model: nn.Module, loss_fn) -> tuple[PipelineModule, collections.deque]:
    """The model as DeepSpeed's list of layers, one entry a stage; and the queue from which every stage takes its micro-batches."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    mine = dist.get_rank() // (dist.get_world_size() // len(STAGES))  # DeepSpeed's order: replicas of a stage have neighbouring ranks
    keep_stages(model, STAGES, [mine], device)
    micro_batches: collections.deque = collections.deque()
    # specifications are built on their own stage alone
    layers = [LayerSpec(StageLayer, model, loss_fn, STAGES, index, micro_batches) for index in range(len(STAGES))]
    for number, (first, last) in enumerate(TIED):
        ends = [TiedLayerSpec(f"shared {number}", SharedWeight, model, name) for name in (first, last)]
        layers = [ends[0], *layers, ends[1]]
    with torch.no_grad():  # shared weights are sent from one end to the other
        module = PipelineModule(layers, num_stages=len(STAGES), partition_method="type:StageLayer")  # each stage has one of that type
    for parameter in module.parameters():
        parameter.model_parallel = not parameter.ds_pipe_replicated  # else gradients are clipped by the norm of the first stage alone
    return module, micro_batches
