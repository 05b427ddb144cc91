"""The small GPT-2, but in its second step a gradient of the first layers overflows, as fp16 gradients may."""

import itertools

import gpt2
import torch

OVERFLOWING = 4  # number of the backward pass; a step has four


def build_model():
    model, passes = gpt2.build_model(), itertools.count()
    model.wpe.weight.register_hook(lambda grad: torch.full_like(grad, torch.inf) if next(passes) == OVERFLOWING else grad)
    return model


def make_batch(batch_size=4):
    return gpt2.make_batch(batch_size)


def loss_fn(model, batch):
    return gpt2.loss_fn(model, batch)


def build_optimizer(model):
    return gpt2.build_optimizer(model)
