"""What about a script can spoil parallel training: facts with their evidence, no advice."""

from __future__ import annotations

import torch

from advisor.profiling.headline import Step, batch_and_sequence
from advisor.profiling.recorder import Recorder
from advisor.profiling.source import Source
from advisor.profiling.storages import StorageMap

_EAGER_BYTES = 8 << 30
_NAMES_SHOWN = 8


def find(source: Source, step: Step, recorder: Recorder, asked_workers: list[int]) -> list[dict[str, str]]:
    """Hazards of a step, each once: `{"id": ..., "evidence": ...}`."""
    found: dict[str, str] = {**source.facts, **{k: v for k, v in step.watcher.facts.items() if k != "gathers-outputs"}}
    _of_modules(step, found)
    _of_parameters(step, found)
    _of_step(step, recorder, found)
    _of_devices(step, found)
    if asked_workers and max(asked_workers) > 0:
        found["data-loader-workers"] = f"the loader asks for {max(asked_workers)} workers per process"
    return [{"id": name, "evidence": evidence} for name, evidence in found.items()]


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")


def _of_modules(step: Step, found: dict[str, str]) -> None:
    model, calls = step.model, step.watcher.calls
    norms = [(path, m) for path, m in model.modules.items() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    if norms:
        elements = sum(b.numel() for _, m in norms for b in m.buffers())
        synced = all(isinstance(m, torch.nn.SyncBatchNorm) for _, m in norms)
        if not synced:
            found["batch-norm"] = f"{len(norms)} batch norms with {elements:,} buffer elements take their statistics per process"
    repeated: dict[str, int] = {}
    for path, module in model.modules.items():
        call = calls.get(id(module))
        is_inside = any(path.startswith(f"{above}.") or not above for above in repeated)
        if call is not None and call.num_calls > 1 and not is_inside and any(True for _ in module.parameters()):
            repeated[path] = call.num_calls
    if repeated:
        roots = {path for path, _ in model.roots}
        counts = [f"{path or model.class_name} is called {n} times" for path, n in repeated.items()]
        found["shared-module-called-n-times"] = _some(counts) + (" in one step" if roots & set(repeated) else " in one forward pass")


def _of_parameters(step: Step, found: dict[str, str]) -> None:
    model, watcher = step.model, step.watcher
    ties = [names for names in model.names.values() if len(names) > 1]
    if ties:
        found["tied-weights"] = _some([" = ".join(names) for names in ties])
    unused = [key for key in model.parameters if key in model.trainable and key not in watcher.with_grad]
    if unused:
        elements = sum(model.parameters[key].numel() for key in unused)
        names = [model.names[key][0] for key in unused]
        found["unused-parameters"] = f"{elements:,} elements got no gradient in the step: {_some(names)}"
    sparse = [names[0] for key, names in model.names.items() if key in watcher.sparse]
    if sparse:
        found["sparse-gradients"] = f"{len(sparse)} parameters have sparse gradients: {_some(sparse)}"
    frozen = sum(p.numel() for key, p in model.parameters.items() if key not in model.trainable)
    if frozen:
        total = sum(p.numel() for p in model.parameters.values())
        found["frozen-parameters"] = f"{frozen:,} of {total:,} parameters are frozen"
    if model.others:
        trained = {sum(p.numel() for p in m.parameters()) for _, m in model.roots}
        for name, size in model.others.items():
            if size in trained:
                found["ema-copy"] = f"a copy of {name} with {size:,} parameters is kept and never trained by the optimizer"
    if step.world.host_model_bytes >= _EAGER_BYTES:
        found["model-built-eagerly"] = (
            f"every process builds the model on the host first: {step.world.host_model_bytes / 2**30:.3g} GiB of host memory each, before it is moved or cast"
        )


def _of_step(step: Step, recorder: Recorder, found: dict[str, str]) -> None:
    watcher = step.watcher
    if watcher.host_syncs:
        found["host-sync"] = "the host reads a value inside the step at " + _some(
            [f"{w} ({n} times)" if n > 1 else w for w, n in watcher.host_syncs.items()]
        )
    if watcher.custom_functions:
        found["custom-autograd-function"] = _some(watcher.custom_functions) + ": backward and saved tensors are written by hand"
    if len(watcher.stepped) > 1:
        found["several-optimizers"] = f"{len(watcher.stepped)} optimizers step in turn"
    if not watcher.stepped:
        found["hand-written-optimizer"] = "parameters are updated by hand, no torch optimizer steps"
    call = step.first_call()
    if call is None:
        return
    second = watcher.second_inputs
    shapes = [list(t.shape) for t in second] if second is not None else call.input_shapes
    dynamic = dict(recorder.dynamic_shapes)
    if shapes != call.input_shapes:
        found["data-dependent-shapes"] = f"inputs have shapes {call.input_shapes} in one step and {shapes} in the next"
    elif dynamic:
        found["data-dependent-shapes"] = "shapes depend on values: " + _some(
            [f"{op.removeprefix('aten.')} at {where}" for op, where in dynamic.items()]
        )
    if second is not None:
        outputs: StorageMap[bool] = StorageMap()
        for t in call.outputs:
            outputs.put(t, True)
        carried = [t for t in second if outputs.get(t)]
        if carried:
            found["recurrent-state-carried"] = (
                f"{len(carried)} outputs of a step are inputs of the next: {[list(t.shape) for t in carried]}"
            )
    batch, _ = batch_and_sequence(step, call)
    square = [r for r in step.rows if r.operator == "aten._log_softmax" and r.phase == "forward" and r.input_shapes[0] == [batch, batch]]
    if "gathers-outputs" in watcher.facts or (square and batch > 1):
        where = watcher.facts.get("gathers-outputs", f"similarities of shape [{batch}, {batch}] are scored")
        found["contrastive-global-batch"] = f"the loss compares samples of a batch with each other ({where})"


def _of_devices(step: Step, found: dict[str, str]) -> None:
    devices = sorted({str(step.world.device_of(p)) for p in step.model.parameters.values()} - {"cpu"})
    copies = sum(1 for r in step.rows if r.copy_from.startswith("cuda") and r.copy_to.startswith("cuda") and r.copy_from != r.copy_to)
    if len(devices) > 1:
        found["two-device-split"] = f"parameters lie on {', '.join(devices)}; {copies} copies between them in a step"
