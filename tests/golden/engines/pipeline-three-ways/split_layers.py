"""Cuts the products of a layer over the ranks of a tensor group."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel, parallelize_module

# inside a layer: weights cut by output columns share an input; what is cut by input rows sums its outputs over the ranks
PAIRS = [
    (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]),
    (["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]),
]
ATTENTION = {"self_attn.q_proj": "self_attn"}  # by their first column: modules that hold the heads
# what these may call the sizes that a rank has only a part of
LOCAL_SIZES = {
    "num_heads", "num_attention_heads", "n_head", "n_heads", "heads", "num_key_value_heads", "num_kv_heads", "n_kv_head", "n_kv_heads",
    "n_local_heads", "n_local_kv_heads", "nheads", "num_q_heads", "n_q_heads", "q_heads", "kv_heads", "nh", "nk", "nkv",
    "hidden_size", "embed_dim", "n_embd", "d_model", "dim", "width", "inner_dim", "all_head_size", "split_size",
}  # fmt: skip


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

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self.last: nn.Module | None = None  # column layer
        self.plain: torch.Tensor | None = None
        self.narrowed: torch.Tensor | None = None  # what stands for it in a module that holds the heads
        self.whole: DTensor | None = None

    def take(self, x: torch.Tensor) -> None:
        self.plain, self.whole = x, DTensor.from_local(x, self.mesh, [Shard(1)]).redistribute(placements=[Replicate()])

    def __call__(self, layer, inputs):
        """Before a column layer."""
        if inputs[0] is not self.plain and inputs[0] is not self.narrowed:
            self.take(inputs[0])
        whole = self.whole
        if layer is self.last:
            self.plain = self.narrowed = self.whole = None
        return (whole, *inputs[1:])

    def narrow(self, _attention, args, kwargs):
        """Before a module that holds the heads: it may read sizes from its input, so it sees one as wide as its own heads."""
        x = args[0] if args else next(iter(kwargs.values()))
        self.take(x)
        self.narrowed = narrowed = self.whole.to_local().detach()[..., : x.shape[-1] // self.mesh.size()]
        return tuple(narrowed if a is x else a for a in args), {k: narrowed if a is x else a for k, a in kwargs.items()}


def split_sequence(mesh: DeviceMesh, _block, inputs):
    """Before the first layer: each rank goes on with its part of the sequence."""
    if inputs[0].shape[1] % mesh.size():
        raise ValueError(f"a sequence of {inputs[0].shape[1]} can't be shared out evenly over {mesh.size()} ranks; pad it")
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
        shared = SharedInput(mesh)
        for name in columns:
            styles[name] = ColwiseParallel()
            shared.last = layer = block.get_submodule(name)
            layer.register_forward_pre_hook(shared)
        styles |= dict.fromkeys(rows, RowwiseParallel(output_layouts=Shard(1)))
        if columns[0] in ATTENTION:
            holder = block.get_submodule(ATTENTION[columns[0]])
            for size in vars(holder).keys() & LOCAL_SIZES:
                setattr(holder, size, getattr(holder, size) // mesh.size())
            holder.register_forward_pre_hook(shared.narrow, with_kwargs=True)
    for name, module in block.named_modules():
        if name not in styles and any(True for _ in module.parameters(recurse=False)):
            styles[name] = SequenceParallel(use_local_output=True)  # norms
    parallelize_module(block, mesh, styles)
    for name, style in styles.items():
        for parameter in block.get_submodule(name).parameters() if isinstance(style, SequenceParallel) else ():
            if parameter.requires_grad:  # each rank has the gradient of its part of the sequence: summed here, once
                parameter.register_hook(lambda grad: grad.redistribute(placements=[Replicate()]))


class FirstCall:
    """Compares a cut layer with a whole copy of it when it is first called, as code that isn't made for a part of the heads may compute nonsense."""

    def __init__(self, block: nn.Module, mesh: DeviceMesh):
        self.whole, self.forward, self.mesh = copy.deepcopy(block), block.forward, mesh
        self.handle = block.register_forward_pre_hook(self, with_kwargs=True)
        block.register_load_state_dict_post_hook(self.forget)

    def forget(self, *_):
        """Weights of a checkpoint are others than the copy's."""
        self.handle.remove()
        self.whole = None

    def __call__(self, block, args, kwargs):
        self.handle.remove()
        hint = f"cut over {self.mesh.size()} ranks, {type(block).__name__} doesn't compute what it computes whole: its forward must take sizes "
        hint += "from its tensors, as view(..., -1, head_size) does, or from attributes named in LOCAL_SIZES"
        whole, self.whole = self.whole.to(args[0].device, next(block.parameters()).dtype), None
        x = DTensor.from_local(args[0], self.mesh, [Shard(1)]).full_tensor()
        want, want_grad = self.run(whole, whole.forward, x, args[1:], kwargs)
        try:
            got, got_grad = self.run(block, self.forward, args[0], args[1:], kwargs)
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(hint) from error
        own = [y.chunk(self.mesh.size(), -1)[self.mesh.get_local_rank()] for y in want]
        own.append(want_grad.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()])
        for mine, right in zip([*got, got_grad], own, strict=True):
            tolerance = 5e-3 if right.dtype == torch.float32 else 5e-2
            if mine.shape != right.shape or (mine - right).norm() > tolerance * right.norm():
                raise RuntimeError(hint)

    def run(self, block, forward, x, args, kwargs):
        """What the row layers read, and the gradient of it all by the layer's input; without dropout."""
        read: list[torch.Tensor] = []
        rows = [block.get_submodule(name) for _, names in PAIRS for name in names]
        handles = [row.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]), prepend=True) for row in rows]
        training = {module: module.training for module in block.modules()}
        block.eval()
        args, kwargs = copy.deepcopy((args, kwargs))  # a cache among them would fill
        apart = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)  # from any recomputation around this
        with torch.enable_grad(), apart:
            x = x.detach().requires_grad_()
            forward(x, *args, **kwargs)
            (grad,) = torch.autograd.grad(sum(y.float().square().sum() for y in read), x)
        for module, mode in training.items():
            module.training = mode
        for handle in handles:
            handle.remove()
        return [y.detach() for y in read], grad
