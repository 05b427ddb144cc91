"""What the cost model expects of this machine: its processor or GPU and its links, as measured a moment ago."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence

import cost_models
from advisor.measure.cluster import resolve_cluster, usual_cluster
from advisor.measure.microbench import CollectiveRate, cpu_device, measure_collectives, measure_device, measured_cluster
from advisor.verify.cells import num_threads
from cost_models.types import Cluster, Link, Plan, PlanTable, Workload


def measured_here(num_processes: int, *, on_gpu: bool, progress: Callable[[str], None]) -> Cluster:
    """This machine as a cluster of `num_processes` devices. A processor is measured with the threads that each process gets.

    Raises:
        AdvisorError: it can't be measured.
    """
    with _threads(None if on_gpu else num_threads(num_processes)):
        found = measure_device(quick=True, device="cuda" if on_gpu else "cpu", progress=progress)
        rates = measure_collectives("nccl" if on_gpu else "gloo", num_processes, progress=progress) if num_processes > 1 else ()
    cluster = measured_cluster(resolve_cluster()[0] if on_gpu else usual_cluster("cpu"), found)
    if not on_gpu:
        cluster = dataclasses.replace(cluster, device=cpu_device(found))
    link = fitted_link(rates) if rates else cluster.intra
    return dataclasses.replace(cluster, gpus_per_node=num_processes, num_nodes=1, intra=link)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Children started meanwhile compute with so many threads."""
    before = os.environ.get("OMP_NUM_THREADS")
    if count is not None:
        os.environ["OMP_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        if count is not None:
            os.environ.pop("OMP_NUM_THREADS")
            os.environ |= {} if before is None else {"OMP_NUM_THREADS": before}


def fitted_link(rates: Sequence[CollectiveRate]) -> Link:
    """The link whose all-reduces the cost model prices as the smallest and the largest measured one.

    An all-reduce is two ring passes of latency + bytes x (ranks - 1) / ranks / rate; the model adds a latency of its own and takes a share
    of the link's rate, which are taken out here.
    """
    curve = sorted((r for r in rates if r.operation == "all_reduce"), key=lambda r: r.message_bytes)
    small, large = curve[0], curve[-1]
    constants = cost_models.load_calibration()
    share = constants.value("intra_rate_share", family="cpu")
    s_per_byte = max(large.seconds - small.seconds, 1e-9) / 2 / (large.message_bytes - small.message_bytes)
    rate = (large.num_ranks - 1) / large.num_ranks / s_per_byte
    own_latency_s = constants.value("intra_latency_s", family="cpu") * math.log2(small.num_ranks)
    latency_s = small.seconds / 2 - small.message_bytes * s_per_byte - own_latency_s
    return Link(name=curve[0].backend, bytes_per_s=rate / share, latency_s=max(latency_s, 0.0), kind="")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one step on one rank."""

    step_time_s: float
    memory_bytes: float  # allocated by tensors, without what a driver or runtime reserves


def predict(workload: Workload, plan: Plan, cluster: Cluster) -> Prediction:
    """Price a plan.

    Raises:
        ValueError: the cluster has no rate for the workload's arithmetic.
    """
    found = cost_models.estimate(workload, cluster, PlanTable.from_plans([plan]))
    return Prediction(step_time_s=float(found.step_time_s[0]), memory_bytes=float(found.allocated_memory_bytes[0]))
