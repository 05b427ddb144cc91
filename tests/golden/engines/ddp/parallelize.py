"""DistributedDataParallel on 8 ranks.

Once the process group is there and before the optimizer is built:

    model = parallelize(model)
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def parallelize(model: nn.Module) -> DistributedDataParallel:
    """Every rank holds the whole model; gradients are averaged in buckets while backward still runs."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    model.to(device)
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=25,  # the default
        gradient_as_bucket_view=True,  # gradients live in the buckets: no second copy, and clipping works as ever
        static_graph=True,  # no control flow was seen in the model; drop this if layers are skipped at times, or with no_sync()
    )
