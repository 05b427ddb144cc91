"""Modules and parameters of the model that was trained, under the names that its users see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from advisor.profiling.rows import dtype_name
from advisor.profiling.watcher import Watcher

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule")


@dataclass(slots=True)
class Model:
    """The trained model (or models, side by side), with the names of its parts."""

    class_name: str
    roots: list[tuple[str, torch.nn.Module]]
    paths: dict[int, str] = field(default_factory=dict)  # id of a module -> path
    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    names: dict[int, list[str]] = field(default_factory=dict)  # id of a parameter -> its names
    parameters: dict[int, torch.Tensor] = field(default_factory=dict)
    trainable: set[int] = field(default_factory=set)  # ids of parameters, those included that are only frozen for part of a step
    owners: dict[int, str] = field(default_factory=dict)  # id of a parameter -> path of its module
    others: dict[str, int] = field(default_factory=dict)  # models that are never trained: class -> parameters
    other_paths: dict[int, str] = field(default_factory=dict)


def find_model(watcher: Watcher) -> Model:
    """Which of the modules that ran is the model: those that hold parameters which are updated, as one tree."""
    updated = {id(p) for o in watcher.stepped for g in o.param_groups for p in g["params"]} or set(watcher.with_grad)
    called = _outermost([_unwrapped(r.module) for r in watcher.roots.values()])
    trained = [m for m in called if updated & {id(p) for p in m.parameters()}]
    has_copies = not trained and bool(watcher.stepped)  # the optimizer updates copies of the weights, which the script writes back
    if has_copies:
        trained = [m for m in called if watcher.with_grad & {id(p) for p in m.parameters()}]
    if len(trained) > 1:
        trained = _common_parent(trained, watcher.modules_alive()) or trained
    class_names = [type(m).__name__ for m in trained]
    model = Model(class_name=" + ".join(class_names), roots=[])
    for i, module in enumerate(trained):
        prefix = (
            ""
            if len(trained) == 1
            else class_names[i] + (str(class_names[:i].count(class_names[i]) + 1) if class_names.count(class_names[i]) > 1 else "")
        )
        model.roots.append((prefix, module))
        _name_parts(model, prefix, module)
    own = [] if has_copies and trained else [p for o in watcher.stepped for g in o.param_groups for p in g["params"]]
    loose = [p for p in own if id(p) not in model.names]
    loose += [p for p in watcher.leaves if id(p) not in model.names and not any(p is q for q in loose)]
    for i, p in enumerate(loose):
        model.names[id(p)], model.parameters[id(p)], model.owners[id(p)] = [f"parameter_{i}"], p, ""
    if "" not in model.modules:
        model.class_name = model.class_name or "(no module)"
    model.trainable = {key for key, p in model.parameters.items() if p.requires_grad or key in watcher.with_grad}
    _find_others(model, watcher.modules_alive())
    return model


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    while type(module).__name__ in _WRAPPERS:
        inner = getattr(module, "module", None) or getattr(module, "_orig_mod", None)
        if inner is None:
            break
        module = inner
    return module


def _outermost(modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
    unique = list({id(m): m for m in modules}.values())
    inner = {id(c) for m in unique for c in m.modules() if c is not m}
    return [m for m in unique if id(m) not in inner]


def _common_parent(modules: list[torch.nn.Module], alive: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The smallest module that holds all of these, when its parts were called one by one."""
    wanted = {id(m) for m in modules}
    holders = [(sum(1 for _ in m.modules()), m) for m in alive if id(m) not in wanted and type(m).__name__ not in _WRAPPERS]
    fitting = [(size, m) for size, m in holders if wanted <= {id(c) for c in m.modules()}]
    return [min(fitting, key=lambda pair: pair[0])[1]] if fitting else []


def _name_parts(model: Model, prefix: str, root: torch.nn.Module) -> None:
    for name, module in root.named_modules():
        path = ".".join(p for p in (prefix, name) if p)
        model.paths.setdefault(id(module), path)
        model.modules.setdefault(path, module)
    for name, p in root.named_parameters(remove_duplicate=False):
        model.names.setdefault(id(p), []).append(".".join(q for q in (prefix, name) if q))
        model.parameters[id(p)] = p
    for module in root.modules():
        for own in module._parameters.values():
            if own is not None:
                model.owners.setdefault(id(own), model.paths[id(module)])


def _find_others(model: Model, alive: list[torch.nn.Module]) -> None:
    """Models in memory that share no parameter with the trained one: copies, teachers, critics that stay as they are."""
    for module in _outermost([m for m in alive if id(m) not in model.paths]):
        ids = {id(p): p.numel() for p in module.parameters()}
        if not ids or set(ids) & set(model.parameters) or any(id(c) in model.paths for c in module.modules()):
            continue
        name = type(module).__name__
        model.others[name] = model.others.get(name, 0) + sum(ids.values())
        for path, part in module.named_modules():
            model.other_paths[id(part)] = ".".join(p for p in (f"({name})", path) if p)


def module_rows(model: Model, watcher: Watcher) -> list[dict[str, Any]]:
    """Rows of the modules frame: modules that own parameters, were called, or both."""
    rows: list[dict[str, Any]] = []
    owned: dict[str, dict[int, torch.Tensor]] = {}
    for key, path in model.owners.items():
        owned.setdefault(path, {})[key] = model.parameters[key]
    for path, module in model.modules.items():
        call = watcher.calls.get(id(module))
        own = owned.get(path, {})
        if call is None and not own and path:
            continue
        below = {id(p): p for p in module.parameters()}
        shape, layout = _weight(module)
        rows.append({
            "module": path, "class_name": type(module).__name__, "order": call.order if call else -1, "num_calls": call.num_calls if call else 0,
            "num_params": sum(p.numel() for p in own.values()), "total_params": sum(p.numel() for p in below.values()),
            "input_shape": call.input_shape if call else [], "output_shape": call.output_shape if call else [],
            "input_group": call.input_group if call else -1, "weight_shape": shape, "weight_layout": layout,
        })  # fmt: skip
    if "" not in model.modules:
        rows.insert(0, {
            "module": "", "class_name": model.class_name, "order": -1, "num_calls": 0, "num_params": sum(p.numel() for p in owned.get("", {}).values()),
            "total_params": sum(p.numel() for p in model.parameters.values()), "input_shape": [], "output_shape": [], "input_group": -1,
            "weight_shape": [], "weight_layout": "",
        })  # fmt: skip
    return rows


def _weight(module: torch.nn.Module) -> tuple[list[int], str]:
    own = [p for p in module._parameters.values() if p is not None]
    matrices = [p for p in own if p.dim() == 2]
    weight = module._parameters.get("weight")
    if weight is None and len(matrices) == 1:
        weight = matrices[0]
    if weight is None:
        return [], ""
    shape = list(weight.shape)
    if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        return shape, "embedding"
    if isinstance(module, torch.nn.modules.conv._ConvNd):
        return shape, "convolution"
    if type(module).__name__ == "Conv1D" and len(shape) == 2:
        return shape, "in_out"
    features = getattr(module, "out_features", None)
    if isinstance(module, torch.nn.Linear) or (len(shape) == 2 and features is not None and features == shape[0]):
        return shape, "out_in"
    return shape, ""


def parameter_rows(model: Model, watcher: Watcher) -> list[dict[str, Any]]:
    """Rows of the parameters frame, one per unique parameter."""
    return [
        {
            "name": names[0], "aliases": names[1:], "module": model.owners.get(key, ""), "shape": list(model.parameters[key].shape),
            "dtype": dtype_name(model.parameters[key].dtype), "num_elements": model.parameters[key].numel(),
            "requires_grad": key in model.trainable, "got_grad": key in watcher.with_grad,
        }
        for key, names in model.names.items()
    ]  # fmt: skip
