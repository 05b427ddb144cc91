"""The cluster this machine is, with its own figures measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from advisor.errors import AdvisorError
from advisor.measure.cluster import resolve_cluster, usual_cluster
from advisor.measure.host import host_memory_bytes
from advisor.measure.local_gpus import local_gpus
from advisor.measure.microbench import Measurements, cpu_device, measure_device, measured_cluster
from cost_models.types import Cluster


def is_here(gpu: str | None, file: str | None) -> bool:
    """Whether the cluster asked for is made of this machine's devices: its GPUs by default, or its CPU by name."""
    return file is None and (gpu == "cpu" or (gpu is None and local_gpus() is not None))


def with_measurements(cluster: Cluster, progress: Callable[[str], None] | None = None) -> tuple[Cluster, tuple[str, ...]]:
    """A cluster of this machine's devices with its host memory and rates measured in a few seconds.

    A device that can't be measured keeps the catalogue's figures.
    """
    cluster = _with_host_memory(cluster)
    try:
        measurements = measure_device(quick=True, device="cpu" if cluster.device.name == "cpu" else "cuda", progress=progress)
    except AdvisorError as error:
        return cluster, (f"the device could not be measured ({error.message}); catalogue figures are used",)
    return _measured(cluster, measurements), measurements.warnings


def cluster_here(*, quick: bool, progress: Callable[[str], None] | None = None) -> tuple[Cluster, Measurements]:
    """This machine as a cluster with every figure that could be measured.

    Raises:
        AdvisorError: nothing could be measured.
    """
    measurements = measure_device(quick=quick, progress=progress)
    cluster = usual_cluster("cpu") if measurements.device_kind == "cpu" else resolve_cluster()[0]
    return _measured(_with_host_memory(cluster), measurements), measurements


def _with_host_memory(cluster: Cluster) -> Cluster:
    sources = {**cluster.sources, "host_memory_bytes": "measured"}
    return dataclasses.replace(cluster, host_memory_bytes=host_memory_bytes(), sources=sources)


def _measured(cluster: Cluster, measurements: Measurements) -> Cluster:
    """The cluster with measured rates; of a CPU also with this machine's memory and cores."""
    found = measured_cluster(cluster, measurements)
    if measurements.device_kind != "cpu":
        return found
    sources = {**found.sources, **dict.fromkeys(("device", "memory_bytes", "num_multiprocessors"), "measured")}
    return dataclasses.replace(found, device=cpu_device(measurements), sources=sources)
