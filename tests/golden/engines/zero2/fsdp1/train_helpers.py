"""What a train file needs beside its loop: options, random numbers, learning-rate warm-up, metrics. PyTorch only, yours to edit."""

import argparse
import collections
import json
import os
import random
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

RandomStates = dict[str, Any]
PROFILE_EVERY, FIRST_PROFILED = 100, 3  # steps; communication is measured on one in so many, first when the run has warmed up


def parse_options(description: str) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--steps", type=int, default=100, help="optimizer steps in all, those before a restart included")
    add(
        "--warmup-steps",
        type=int,
        default=0,
        help="raise the learning rate linearly over the first steps (default 0: not at all). A global batch k times the one that the rate "
        "was tuned for takes about k times the rate with SGD, its square root with Adam, and then needs a warm-up",
    )
    add("--clip-norm", type=float, default=0.0, help="clip gradients to this norm (default 0: don't)")
    add("--eval-every", type=int, default=0, help="steps between evaluations (default 0: none)")
    add("--eval-batches", type=int, default=10, help="global batches in an evaluation")
    add("--checkpoint", default="", metavar="DIR", help="folder seen by all nodes; a run goes on from the newest checkpoint there")
    add("--checkpoint-every", type=int, default=1000, help="steps between checkpoints; the last step has one too")
    add("--keep-checkpoints", type=int, default=3, metavar="N", help="keep the newest N of this run's checkpoints (default 3; 0: all)")
    add("--metrics", default="", metavar="FILE", help="append one JSON line a step to this file")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this file by torchrun, as launch.sh does")
    if min(options.steps, options.eval_batches, options.checkpoint_every) < 1:
        parser.error("--steps, --eval-batches and --checkpoint-every start at 1")
    if min(options.warmup_steps, options.clip_norm, options.eval_every, options.keep_checkpoints) < 0:
        parser.error("--warmup-steps, --clip-norm, --eval-every and --keep-checkpoints are 0 or more")
    if os.environ["RANK"] == "0":  # better now than after the first steps
        try:
            make_targets(options.checkpoint, options.metrics)
        except OSError as error:
            parser.error(str(error))
    return options


def make_targets(folder: str, file: str) -> None:
    """The checkpoints' folder and the metrics file, where they are wanted."""
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
    if file:
        Path(file).open("a").close()


def seed_everything(seed: int) -> None:
    """Start all random numbers anew."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def random_states() -> RandomStates:
    """Where all random numbers stand."""
    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_states(states: RandomStates) -> None:
    """Go on from states taken earlier."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def draw(make_batch: Callable[[int], Any], size: int, states: RandomStates) -> tuple[Any, RandomStates]:
    """A batch whose random numbers go on from `states`, and where they stand then; those of dropout are left alone."""
    own = random_states()
    set_random_states(states)
    batch = make_batch(size)
    states = random_states()
    set_random_states(own)
    return batch, states


def warm_up(optimizer: torch.optim.Optimizer, full_rates: list[float], step: int, warmup_steps: int) -> None:
    """Learning rates of a step: their full values from the end of the warm-up on."""
    for group, rate in zip(optimizer.param_groups, full_rates, strict=True):
        group["lr"] = rate * min(1.0, (step + 1) / warmup_steps)


def newest_checkpoint(folder: str) -> str:
    """Name of the newest complete checkpoint, agreed on by all ranks; "" where there is none."""
    latest = Path(folder) / "latest"
    found = [latest.read_text() if folder and latest.is_file() else ""]
    dist.broadcast_object_list(found)
    return found[0]


def mark_newest(folder: str, name: str, keep: int) -> None:
    """Name a complete checkpoint, then delete all but `keep` of those that `complete` lists, which were written here (0: none)."""
    replace_text(Path(folder) / "latest", name)
    listed = Path(folder) / "complete"
    before = listed.read_text().split() if listed.is_file() else []
    names = [*(other for other in before if other != name), name]
    outdated = names[:-keep] if keep else []
    for other in outdated:
        shutil.rmtree(Path(folder) / other, ignore_errors=True)
    replace_text(listed, "\n".join(names[len(outdated) :]))


def replace_text(file: Path, text: str) -> None:
    """In one go: a run that is killed here leaves the old text or the new one."""
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_text(text)
    fresh.replace(file)


class Metrics:
    """The figures that show whether a run is healthy, one JSON line a step by rank 0.

    Good signs: communication under 0.25 of a step, GPUs busy for over 0.7 of the time, memory filled under 0.85, a variation of step times
    under 0.15 and a steady gradient norm. Step times are rank 0's, memory is that of the fullest rank. After a restart the last line of a
    step counts.
    """

    def __init__(self, file: str, device: torch.device):
        self.file, self.device = file, device
        self.profiler: torch.profiler.profile | None = None
        self.started_s = self.step_time_s = 0.0
        self.step_times_s: collections.deque[float] = collections.deque(maxlen=100)
        self.communication_share: float | None = None
        self.explained: set[str] = set()

    def start(self, step: int) -> None:
        """A step begins; some run under the profiler, on all ranks alike."""
        profiled = bool(self.file) and step % PROFILE_EVERY == FIRST_PROFILED
        self.profiler = torch.profiler.profile() if profiled else None
        if self.profiler:
            self.profiler.start()
        self.started_s = time.perf_counter()

    def stop(self) -> None:
        """It ends. The first one and those under the profiler don't count for the variation."""
        first = self.step_time_s == 0
        self.step_time_s = time.perf_counter() - self.started_s
        self.communication_share = None
        if self.profiler:
            self.profiler.stop()
            self.communication_share = communication_time_s(self.profiler) / self.step_time_s
        elif not first:
            self.step_times_s.append(self.step_time_s)

    def write(self, step: int, loss: float, gradient_norm: float | None) -> None:
        """Add a step's line; all ranks take part."""
        peak, total = memory_bytes(self.device)
        memory = torch.tensor([peak, peak / total], dtype=torch.float64, device=self.device)
        dist.all_reduce(memory, dist.ReduceOp.MAX)
        if dist.get_rank() != 0:
            return
        utilization = gpu_utilization_share(self.device)
        missing = {
            "gradient_norm": "" if gradient_norm is not None else "the engine doesn't tell",
            "communication_share": "" if self.communication_share is not None else f"measured on one step in {PROFILE_EVERY}",
            "gpu_utilization_share": "" if utilization is not None else "no GPU, or no nvidia-ml-py to read it",
        }
        line: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "gradient_norm": gradient_norm,
            "step_time_s": self.step_time_s,
            "step_time_variation": statistics.pstdev(self.step_times_s) / statistics.mean(self.step_times_s) if self.step_times_s else None,
            "peak_memory_bytes": memory[0].item(),
            "memory_share": memory[1].item(),
            "gpu_utilization_share": utilization,
            "communication_share": self.communication_share,
        }
        if unexplained := {name: reason for name, reason in missing.items() if reason and name not in self.explained}:
            line["missing"] = unexplained
            self.explained |= unexplained.keys()
        with Path(self.file).open("a") as stream:
            stream.write(json.dumps(line) + "\n")


def communication_time_s(profiler: torch.profiler.profile) -> float:
    """Time of a profiled step in which a collective of this rank was under way, waiting for other ranks included."""
    collectives = ("ncclDevKernel", "ncclKernel", "gloo:")
    spans = sorted((e.time_range.start, e.time_range.end) for e in profiler.events() or [] if e.name.startswith(collectives))
    total_us = reached_us = 0.0
    for start_us, end_us in spans:
        total_us += max(0.0, end_us - max(start_us, reached_us))
        reached_us = max(reached_us, end_us)
    return total_us / 1e6


def memory_bytes(device: torch.device) -> tuple[float, float]:
    """Peak of this process and the size of the memory: the GPU's, or the host's where it trains."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return peak, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gpu_utilization_share(device: torch.device) -> float | None:
    """Share of the last moments in which a kernel ran, as `nvidia-smi` shows it."""
    try:
        return torch.cuda.utilization(device) / 100 if device.type == "cuda" else None
    except (ModuleNotFoundError, RuntimeError):
        return None
