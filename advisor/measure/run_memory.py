"""Memory of the runs of a table: the figure that each run's source publishes, and whether the run fits its devices."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from advisor.measure.runs import RunTable
from cost_models import Calibration
from cost_models.terms.memory import MemoryCosts, memory_costs_rows
from cost_models.terms.memory_traits import GIB
from cost_models.types import RECOMPUTES, Cluster, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Published:
    """What a figure is."""

    counted: str = "device"  # allocated: tensors; reserved: by the allocator; device: in use, as the driver sees it
    rank: str = "fullest"  # whose, as in memory_costs
    unit_bytes: float = GIB  # of the table's column: sources that print GB of 1e9 bytes are not converted

    def rank_on(self, cluster: Cluster) -> str:
        """Whose memory it is on a cluster: what is read on the first and last node is the first rank's where there is one node."""
        return "first" if self.rank == "ends" and cluster.num_nodes == 1 else self.rank


#: By the start of a source's name. torchtitan prints reserved memory; Megatron's tests store max-allocated bytes of the rank that writes
#: the log, the last; SimuMax the maximum over ranks; BigScience read nvidia-smi on the first and last node; nanotron's figure is rank 0's
#: and, as freed tensors show in it, reserved memory (inferred). torchtune, Automodel and ColossalAI log torch.cuda.max_memory_allocated.
PUBLISHED: Mapping[str, Published] = {
    "huggingface/nanotron": Published("reserved", "first"),
    "MooreThreads/SimuMax": Published("allocated"),
    "NVIDIA/Megatron-LM CI": Published("allocated", "last"),
    "bigscience-workshop": Published("device", "ends"),
    "pytorch/torchtitan": Published("reserved"),
    "Lightning-AI/litgpt": Published("allocated", unit_bytes=1e9),
    "pytorch/torchtune": Published("allocated"),
    "meta-pytorch/torchtune": Published("allocated"),
    "NVIDIA-NeMo/Automodel": Published("allocated"),
    "hpcaitech/ColossalAI": Published("allocated"),
}


#: What the notes of other sources call a figure.
_WORDS = {"allocated": r"(max|peak)[_ -]?(memory[_ -]?)?alloc", "reserved": "reserved", "device": "nvidia-smi|rocm-smi|nvml"}


def published_as(source: str, notes: str = "") -> Published:
    """What a source's figures are.

    Of sources not listed the notes may tell. Where they don't, a table's own runs are read as the driver sees them, published ones as
    reserved memory, which lies between the other two.
    """
    for start, value in PUBLISHED.items():
        if source.startswith(start):
            return value
    named = [counted for counted, pattern in _WORDS.items() if re.search(pattern, notes, re.IGNORECASE)]
    return Published(named[0] if named else "device" if source in ("", "own") else "reserved")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """Parallel to the table's runs."""

    figure: FloatArray  # predicted, in the unit of the source's column (nearly always GiB)
    fits: npt.NDArray[np.bool_]  # the best estimate of the fullest rank's peak is within the device's memory
    assumed: tuple[str, ...]  # what was presumed for these two alone, "" where nothing


def run_memory(runs: RunTable, calibration: Calibration | None = None) -> RunMemory:
    """Memory of every run.

    A run that doesn't state its recomputation and still would not fit with what `fill_open` presumed (its runtime's usual kinds) is taken to
    recompute as little as makes it fit: somebody ran it. `assumed` says so; times don't follow, as such runs offload activations as well.
    """
    published = [published_as(s, n) for s, n in zip(_texts(runs, "source_repo_or_doc"), _texts(runs, "notes"), strict=True)]
    figure, fits = _priced(runs, published, calibration)
    states = np.array([bool(v) for v in _texts(runs, "activation_ckpt")], dtype=bool)
    assumed = np.full(len(runs), "", dtype=object)
    for mode in RECOMPUTES[1:]:
        open_runs = np.flatnonzero(~fits & ~states)
        if not len(open_runs):
            break
        some = runs.take(open_runs)
        plans = dataclasses.replace(some.plans, recompute=np.full(len(open_runs), RECOMPUTES.index(mode)))
        figure_then, fits_then = _priced(dataclasses.replace(some, plans=plans), [published[i] for i in open_runs], calibration)
        index: IntArray = open_runs[fits_then]
        figure[index], fits[index], assumed[index] = figure_then[fits_then], True, f"activation_ckpt = {mode} (memory only)"
    return RunMemory(figure=figure, fits=fits, assumed=tuple(assumed))


def _priced(runs: RunTable, published: Sequence[Published], calibration: Calibration | None) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Figures, and whether runs fit."""
    if not len(runs):
        return np.zeros(0), np.zeros(0, dtype=bool)
    rows = (runs.workloads, runs.clusters, runs.plans, calibration)
    own = _figures(memory_costs_rows(*rows, ranks=[p.rank_on(c) for p, c in zip(published, runs.clusters, strict=True)]))
    value = np.array([own[p.counted][i] / p.unit_bytes for i, p in enumerate(published)])
    peak, room = memory_costs_rows(*rows).peak, np.array([c.device.memory_bytes for c in runs.clusters])
    return value, peak <= room


def _texts(runs: RunTable, column: str) -> list[str]:
    """Cells of a column, "" where blank or missing."""
    return [str(v).strip() if isinstance(v, str) else "" for v in runs.column(column)]


def _figures(costs: MemoryCosts) -> dict[str, FloatArray]:
    return {"allocated": costs.allocated, "reserved": costs.reserved, "device": costs.peak}
