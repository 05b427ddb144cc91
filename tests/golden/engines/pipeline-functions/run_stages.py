"""Runs a rank's stages by a schedule of torch.distributed.pipelining: what stands in the place of forward and backward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Pipeline:
    """A rank's part in the pipeline: what stands in the place of forward and backward in a training loop."""

    def __init__(self, model: nn.Module, stages: list[PipelineStage], schedule, mesh: DeviceMesh, tied: list[tuple[str, str]]):
        self.model, self.schedule, self.mesh = model, schedule, mesh
        self.device, self.is_last = stages[-1].device, stages[-1].is_last
        self.micro_batches: list = []
        self.checked = False
        for stage in stages:
            stage.submod.register_forward_pre_hook(self.choose, prepend=True, with_kwargs=True)
        held = dict(model.named_parameters())
        self.copies = [held[name] for pair in tied for name in pair if name in held]
        # pairs of ranks, one of the first and one of the last stage, that hold the same part
        self.ends = dist.new_subgroups_by_enumeration(mesh.mesh[[0, -1]].reshape(2, -1).T.tolist())[0] if tied else None

    def choose(self, _module, received, kwargs):
        """The schedule hands out numbers, so that it need not know how to split a batch."""
        return received, {"batch": self.micro_batches[int(kwargs["number"])]}

    def step(self, micro_batches: list) -> torch.Tensor:
        """Forward and backward of all micro-batches; the sum of their losses where the last stage is, elsewhere 0."""
        loss = self.run(self.schedule.step, micro_batches)
        if not self.checked and loss.isnan():
            raise RuntimeError("the loss is NaN: unless the model alone yields that, it takes more from other stages than one hidden state")
        self.checked = True
        for parameter in self.copies:  # a tied weight's gradient is the sum of both ends'
            if parameter.grad is not None:
                dist.all_reduce(local(parameter.grad), group=self.ends)
        if "replicate" in (self.mesh.mesh_dim_names or ()):
            self.average(self.mesh.get_group("replicate"))
        return loss

    def average(self, replicas: dist.ProcessGroup) -> None:
        """Mean gradients of ranks that hold the same weights; an expert may have seen tokens on some of them only."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=self.device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=replicas)
        works = []
        for parameter, seen in zip(parameters, used.tolist(), strict=True):
            if seen:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                works.append(dist.all_reduce(local(parameter.grad).div_(replicas.size()), group=replicas, async_op=True))
        for work in works:
            work.wait()

    @torch.no_grad()
    def evaluate(self, micro_batches: list) -> torch.Tensor:
        """The same without backward."""
        return self.run(self.schedule.eval, micro_batches)

    def run(self, schedule, micro_batches: list) -> torch.Tensor:
        self.micro_batches = micro_batches
        numbers = torch.arange(len(micro_batches))
        losses: list[torch.Tensor] = []
        schedule(number=numbers, target=numbers, losses=losses, return_outputs=False)
        return torch.stack([loss.detach().float() for loss in losses]).sum() if losses else torch.zeros((), device=self.device)

    def clip_gradients(self, max_norm: float) -> float:
        """Norm of the gradients of all stages before they are clipped to `max_norm` (0: only measured)."""
        twice = set(self.copies) if self.is_last else set()  # the first stage counts them
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None and p not in twice])
        square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).to(self.device).square()
        dist.all_reduce(square, group=self.mesh.get_group("pipeline"))
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, square.sqrt())
        return square.sqrt().item()
