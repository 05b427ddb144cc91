"""Import lines of a generated Python file, from the names that it uses: none is missing, none is idle."""

from __future__ import annotations

import ast
from collections.abc import Iterable

#: Imports by the name they bind; "module", "module as name" or "module:name".
_STANDARD = {
    **{name: name for name in (
        "argparse", "collections", "contextlib", "copy", "datetime", "functools", "gc", "inspect", "itertools", "os", "random", "re", "runpy", "shlex",
        "sys", "types",
    )},
    "importlib": "importlib.util", "Mapping": "collections.abc:Mapping", "Path": "pathlib:Path",
}  # fmt: skip
_THIRD = {
    "deepspeed": "deepspeed", "numpy": "numpy", "torch": "torch", "dist": "torch.distributed as dist", "nn": "torch:nn",
    "DataLoader": "torch.utils.data:DataLoader", "DistributedSampler": "torch.utils.data:DistributedSampler",
    "IterableDataset": "torch.utils.data:IterableDataset", "DTensor": "torch.distributed.tensor:DTensor",
    "LRScheduler": "torch.optim.lr_scheduler:LRScheduler", "DistributedDataParallel": "torch.nn.parallel:DistributedDataParallel",
    "ZeroRedundancyOptimizer": "torch.distributed.optim:ZeroRedundancyOptimizer",
    "init_device_mesh": "torch.distributed.device_mesh:init_device_mesh", "fully_shard": "torch.distributed.fsdp:fully_shard",
    "MixedPrecisionPolicy": "torch.distributed.fsdp:MixedPrecisionPolicy", "CPUOffloadPolicy": "torch.distributed.fsdp:CPUOffloadPolicy",
    "DeviceMesh": "torch.distributed.device_mesh:DeviceMesh", "distribute_module": "torch.distributed.tensor:distribute_module",
    "Replicate": "torch.distributed.tensor:Replicate", "Shard": "torch.distributed.tensor:Shard",
    **{name: f"torch.distributed.tensor.parallel:{name}" for name in (
        "ColwiseParallel", "ParallelStyle", "RowwiseParallel", "SequenceParallel", "parallelize_module",
    )},
    "checkpoint": "torch.utils.checkpoint:checkpoint", "CheckpointPolicy": "torch.utils.checkpoint:CheckpointPolicy",
    "create_selective_checkpoint_contexts": "torch.utils.checkpoint:create_selective_checkpoint_contexts",
}  # fmt: skip
_LOCAL = {"parallelize": "parallelize:parallelize"}


def import_lines(source: str) -> str:
    """Standard, third-party and local imports that a module's text needs, in isort's order."""
    tree = ast.parse(source)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used -= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
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
    lines += [f"from {module} import {', '.join(sorted(members[module], key=_kind))}" for module in sorted(members)]
    return "\n".join(lines)


def _kind(name: str) -> tuple[bool, str]:
    """Classes before functions, as isort orders them."""
    return (name[0].islower(), name)
