"""Generated parallelize.py files in worlds of any size, on one process: a fake process group, fake tensors, every collective noted.

    python fake_world.py cases.json FOLDER

A case is {"name", "file", "model", "layers", "seq_len", "world_size", "micro_batch", "num_microbatches", "zero1", "reduces_once"}; results of a world size
go to FOLDER/<world size>.json, by name of the case. What is noted of its second step (its first for warming up: FSDP sets itself up lazily,
DDP rebuilds its buckets): each collective's operator, process group, size of that group, bytes of the larger of message and result, and
whether backward was running; then the bytes that rank 0 holds. Nothing in the files is changed, but for what a fake group can't do: DDP's
first exchange of shapes and its map of used parameters (static_graph) are left out, and a communication hook stands for its all-reduce.
"""

import contextlib
import functools
import gc
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from references import load
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAIN_CROSS_ENTROPY = F.cross_entropy


class Recorder(TorchDispatchMode):
    """Notes collectives on their way to the process group."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it will come back as what DTensor makes of it
        out = func(*args, **(kwargs or {}))
        if func.namespace in {"c10d", "_c10d_functional"} and "wait_tensor" not in func.name():
            leaves = tree_leaves((args, kwargs, out))
            self.note(func.name(), group_of(leaves), max(num_bytes(t) for t in leaves if isinstance(t, torch.Tensor)))
        return out

    def note(self, name, group, size):
        in_backward = torch._C._current_graph_task_id() != -1
        self.calls.append({"op": name, "group": group.group_desc, "ranks": group.size(), "bytes": size, "in_backward": in_backward})

    def note_bucket(self, group, bucket):
        """DDP's communication hook."""
        self.note("c10d::allreduce_", group, num_bytes(bucket.buffer()))
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def num_bytes(tensor):
    return tensor.numel() * tensor.element_size()


def group_of(leaves):
    """The process group among an operator's arguments: an object, or the last string that names one."""
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf)
    return dist.distributed_c10d._resolve_process_group([leaf for leaf in leaves if isinstance(leaf, str)][-1])


def outside_fake_mode(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run


def prepare():
    """Meshes do arithmetic on real tensors; fake parameters are where they should be, and can't be moved."""
    for name in ("__init__", "_concatenate", "_compute_coordinates_from_mesh"):
        raw = DeviceMesh.__dict__[name]
        made = outside_fake_mode(getattr(raw, "__func__", raw))
        setattr(DeviceMesh, name, type(raw)(made) if isinstance(raw, staticmethod | classmethod) else made)
    nn.Module.to = nn.Module.to_empty = lambda module, *_args, **_kwargs: module


def build(case):
    """The example's real model at full width with few layers, its loss and its vocabulary."""
    if case["model"] == "llama":
        user = load(EXAMPLES / "llama3_8b.py")
        config = user.LlamaConfig(**user.LLAMA3_8B | {"num_hidden_layers": case["layers"]}, tie_word_embeddings=False, use_cache=False)
        torch.set_default_dtype(torch.bfloat16)
        model = user.LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        return model, lambda parallel, tokens: parallel(input_ids=tokens, labels=tokens).loss, config.vocab_size
    model = load(EXAMPLES / "gpt2.py").GPT2(num_layers=case["layers"])
    vocab_size = model.head.out_features
    return model, lambda parallel, tokens: F.cross_entropy(parallel(tokens).flatten(0, 1), tokens.flatten()), vocab_size


def loaded(case, recorder):
    """The case's `parallelize`, made fit for fake groups and tensors."""
    folder = Path(case["file"]).parent
    for other in folder.glob("*.py"):  # what the file imports, each plan has its own
        sys.modules.pop(other.stem, None)
    sys.path[0] = str(folder)
    F.cross_entropy = PLAIN_CROSS_ENTROPY  # another case may have exchanged it
    module = load(case["file"])
    if "cut_loss" in sys.modules:
        sys.modules["cut_loss"].is_right = lambda *_: True  # it compares numbers too
    module.FirstCall = lambda *_: None  # where layers are cut, it compares numbers, which fake tensors don't have
    if hasattr(module, "init_device_mesh"):
        module.init_device_mesh = outside_fake_mode(module.init_device_mesh)
    if hasattr(module, "DistributedDataParallel"):

        def hooked(*args, **kwargs):
            model = DistributedDataParallel(*args, **kwargs | {"init_sync": False, "static_graph": False})
            model.register_comm_hook(model.process_group, recorder.note_bucket)
            return model

        module.DistributedDataParallel = hooked
    return module.parallelize


def step(model, optimizer, loss, tokens, num_microbatches, *, reduces_once=False):
    """As the generated train files accumulate."""
    for i in range(num_microbatches):
        last = i == num_microbatches - 1
        if hasattr(model, "set_requires_all_reduce"):
            model.set_requires_all_reduce(last)
        if reduces_once:
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
        with contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
            loss(model, tokens).backward()
    held = holdings(optimizer)
    optimizer.step()
    own = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer holds another with this rank's share
    held["states"] = sum(num_bytes(local(s)) for p in own.state.values() for s in p.values() if isinstance(s, torch.Tensor) and s.dim())
    optimizer.zero_grad()
    return held


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def holdings(optimizer):
    """Bytes of parameters and gradients on this rank."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {"parameters": sum(num_bytes(local(p)) for p in params), "gradients": sum(num_bytes(local(p.grad)) for p in params)}


def run(case):
    recorder = Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, loss, vocab_size = build(case)
        model = loaded(case, recorder)(model)
        tokens = torch.randint(vocab_size, (case["micro_batch"], case["seq_len"]))
        options = {"lr": 1e-3, "fused": True}  # one operator, where others are a dozen for each parameter
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        if case["zero1"]:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
        step(model, optimizer, loss, tokens, 1)
        if isinstance(model, DistributedDataParallel):
            with unset_fake_temporarily():  # the buckets' order is exchanged in a real tensor
                model.reducer._rebuild_buckets()
        recorder.calls.clear()
        with recorder:
            held = step(model, optimizer, loss, tokens, case["num_microbatches"], reduces_once=case["reduces_once"])
    return {"calls": recorder.calls, "held": held}


def run_world(world_size, cases, out):
    """In a process of its own, as DTensor remembers meshes and with them their process groups."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    results = {}
    for case in cases:
        results[case["name"]] = run(case)
        gc.collect()
    out.write_text(json.dumps(results))


def main():
    prepare()
    __import__("transformers.models.llama.modeling_llama")  # once for all worlds, as what this file imports
    gc.freeze()  # which collections between the cases need not look at
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for world_size in sorted({case["world_size"] for case in cases}):
        child = os.fork()
        if child == 0:
            try:
                run_world(world_size, [c for c in cases if c["world_size"] == world_size], folder / f"{world_size}.json")
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)


if __name__ == "__main__":
    main()
