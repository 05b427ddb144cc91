"""Cuts the products of a layer over the ranks of a tensor group, and compares a cut layer with a whole one."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module

# inside a layer: weights cut by output columns share an input; what is cut by input rows sums its outputs over the ranks
PAIRS = [
    (["attn.c_attn"], ["attn.c_proj"]),
    (["mlp.c_fc"], ["mlp.c_proj"]),
]
FUSED = {"attn.c_attn": (1, 1, 1)}  # products side by side in one weight: their shares of its outputs
ATTENTION = {"attn.c_attn": "attn"}  # by their first column: modules that hold the heads
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


class SplitConv1D(ParallelStyle):
    """transformers' Conv1D, a linear layer with its weight transposed: dimension 1 of it makes columns, dimension 0 rows."""

    def __init__(self, dim: int, output: Placement):
        self.dim, self.output = dim, output

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, mesh, self.cut, self.wrap, self.unwrap)

    def cut(self, _name, module, mesh):
        places = {"weight": Shard(self.dim), "bias": Shard(0) if self.dim else Replicate()}
        for name, place in places.items():
            whole = getattr(module, name)
            setattr(module, name, nn.Parameter(distribute_tensor(whole.detach(), mesh, [place]), whole.requires_grad))

    def wrap(self, _module, inputs, mesh):
        return tuple(x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Shard(-1)]) for x in inputs)

    def unwrap(self, _module, output, _mesh):
        return output.redistribute(placements=[self.output]).to_local()


class Fused(nn.Module):
    """Products side by side in one weight, cut one by one so that heads stay whole; in checkpoints they are `parts.0`, `parts.1`, ..."""

    def __init__(self, layer, shares: tuple[int, ...]):
        super().__init__()
        weight, bias = layer.weight.T, layer.bias
        sizes = [len(weight) * share // sum(shares) for share in shares]
        self.parts = nn.ModuleList(nn.utils.skip_init(nn.Linear, weight.shape[1], size, bias=bias is not None) for size in sizes)
        for i, part in enumerate(self.parts):
            part.weight = nn.Parameter(weight.detach().split(sizes)[i].contiguous(), weight.requires_grad)
            if bias is not None:
                part.bias = nn.Parameter(bias.detach().split(sizes)[i].clone(), bias.requires_grad)

    def forward(self, x):
        return torch.cat([part(x) for part in self.parts], dim=-1)


class SharedInput:
    """One input for all column layers of a pair: their input gradients are summed first, then reduced once."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self.last: nn.Module | None = None  # column layer
        self.plain: torch.Tensor | None = None
        self.narrowed: torch.Tensor | None = None  # what stands for it in a module that holds the heads
        self.whole: DTensor | None = None

    def take(self, x: torch.Tensor) -> None:
        self.plain, self.whole = x, DTensor.from_local(x, self.mesh, [Replicate()])

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


def split_layers(block: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a layer's products over the ranks of a tensor group."""
    styles: dict[str, ParallelStyle] = {}
    for columns, rows in PAIRS:
        shared = SharedInput(mesh)
        for name in columns:
            if name in FUSED:
                block.set_submodule(name, Fused(block.get_submodule(name), FUSED[name]))
                styles |= {f"{name}.parts.{i}": ColwiseParallel() for i in range(len(FUSED[name]))}
            else:
                styles[name] = SplitConv1D(1, Shard(-1))
            shared.last = layer = block.get_submodule(name)
            layer.register_forward_pre_hook(shared)
        styles |= dict.fromkeys(rows, SplitConv1D(0, Replicate()))
        if columns[0] in ATTENTION:
            holder = block.get_submodule(ATTENTION[columns[0]])
            for size in vars(holder).keys() & LOCAL_SIZES:
                setattr(holder, size, getattr(holder, size) // mesh.size())
            holder.register_forward_pre_hook(shared.narrow, with_kwargs=True)
    for name, module in block.named_modules():
        if name not in styles and any(True for _ in module.parameters(recurse=False)):
            styles[name] = Whole()  # norms
    parallelize_module(block, mesh, styles)


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
        x = args[0]
        want, want_grad = self.run(whole, whole.forward, x, args[1:], kwargs)
        try:
            got, got_grad = self.run(block, self.forward, args[0], args[1:], kwargs)
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(hint) from error
        own = [y.chunk(self.mesh.size(), -1)[self.mesh.get_local_rank()] for y in want]
        own.append(want_grad)
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
