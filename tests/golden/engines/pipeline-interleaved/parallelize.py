"""Pipeline of 2 ranks with 3 stages each, interleaved 1F1B; 4 replicas.

Once the process group is there, in the place of forward and backward:

    model, pipeline = parallelize(model, loss_fn)  # the model then has this rank's weights only
    optimizer = torch.optim.AdamW(model.parameters())
    total = pipeline.step(micro_batches)  # 8 of equal shape; the sum of their losses where the last stage is, elsewhere 0
    pipeline.clip_gradients(1.0)
    optimizer.step()
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from run_stages import Pipeline
from stages import Stage, keep_stages

NUM_MICROBATCHES = 8
STAGES = [  # modules in the order in which they run, cut where the plan's price assumes it
    ["tokens", "positions", *(f"blocks.{i}" for i in range(4))],
    [f"blocks.{i}" for i in range(4, 9)],
    ["blocks.9"],
    ["blocks.10"],
    ["blocks.11"],
    ["norm", "head"],
]
TIED = [("tokens.weight", "head.weight")]  # one weight: the first and the last stage each hold a copy


def parallelize(model: nn.Module, loss_fn) -> tuple[nn.Module, Pipeline]:
    """Leave this rank its stages, with 4 replicas."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    mesh = init_device_mesh(device.type, (2, 4), mesh_dim_names=("pipeline", "replicate"))
    line = mesh["pipeline"]
    mine = list(range(line.get_local_rank(), len(STAGES), line.size()))
    aside = keep_stages(model, STAGES, mine, device)
    model.to(device)

    def loss_in_bf16(model: nn.Module, batch):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return loss_fn(model, batch)

    stages = []
    for index in mine:
        stage = Stage(model, loss_in_bf16, STAGES, index, aside)
        stages.append(PipelineStage(stage, index, len(STAGES), device, group=line.get_group()))
    # ScheduleInterleavedZeroBubble, called alike, fills waiting time with weight gradients, for more memory
    schedule = ScheduleInterleaved1F1B([*stages], NUM_MICROBATCHES, loss_fn=lambda loss, _: loss)
    return model, Pipeline(model, stages, schedule, mesh, TIED)
