"""DistributedDataParallel on 16 ranks.

Once the process group is there and before the optimizer is built:

    model = parallelize(model)
"""

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

COMPRESS = False  # True halves what crosses the network, gradients being reduced in bf16: for when it is the limit; losses change slightly


def in_fp16(forward, device_type: str):
    """Forward under autocast; scores come back in fp32, so that the loss is computed in fp32."""

    def run(*args, **kwargs):
        with torch.autocast(device_type, dtype=torch.float16):
            output = forward(*args, **kwargs)
        return output.float() if isinstance(output, torch.Tensor) else output

    return run


def parallelize(model: nn.Module) -> DistributedDataParallel:
    """Every rank holds the whole model; gradients are averaged in buckets while backward still runs."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    model.to(device)
    model.forward = in_fp16(model.forward, device.type)
    parallel = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=25,  # the default
        gradient_as_bucket_view=True,  # gradients live in the buckets: no second copy, and clipping works as ever
        broadcast_buffers=True,  # running statistics of batch norm: rank 0's go to all before each forward
    )
    if COMPRESS:
        parallel.register_comm_hook(None, bf16_compress_hook)
    return parallel
