"""Cross-entropies of logits that are cut by vocabulary over a tensor group: no rank holds them whole, three numbers a position are summed instead."""

import contextlib
import functools
import inspect
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

NUM_COMPARED = 64  # positions of the first loss that are computed whole too
whole_cross_entropy = nn.functional.cross_entropy
SIGNATURE = inspect.signature(whole_cross_entropy)
parts_of_losses = contextlib.ExitStack()


def keep_logits_cut(head: nn.Module) -> None:
    """What a head puts out stays cut while it trains, and is gathered in evaluation, where other code may read it."""
    head.register_forward_hook(lambda head, _inputs, logits: logits if head.training else logits.full_tensor())
    nn.functional.cross_entropy = cross_entropy_of_parts()
    parts_of_losses.enter_context(loss_parallel())  # for good: backward passes need it as well


def cross_entropy_of_parts():
    """`nn.functional.cross_entropy` that takes cut logits, once a first loss has come out as of whole ones."""
    right: bool | None = None

    @functools.wraps(whole_cross_entropy)
    def cross_entropy(*args, **kwargs):
        nonlocal right
        given = SIGNATURE.bind(*args, **kwargs).arguments
        logits = given["input"]
        if not isinstance(logits, DTensor):
            return whole_cross_entropy(**given)
        if right is None and can_stay_cut(given):
            right = is_right(logits, given["target"], given.get("ignore_index", -100))
            if not right:
                warnings.warn("a cross-entropy of cut logits differs from that of whole ones: they are gathered from now on", stacklevel=2)
        if right and can_stay_cut(given):
            return whole_cross_entropy(**given).to_local()
        return whole_cross_entropy(**given | {"input": logits.full_tensor()})

    return cross_entropy


def can_stay_cut(given: dict[str, Any]) -> bool:
    """A loss of class numbers, without class weights or smoothing, and the classes are what is cut."""
    logits = given["input"]
    (place,) = logits.placements
    plain = given.get("weight") is None and not given.get("label_smoothing") and not given["target"].is_floating_point()
    return plain and logits.ndim > 1 and place.is_shard() and place.dim % logits.ndim == 1


def is_right(logits: DTensor, target: torch.Tensor, ignore_index: int) -> bool:
    """Whether a few positions have the loss and the gradient that they have whole."""
    few = NUM_COMPARED if logits.ndim == 2 else 1
    with torch.enable_grad():
        part = logits.detach()[:few].requires_grad_()
        whole = gathered(part.detach()).requires_grad_()
        losses = [whole_cross_entropy(x, target[:few], ignore_index=ignore_index, reduction="sum") for x in (part, whole)]
        grads = [torch.autograd.grad(loss, x)[0] for loss, x in zip(losses, (part, whole), strict=True)]
    tolerance = 1e-3 if whole.dtype == torch.float32 else 2e-2
    return all((gathered(mine) - right).norm() <= tolerance * right.norm() for mine, right in (losses, grads))


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be cut."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
