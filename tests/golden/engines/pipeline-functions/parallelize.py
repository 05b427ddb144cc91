"""Pipeline of 2 stages, 1F1B; 2 replicas.

Once the process group is there, in the place of forward and backward:

    model, pipeline = parallelize(model, loss_fn)  # the model then has this rank's weights only
    optimizer = torch.optim.AdamW(model.parameters())
    total = pipeline.step(micro_batches)  # 4 of equal shape; the sum of their losses where the last stage is, elsewhere 0
    pipeline.clip_gradients(1.0)
    optimizer.step()
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from run_stages import Pipeline
from stages import Stage, keep_stages

NUM_MICROBATCHES = 4
STAGES = [  # modules in the order in which they run, cut where the plan's price assumes it
    ["model.embed_tokens", "model.layers.0", "model.layers.1"],
    ["model.layers.2", "model.layers.3", "model.norm", "lm_head"],
]


def parallelize(model: nn.Module, loss_fn) -> tuple[nn.Module, Pipeline]:
    """Leave this rank its stage, with 2 replicas."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("pipeline", "replicate"))
    line = mesh["pipeline"]
    mine = [line.get_local_rank()]
    aside = keep_stages(model, STAGES, mine, device)
    model.to(device)
    stages = []
    for index in mine:
        stage = Stage(model, loss_fn, STAGES, index, aside)
        stages.append(PipelineStage(stage, index, len(STAGES), device, group=line.get_group()))
    schedule = Schedule1F1B(stages[0], NUM_MICROBATCHES, loss_fn=lambda loss, _: loss)
    return model, Pipeline(model, stages, schedule, mesh, [])
