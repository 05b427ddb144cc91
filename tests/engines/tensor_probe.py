"""Trains small models with generated parallelize.py files, all in one process group, and tells losses, collectives and shapes.

    torchrun --nproc-per-node 2 tensor_probe.py cases.json

A case is {"name", "folder", "script", "data_ranks"}; without a folder the model trains whole, as on one process. `<cases>.<rank>.json` gets by
name the losses of three steps over the global batch and of an evaluation, gradient norms, the collectives of the last forward pass, backward pass and optimizer step, the shapes
that this rank holds, and the norm of each whole parameter at the end; or the error that stopped the case.
"""

import collections
import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

GLOBAL_BATCH = 4
KINDS = {
    "all_reduce": "all-reduce", "allreduce_": "all-reduce", "all_gather_into_tensor": "all-gather", "_allgather_base_": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter", "_reduce_scatter_base_": "reduce-scatter", "all_to_all_single": "all-to-all",
    "broadcast": "broadcast", "scatter_": "scatter", "broadcast_": "broadcast",
}  # fmt: skip


class Collectives(TorchDispatchMode):
    """Counts collectives by kind; unlike CommDebugMode it stands recomputation."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it becomes on this rank comes back here
        if func.namespace in {"_c10d_functional", "c10d"} and func._opname not in {"wait_tensor", "_wrap_tensor_autograd"}:
            self.counts[KINDS[func._opname]] += 1
        return func(*args, **(kwargs or {}))


def load(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def share(batch, rank, count):
    """This data rank's rows of the global batch."""
    rows = GLOBAL_BATCH // count
    pick = slice(rank * rows, (rank + 1) * rows)
    return {k: v[pick] for k, v in batch.items()} if isinstance(batch, dict) else [v[pick] for v in batch]


PLAIN_CROSS_ENTROPY = F.cross_entropy


def run(case):
    torch.manual_seed(0)
    F.cross_entropy = PLAIN_CROSS_ENTROPY
    user = load(case["script"])
    model = user.build_model()
    count = case["data_ranks"]
    rank = dist.get_rank() // (dist.get_world_size() // count)
    if case.get("folder"):
        sys.path[0] = case["folder"]
        for name in ("split_layers", "cut_loss"):  # each case has its own
            sys.modules.pop(name, None)
        model = load(f"{case['folder']}/parallelize.py").parallelize(model)
    optimizer = user.build_optimizer(model)
    losses, norms, counts = [], [], {}
    for _ in range(3):
        batch = share(user.make_batch(GLOBAL_BATCH), rank, count)
        with Collectives() as forward:
            loss = user.loss_fn(model, batch)
        with Collectives() as backward:
            loss.backward()
        norms.append(whole(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])).item())
        with Collectives() as step:
            optimizer.step()
        counts = {"forward": forward.counts, "backward": backward.counts, "step": step.counts}
        optimizer.zero_grad()
        losses.append(over_ranks(loss, case))
    held = {name: list(p.to_local().shape if isinstance(p, DTensor) else p.shape) for name, p in model.named_parameters()}
    weights = {name: whole(p.detach()).norm().item() for name, p in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        losses.append(over_ranks(user.loss_fn(model, share(user.make_batch(GLOBAL_BATCH), rank, count)), case))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    return {"losses": losses, "norms": norms, "held": held, "weights": weights, "trained": trained, **counts}


def over_ranks(loss, case):
    total = loss.detach().clone()
    if case.get("folder"):
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main():
    cases = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    found = {}
    for case in cases:
        try:
            found[case["name"]] = run(case)
        except (RuntimeError, ValueError) as error:
            found[case["name"]] = {"error": f"{error}: {error.__cause__}"}
    Path(f"{sys.argv[1]}.{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
