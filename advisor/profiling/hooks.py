"""Connects the watcher to torch: module calls, backward passes, optimizers, what is saved for backward, fused calls."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_unflatten

from advisor.profiling import recurrent, values
from advisor.profiling.calls import signature
from advisor.profiling.recorder import Recorder
from advisor.profiling.watcher import Watcher
from advisor.profiling.world import World

_SPARSE_SHARE = 0.75  # of blocks that a mask leaves


def install(watcher: Watcher, *, replays: bool) -> None:
    """Patch torch for this process.

    Args:
        watcher: told of everything.
        replays: later micro-batches of equal shape are answered from the first (nothing is computed anyway).
    """
    watcher.replays = replays
    _watch_modules(watcher)
    _watch_backward(watcher)
    _watch_updates(watcher)


def _watch_modules(watcher: Watcher) -> None:
    module_class: Any = torch.nn.Module
    plain_call: Callable[..., Any] = torch.nn.Module.__call__

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        watcher.enter(self, args, kwargs)
        result = None
        try:
            result = _replay(watcher, self, args, kwargs) if watcher.replays and watcher.micro_batch and len(watcher.stack) == 1 else None
            if result is None:
                result = plain_call(self, *args, **kwargs)
        finally:
            watcher.leave(self, result)
        return result

    module_class.__call__ = call


def _replay(watcher: Watcher, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Outputs like those of the first call, with a graph of one node; None where that would not do."""
    first = watcher.roots.get(id(module))
    if first is None or watcher.backward_depth or not torch.is_grad_enabled() or first.result is None:
        return None
    if len([r for r in watcher.roots.values() if r.has_grad]) != 1:
        return None
    tensors = values.tensors_in(args, [])
    if signature(values.tensors_in(kwargs.values(), tensors)) != first.signature:
        return None
    leaves, spec = tree_flatten(first.result)
    if not all(leaf is None or isinstance(leaf, (torch.Tensor, int, float, str, bool)) for leaf in leaves):
        return None
    return tree_unflatten([_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    fresh = torch.empty_like(tensor.detach())
    return fresh.requires_grad_().clone() if tensor.requires_grad else fresh


def _watch_backward(watcher: Watcher) -> None:
    autograd: Any = torch.autograd
    plain_backward: Callable[..., None] = torch.autograd.backward
    plain_grad: Callable[..., Any] = torch.autograd.grad

    @functools.wraps(plain_backward)
    def backward(*args: Any, **kwargs: Any) -> None:
        with watcher.backward():
            plain_backward(*args, **kwargs)

    @functools.wraps(plain_grad)
    def grad(*args: Any, **kwargs: Any) -> Any:
        watcher.replays = False  # a replayed output is not connected with what gradients are asked for
        if kwargs.get("create_graph") or watcher.stack:
            return plain_grad(*args, **kwargs)
        with watcher.backward():
            return plain_grad(*args, **kwargs)

    autograd.backward, autograd.grad = backward, grad
    plain_apply: Callable[..., Any] = torch.autograd.Function.__dict__["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith(("torch.", "advisor.")) and cls.__name__ not in watcher.custom_functions:
            watcher.custom_functions.append(cls.__name__)
        return plain_apply(cls, *args, **kwargs)

    autograd.Function.apply = classmethod(apply)


def _watch_updates(watcher: Watcher) -> None:
    optimizer_class: Any = torch.optim.Optimizer
    plain_init: Callable[..., None] = torch.optim.Optimizer.__init__

    @functools.wraps(plain_init)
    def init(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        if not any(o is self for o in watcher.optimizers):
            watcher.optimizers.append(self)

    optimizer_class.__init__ = init
    register_optimizer_step_pre_hook(lambda optimizer, *_: watcher.before_update(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: watcher.after_update(optimizer))
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"):
        for place in (torch.nn.utils, torch.nn.utils.clip_grad):
            plain = getattr(place, name, None)
            if plain is not None:
                setattr(place, name, _update_part(watcher, plain, "clips_gradients"))
    scaler: Any = torch.amp.GradScaler
    plain_scale = scaler.scale

    def scale(self: Any, outputs: Any) -> Any:
        watcher.uses_grad_scaler = watcher.uses_grad_scaler or bool(self._enabled)
        return plain_scale(self, outputs)

    scaler.scale = scale
    scaler.unscale_ = _update_part(watcher, scaler.unscale_)
    scaler.update = _update_part(watcher, scaler.update)
    autocast: Any = torch.autocast
    plain_enter = autocast.__enter__

    def enter(self: Any) -> Any:
        if self._enabled:
            watcher.autocast_dtype = self.fast_dtype
        return plain_enter(self)

    autocast.__enter__ = enter


def mark_updates(name: str) -> None:
    """Put the clipping of gradients into a profiler range of this name."""
    for place in (torch.nn.utils, torch.nn.utils.clip_grad):
        for function in ("clip_grad_norm_", "clip_grad_value_"):
            setattr(place, function, torch.profiler.record_function(name)(getattr(place, function)))


def _update_part(watcher: Watcher, plain: Callable[..., Any], fact: str = "") -> Callable[..., Any]:
    @functools.wraps(plain)
    def part(*args: Any, **kwargs: Any) -> Any:
        if fact:
            setattr(watcher, fact, True)
        with watcher.updating():
            return plain(*args, **kwargs)

    return part


def observe_saved(recorder: Recorder) -> Any:
    """Context in which the recorder is told of every tensor saved for backward, also inside checkpoint's recomputation.

    Checkpoint pushes hooks of its own: those of the first forward are left alone (nothing is kept there), those of the
    recomputation report to the recorder, so that the bytes a block would keep without checkpointing are known.
    """
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    plain_init = hooks.__init__

    def init(self: Any, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        if type(self).__name__ == "_checkpoint_hook" or getattr(pack, "_is_ours", False):
            plain_init(self, pack, unpack)
            return

        def observed(tensor: torch.Tensor) -> Any:
            recorder.saved(tensor)
            return pack(tensor)

        plain_init(self, observed, unpack)

    hooks.__init__ = init

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        recorder.saved(tensor)
        return tensor

    keep._is_ours = True  # type: ignore[attr-defined]
    _step_aside_for_transforms(recorder, keep)
    return hooks(keep, lambda tensor: tensor)


def _step_aside_for_transforms(recorder: Recorder, keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """`torch.func.grad` and its like refuse hooks on saved tensors: ours are off inside, and the recorder estimates what is kept."""
    graph: Any = torch.autograd.graph
    autograd: Any = torch._C._autograd
    plain: Callable[..., Any] = graph.disable_saved_tensors_hooks

    @contextlib.contextmanager
    def disable_saved_tensors_hooks(message: str) -> Iterator[None]:
        top = autograd._top_saved_tensors_default_hooks(False)
        if top is None or top[0] is not keep:
            with plain(message):
                yield
            return
        autograd._pop_saved_tensors_default_hooks()
        outer, recorder.estimates_saved, recorder.watcher.without_saved = recorder.estimates_saved, True, True
        try:
            with plain(message):
                yield
        finally:
            recorder.estimates_saved = outer
            autograd._push_saved_tensors_default_hooks(*top)

    graph.disable_saved_tensors_hooks = disable_saved_tensors_hooks
    transforms: Any = importlib.import_module("torch._functorch.eager_transforms")
    plain_grad: Callable[..., Any] = transforms._autograd_grad

    def grad(*args: Any, **kwargs: Any) -> Any:
        watcher = recorder.watcher
        outer, watcher.is_transforming = watcher.is_transforming, True
        try:
            with watcher.backward():
                grads = plain_grad(*args, **kwargs)
        finally:
            watcher.is_transforming = outer
        watcher.with_grad.update(key for key, p in watcher.parameters.items() if p.requires_grad)
        return grads

    transforms._autograd_grad = grad
    stateless: Any = importlib.import_module("torch.nn.utils.stateless")
    plain_call: Callable[..., Any] = stateless._functional_call

    def functional_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder.watcher.note_parameters(module)  # its own: for the call they make way for those that were given
        return plain_call(module, *args, **kwargs)

    stateless._functional_call = functional_call


def fold_calls(recorder: Recorder, *, drops_dropout: bool) -> None:
    """Attention and recurrent layers as one row each, whatever the CPU makes of them.

    Args:
        recorder: gets the rows.
        drops_dropout: attention runs without its dropout, so that the fused operator is taken as on a GPU.
    """
    functional: Any = torch.nn.functional
    attention: Callable[..., Any] = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(  # noqa: PLR0917  torch's own signature
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **kwargs: Any
    ) -> Any:
        if drops_dropout and dropout_p < 1.0:
            dropout_p = 0.0
        with recorder.folded("aten._scaled_dot_product_attention_math", [query, key, value], causal=is_causal):
            return attention(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)

    functional.scaled_dot_product_attention = scaled_dot_product_attention
    _fold_flex_attention(recorder.world, scaled_dot_product_attention)
    recurrent.fold(recorder)


def _fold_flex_attention(world: World, attention: Callable[..., Any]) -> None:
    """`flex_attention` as attention with the same sides; a mask that leaves out much of the square makes it causal, which counts half."""
    module: Any = importlib.import_module("torch.nn.attention.flex_attention")

    def flex_attention(  # noqa: PLR0917  torch's own signature
        query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None, enable_gqa: bool = False,
        return_lse: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        del score_mod
        out = attention(query, key, value, is_causal=_is_sparse(world, block_mask), scale=scale, enable_gqa=enable_gqa)
        if return_lse or options.get("return_aux") is not None:
            return out, query.float().logsumexp(-1)
        return out

    module.flex_attention = flex_attention


def _is_sparse(world: World, block_mask: Any) -> bool:
    if block_mask is None:
        return False
    partly, fully = block_mask.kv_num_blocks, block_mask.full_kv_num_blocks
    num_blocks = sum(int(world.real_values(t).numpy().sum()) for t in (partly, fully) if t is not None)
    return bool(num_blocks < _SPARSE_SHARE * partly.numel() * block_mask.kv_indices.shape[-1])
