"""Tensor parallelism: 2 ranks split every layer.

Once the process group is there and before the optimizer is built:

    model = parallelize(model)
"""

import collections
import re

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from split_layers import FirstCall, Whole, split_layers

BLOCKS = re.compile(r"blocks\.\d+")  # the repeated layers, by name


def parallelize(model: nn.Module) -> nn.Module:
    """Cut the layers over 2 ranks."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, (2,), mesh_dim_names=("tensor",))
    tensor = mesh["tensor"]
    blocks = [module for name, module in model.named_modules() if BLOCKS.fullmatch(name)]
    inside = {module for block in blocks for module in block.modules()}
    outside = {name: m for name, m in model.named_modules() if m not in inside and any(True for _ in m.parameters(recurse=False))}
    places = collections.defaultdict(list)  # of each parameter: a tied one has several
    for module in outside.values():
        for name, parameter in module.named_parameters(recurse=False):
            places[parameter].append((module, name))
    FirstCall(blocks[0].to(device_type), tensor)
    for block in blocks:
        split_layers(block.to(device_type), tensor)
    for module in outside.values():  # embeddings, last norm and head
        parallelize_module(module.to(device_type), tensor, Whole())
    for (first, name), *others in places.values():
        for module, other in others:
            setattr(module, other, getattr(first, name))  # tied still
    return model
