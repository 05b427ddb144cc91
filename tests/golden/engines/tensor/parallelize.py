"""Tensor parallelism: 4 ranks split every layer and its sequence; parameters over 4 data ranks.

Once the process group is there and before the optimizer is built:

    model = parallelize(model)
"""

import functools
import re

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# inside a layer: weights cut by output columns share an input; what is cut by input rows sums its outputs over the ranks
PAIRS = [
    (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]),
    (["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]),
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


class Whole(ParallelStyle):
    """Every rank of a tensor group holds and computes this module whole."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, mesh, None, self.wrap, self.unwrap)

    @staticmethod
    def wrap(_module, inputs, mesh):
        return tuple(DTensor.from_local(x, mesh, [Replicate()]) if isinstance(x, torch.Tensor) else x for x in inputs)

    @staticmethod
    def unwrap(_module, output, _mesh):
        return output.to_local()


class SharedInput:
    """One gathered input for all column layers of a pair: their input gradients are summed first, then reduced once."""

    def __init__(self, mesh: DeviceMesh, last: nn.Module):
        self.mesh, self.last = mesh, last
        self.local = self.whole = None

    def __call__(self, module, args, kwargs):
        if self.local is None:
            self.local = args[0] if args else next(iter(kwargs.values()))
            self.whole = DTensor.from_local(self.local, self.mesh, [Shard(1)]).redistribute(placements=[Replicate()])
        local, whole = self.local, self.whole
        if module is self.last:
            self.local = self.whole = None
        return tuple(whole if x is local else x for x in args), {k: whole if x is local else x for k, x in kwargs.items()}


def split_sequence(mesh: DeviceMesh, _block, inputs):
    """Before the first layer: each rank goes on with its part of the sequence."""
    whole = DTensor.from_local(inputs[0], mesh, [Replicate()])
    return (whole.redistribute(placements=[Shard(1)]).to_local(), *inputs[1:])


def join_sequence(mesh: DeviceMesh, _block, _inputs, output):
    """After the last layer: the whole sequence again."""
    part, *others = output if isinstance(output, tuple) else (output,)
    whole = DTensor.from_local(part, mesh, [Shard(1)]).redistribute(placements=[Replicate()]).to_local()
    return (whole, *others) if isinstance(output, tuple) else whole


def split_layers(block: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a layer's products over the ranks of a tensor group."""
    styles: dict[str, ParallelStyle] = {}
    for columns, rows in PAIRS:
        widest = max(block.get_submodule(name).out_features for name in columns)
        if widest > block.get_submodule(rows[0]).in_features:
            raise ValueError(f"{columns} hold several products in one weight; cutting it would mix them")
        styles |= dict.fromkeys(columns, ColwiseParallel())
        styles |= dict.fromkeys(rows, RowwiseParallel(output_layouts=Shard(1)))
        parents = {name.rpartition(".")[0] for name in columns}  # a module that holds just these layers shares its input as a whole
        readers = [block.get_submodule(name) for name in (parents if len(parents) == 1 and "" not in parents else columns)]
        shared = SharedInput(mesh, readers[-1])
        for reader in readers:
            reader.register_forward_pre_hook(shared, with_kwargs=True)
    for name, module in block.named_modules():
        if name not in styles and any(True for _ in module.parameters(recurse=False)):
            styles[name] = SequenceParallel(use_local_output=True)  # norms
    parallelize_module(block, mesh, styles)


def parallelize(model: nn.Module) -> nn.Module:
    """Cut the layers over 4 ranks, then shard what each holds over the data ranks."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, (4, 4), mesh_dim_names=("shard", "tensor"))
    tensor = mesh["tensor"]
    shard = functools.partial(fully_shard, mesh=mesh["shard"])
    blocks = [module for name, module in model.named_modules() if BLOCKS.fullmatch(name)]
    inside = {module for block in blocks for module in block.modules()}
    blocks[0].register_forward_pre_hook(functools.partial(split_sequence, tensor))
    blocks[-1].register_forward_hook(functools.partial(join_sequence, tensor))
    for block in blocks:
        split_layers(block.to(device_type), tensor)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=keep_every_second_product)
        shard(block)
    for module in model.modules():  # embeddings, last norm and head
        if module not in inside and any(True for _ in module.parameters(recurse=False)):
            parallelize_module(module.to(device_type), tensor, Whole())
    shard(model)
    return model
