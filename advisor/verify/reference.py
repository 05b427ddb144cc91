"""The same training on one process, by hand: the global batch in the micro-batches of the plan, one after the other."""

from __future__ import annotations

import functools
import importlib.util
import runpy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler


def train_functions(cell: Mapping[str, Any]) -> None:
    """Train the model of a file that declares functions.

    Seeds are set and numbers drawn in the order of the train files, so batches and first weights are theirs. Micro-batches are taken one
    by one because batch normalization and losses over a varying number of tokens see only a micro-batch on a rank.

    Args:
        cell: `script entry seed optimizer micro_batch num_micro_batches num_data_ranks num_steps`.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(cell["seed"])
    user = vars(_load(Path(cell["script"])))
    model = user[cell["entry"]]().to(device)
    optimizer = _optimizer(user, model, cell["optimizer"])
    pieces = cell["num_micro_batches"]
    batches = _drawn(user, cell) if "make_dataset" not in user else _read(user, cell)
    for _ in range(cell["num_steps"] + 1):
        for batch in next(batches):
            (user["loss_fn"](model, _to(batch, device)) / pieces).backward()
        optimizer.step()
        optimizer.zero_grad()


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _optimizer(user: Mapping[str, Any], model: torch.nn.Module, kind: str) -> Any:
    if "build_optimizer" in user:
        return user["build_optimizer"](model)
    return getattr(torch.optim, kind)(model.parameters())


def _drawn(user: Mapping[str, Any], cell: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Micro-batches of each step, cut from a global batch that is drawn at once."""
    pieces, size = cell["num_micro_batches"], cell["micro_batch"]
    while True:
        batch = user["make_batch"](pieces * size)
        yield [_piece(batch, i, size, pieces * size) for i in range(pieces)]


def _read(user: Mapping[str, Any], cell: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Micro-batches of each step, from the shares of the data ranks in a data set; always in order."""
    dataset, ranks = user["make_dataset"](), cell["num_data_ranks"]
    shares = [
        _endless(dataset, DistributedSampler(dataset, ranks, r, shuffle=False, drop_last=True), cell["micro_batch"]) for r in range(ranks)
    ]
    while True:
        yield [next(share) for _ in range(cell["num_micro_batches"] // ranks) for share in shares]


def _endless(dataset: Any, sampler: Any, size: int) -> Iterator[Any]:
    while True:
        yield from DataLoader(dataset, size, sampler=sampler, drop_last=True)


def _piece(batch: Any, index: int, size: int, total: int) -> Any:
    """Rows of micro-batch `index` in every tensor that has one row per sample."""
    if isinstance(batch, torch.Tensor):
        return batch[index * size : (index + 1) * size] if batch.ndim and len(batch) == total else batch
    if isinstance(batch, Mapping):
        return {key: _piece(value, index, size, total) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return getattr(batch, "_make", type(batch))(_piece(value, index, size, total) for value in batch)
    return batch


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _to(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return getattr(batch, "_make", type(batch))(_to(value, device) for value in batch)
    return batch


def train_script(cell: Mapping[str, Any]) -> None:
    """Run an unmodified script whose loaders give the samples of a global batch, in the data's own order.

    Args:
        cell: `script args script_batch batch`.
    """
    without_shuffling()
    plain = DataLoader.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("batch_size") == cell["script_batch"]:
            kwargs["batch_size"] = cell["batch"]
        elif len(args) > 1 and args[1] == cell["script_batch"]:
            args = (args[0], cell["batch"], *args[2:])
        plain(self, *args, **kwargs)

    DataLoader.__init__ = init  # type: ignore[method-assign]
    sys.argv = [cell["script"], *cell["args"]]
    sys.path.insert(0, str(Path(cell["script"]).parent))
    runpy.run_path(cell["script"], run_name="__main__")


def without_shuffling() -> None:
    """From now on loaders and samplers go through the data in order: ranks and a single process would shuffle differently."""
    plain_loader, plain_sampler = DataLoader.__init__, DistributedSampler.__init__

    @functools.wraps(plain_loader)  # train files look at its signature
    def loader_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "shuffle" in kwargs:
            kwargs["shuffle"] = False
        plain_loader(self, *args, **kwargs)

    @functools.wraps(plain_sampler)
    def sampler_init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_sampler(self, *args, **kwargs)
        self.shuffle = False

    DataLoader.__init__, DistributedSampler.__init__ = loader_init, sampler_init  # type: ignore[method-assign]
