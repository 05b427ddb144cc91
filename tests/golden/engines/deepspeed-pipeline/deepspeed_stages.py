"""A model's stages as DeepSpeed's pipeline takes them: as entries of a list of layers. Made to be read, yours to edit."""

import collections
import itertools
from collections.abc import Iterator

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from stages import Stage


class StageLayer(nn.Module):
    """A stage as an entry of DeepSpeed's list of layers: the hidden state comes from the entry before, the micro-batch from beside."""

    def __init__(self, model: nn.Module, loss_fn, stages: list[list[str]], index: int, micro_batches: collections.deque):
        super().__init__()
        self.stage = Stage(model, loss_fn, stages, index, {})
        self.is_first, self.micro_batches = index == 0, micro_batches

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        return self.stage(*(() if self.is_first else (received,)), batch=self.micro_batches.popleft())


class SharedWeight(nn.Module):
    """A weight that the first and the last stage both use, as an entry that changes nothing: by it DeepSpeed sums both ends' gradients."""

    def __init__(self, model: nn.Module, name: str):
        super().__init__()
        self.weight = model.get_parameter(name)

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        return received


class DeepSpeedPipeline:
    """DeepSpeed's engine, given micro-batches of any form: what stands in the place of forward, backward and step in a training loop."""

    def __init__(self, engine: PipelineEngine, micro_batches: collections.deque):
        self.engine, self.micro_batches = engine, micro_batches
        self.checked = False

    def step(self, micro_batches: list) -> torch.Tensor:
        """Forward, backward and the optimizer's step; the mean loss of all micro-batches of all ranks, on every rank."""
        self.micro_batches.extend(micro_batches)
        loss = self.engine.train_batch(self.nothing()).float()  # the last stage returns it in its own dtype
        if not self.checked and loss.isnan():
            raise RuntimeError("the loss is NaN: unless the model alone yields that, it takes more from other stages than one hidden state")
        self.checked = True
        return loss

    def evaluate(self, micro_batches: list) -> torch.Tensor:
        """The same without backward and step."""
        self.micro_batches.extend(micro_batches)
        return self.engine.eval_batch(self.nothing()).float().reshape(())  # all stages but the last are given a list of one

    def nothing(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and labels as DeepSpeed asks for them, on the first and the last stage alone; every stage has its batches already."""
        return itertools.repeat((torch.empty(0), torch.empty(0)))
