"""Import lines of a generated Python file, from the names that it uses: none is missing, none is idle."""

from __future__ import annotations

import ast
from collections.abc import Iterable

_LINE_LENGTH = 140

#: Imports by the name they bind; "module", "module as name" or "module:name".
_STANDARD = {
    **{name: name for name in (
        "argparse", "collections", "contextlib", "copy", "datetime", "functools", "gc", "inspect", "io", "itertools", "json", "math", "os", "random", "re",
        "resource", "runpy", "shlex", "shutil", "statistics", "sys", "threading", "time", "types", "warnings",
    )},
    "importlib": "importlib.util", "Mapping": "collections.abc:Mapping", "Path": "pathlib:Path", "Callable": "collections.abc:Callable",
    "Iterator": "collections.abc:Iterator", "Any": "typing:Any", "Future": "concurrent.futures:Future",
}  # fmt: skip
_THIRD = {
    "Accelerator": "accelerate:Accelerator", "DistributedDataParallelKwargs": "accelerate:DistributedDataParallelKwargs",
    **{name: f"transformers:{name}" for name in ("PreTrainedModel", "PrinterCallback", "Trainer", "TrainerCallback", "TrainingArguments")},
    "pl": "lightning.pytorch as pl",
    **{name: f"colossalai.booster.plugin:{name}" for name in ("GeminiPlugin", "HybridParallelPlugin", "LowLevelZeroPlugin", "TorchDDPPlugin")},
    **{name: f"lightning.pytorch.strategies:{name}" for name in ("DDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")},
    **{name: f"deepspeed.pipe:{name}" for name in ("LayerSpec", "PipelineModule", "TiedLayerSpec")},
    "PipelineEngine": "deepspeed.runtime.pipe.engine:PipelineEngine",
    "deepspeed": "deepspeed", "numpy": "numpy", "torch": "torch", "dist": "torch.distributed as dist", "nn": "torch:nn",
    "DataLoader": "torch.utils.data:DataLoader", "DistributedSampler": "torch.utils.data:DistributedSampler",
    "IterableDataset": "torch.utils.data:IterableDataset", "DTensor": "torch.distributed.tensor:DTensor",
    "LRScheduler": "torch.optim.lr_scheduler:LRScheduler", "DistributedDataParallel": "torch.nn.parallel:DistributedDataParallel",
    "ZeroRedundancyOptimizer": "torch.distributed.optim:ZeroRedundancyOptimizer",
    "init_device_mesh": "torch.distributed.device_mesh:init_device_mesh", "fully_shard": "torch.distributed.fsdp:fully_shard",
    "MixedPrecisionPolicy": "torch.distributed.fsdp:MixedPrecisionPolicy", "CPUOffloadPolicy": "torch.distributed.fsdp:CPUOffloadPolicy",
    **{name: f"torch.distributed.fsdp:{name}" for name in (
        "BackwardPrefetch", "CPUOffload", "FullyShardedDataParallel", "MixedPrecision", "ShardingStrategy",
    )},
    "ModuleWrapPolicy": "torch.distributed.fsdp.wrap:ModuleWrapPolicy",
    "size_based_auto_wrap_policy": "torch.distributed.fsdp.wrap:size_based_auto_wrap_policy",
    "ShardedGradScaler": "torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler",
    "bf16_compress_hook": "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:bf16_compress_hook",
    "FSDPModule": "torch.distributed.fsdp:FSDPModule", "DeviceMesh": "torch.distributed.device_mesh:DeviceMesh", "distribute_module": "torch.distributed.tensor:distribute_module",
    "distribute_tensor": "torch.distributed.tensor:distribute_tensor", "Placement": "torch.distributed.tensor:Placement",
    "Replicate": "torch.distributed.tensor:Replicate", "Shard": "torch.distributed.tensor:Shard",
    **{name: f"torch.distributed.tensor.parallel:{name}" for name in (
        "ColwiseParallel", "ParallelStyle", "RowwiseParallel", "SequenceParallel", "loss_parallel", "parallelize_module",
    )},
    "checkpoint": "torch.utils.checkpoint:checkpoint", "CheckpointPolicy": "torch.utils.checkpoint:CheckpointPolicy",
    "create_selective_checkpoint_contexts": "torch.utils.checkpoint:create_selective_checkpoint_contexts",
    "PipelineStage": "torch.distributed.pipelining:PipelineStage",
    **{name: f"torch.distributed.pipelining:{name}" for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")},
    **{name: f"torch.utils._pytree:{name}" for name in ("tree_flatten", "tree_unflatten")},
    "dcp": "torch.distributed.checkpoint as dcp", "CheckpointException": "torch.distributed.checkpoint.api:CheckpointException", "DefaultLoadPlanner": "torch.distributed.checkpoint:DefaultLoadPlanner",
    **{name: f"torch.distributed.checkpoint.state_dict:{name}" for name in (
        "StateDictOptions", "get_model_state_dict", "get_optimizer_state_dict", "get_state_dict", "set_model_state_dict", "set_optimizer_state_dict",
        "set_state_dict",
    )},
}  # fmt: skip
_LOCAL = {
    "cut_into_stages": "deepspeed_pipeline:cut_into_stages",
    **{name: f"deepspeed_stages:{name}" for name in ("DeepSpeedPipeline", "SharedWeight", "StageLayer")},
    **{name: f"stages:{name}" for name in ("Stage", "StandIn", "keep_stages")},
    "Pipeline": "run_stages:Pipeline",
    **{name: f"split_layers:{name}" for name in ("FirstCall", "Whole", "join_sequence", "split_layers", "split_sequence")},
    "keep_logits_cut": "cut_loss:keep_logits_cut", "parallelize": "parallelize:parallelize", "Checkpoints": "train_checkpoints:Checkpoints",
    **{name: f"train_helpers:{name}" for name in (
        "Metrics", "RandomStates", "draw", "mark_newest", "newest_checkpoint", "parse_options", "random_states", "seed_everything",
        "set_random_states", "warm_up",
    )},
}  # fmt: skip


def import_lines(source: str) -> str:
    """Standard, third-party and local imports that a module's text needs, in isort's order."""
    tree = ast.parse(source)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used -= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used -= {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)}
    sections = [_section(place[name] for name in sorted(used & place.keys())) for place in (_STANDARD, _THIRD, _LOCAL)]
    return "\n\n".join(section for section in sections if section)


def _section(wanted: Iterable[str]) -> str:
    plain: list[str] = []
    members: dict[str, list[str]] = {}
    for entry in wanted:
        module, _, name = entry.partition(":")
        if name:
            members.setdefault(module, []).append(name)
        else:
            plain.append(module)
    lines = [f"import {module}" for module in sorted(plain)]
    lines += [_members(module, sorted(members[module], key=_kind)) for module in sorted(members)]
    return "\n".join(lines)


def _members(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= _LINE_LENGTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _kind(name: str) -> tuple[bool, str]:
    """Classes before functions, as isort orders them."""
    return (name[0].islower(), name)
