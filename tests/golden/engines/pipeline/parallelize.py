"""Pipeline of 4 stages, 1F1B; parameters sharded over 4 ranks; full recomputation.

Once the process group is there, in the place of forward and backward:

    model, pipeline = parallelize(model, loss_fn)  # the model then has this rank's weights only
    optimizer = torch.optim.AdamW(model.parameters())
    total = pipeline.step(micro_batches)  # 16 of equal shape; the sum of their losses where the last stage is, elsewhere 0
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
from torch.utils.checkpoint import checkpoint

from run_stages import Pipeline
from stages import Stage, StandIn, keep_stages

NUM_MICROBATCHES = 16
STAGES = [  # modules in the order in which they run, cut where the plan's price assumes it
    ["model.embed_tokens", *(f"model.layers.{i}" for i in range(8))],
    [f"model.layers.{i}" for i in range(8, 17)],
    [f"model.layers.{i}" for i in range(17, 26)],
    [*(f"model.layers.{i}" for i in range(26, 32)), "model.norm", "lm_head"],
]

BLOCKS = re.compile(r"model\.layers\.\d+")  # the repeated layers, by name


class Plain(nn.Module):
    """Hides FSDP from the schedule, which would keep every layer gathered and every gradient whole until the step's end."""

    def __init__(self, stage: Stage):
        super().__init__()
        self.stage = stage

    def forward(self, *received: torch.Tensor, batch):
        return self.stage(*received, batch=batch)


def parallelize(model: nn.Module, loss_fn) -> tuple[nn.Module, Pipeline]:
    """Leave this rank its stage, with parameters sharded over 4 ranks."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    mesh = init_device_mesh(device.type, (4, 4), mesh_dim_names=("pipeline", "shard"))
    line = mesh["pipeline"]
    mine = [line.get_local_rank()]
    aside = keep_stages(model, STAGES, mine, device)
    layers = {name: module for name, module in model.named_modules() if BLOCKS.fullmatch(name) and not isinstance(module, StandIn)}
    shard = functools.partial(fully_shard, mesh=mesh["shard"])
    for layer in layers.values():
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        shard(layer)
    stages = []
    for index in mine:
        stage = Stage(model, loss_fn, STAGES, index, aside)
        shard(stage)  # what is left: embeddings, last norm and head
        stages.append(PipelineStage(Plain(stage), index, len(STAGES), device, group=line.get_group()))
    schedule = Schedule1F1B(stages[0], NUM_MICROBATCHES, loss_fn=lambda loss, _: loss)
    return model, Pipeline(model, stages, schedule, mesh, [])
