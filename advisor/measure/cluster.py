"""Which cluster is planned for: from options, a cluster file, or this machine; with every assumption as a sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from advisor.errors import HardwareError
from advisor.measure.cluster_file import read_cluster_file, to_toml
from advisor.measure.local_gpus import LocalGpus, local_gpus
from advisor.words import counted
from cost_models import catalogue
from cost_models.types import Cluster, Device, Link

__all__ = ["cluster_mapping", "resolve_cluster", "to_toml"]

_DEFAULT_GPU = "h100-sxm-80gb"
_MOST_GPUS_PER_NODE, _MOST_NODES, _MOST_GPUS = 1024, 65_536, 1_000_000
#: What a pinned copy reaches of a PCIe slot's line rate; 25 GB/s over PCIe 4 is the usual reading of bandwidthTest.
_PINNED_COPY_SHARE = 0.8
_CATALOGUE_FIGURES = ("device", "memory_bytes", "memory_bytes_per_s", "peak_flops_per_s", "num_multiprocessors")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A cluster on its way, with where each figure comes from and what was assumed."""

    cluster: Cluster
    assumptions: tuple[str, ...] = ()

    def with_(self, source: str, assumption: str = "", **figures: Any) -> _Draft:
        """These figures replaced; `source` is noted for each of them."""
        sources = {**self.cluster.sources, **dict.fromkeys(figures, source)}
        return _Draft(
            cluster=dataclasses.replace(self.cluster, **figures, sources=sources),
            assumptions=(*self.assumptions, assumption) if assumption else self.assumptions,
        )


def resolve_cluster(
    *,
    gpu: str | None = None,
    gpus_per_node: int | None = None,
    nodes: int | None = None,
    intra: str | None = None,
    inter: str | None = None,
    file: str | Path | None = None,
) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster that is meant, and what had to be assumed.

    Options win over the file, the file over this machine's GPUs (NVML), those over the default of one node of 8 H100.

    Args:
        gpu: catalogue name or alias; "cpu" for processes without accelerators.
        gpus_per_node: GPUs of one node.
        nodes: number of nodes.
        intra: link inside a node, by name or free text ("nvlink-4", "PCIe").
        inter: network of one node ("ib-hdr-4x", "1600 Gbps RoCE").
        file: cluster file in TOML; see `advisor.measure.cluster_file`.

    Returns:
        The cluster and its assumptions as sentences.

    Raises:
        HardwareError: unknown GPU or link, an unreadable file, or a cluster that cannot exist.
    """
    _check_counts(gpus_per_node, nodes)
    try:
        draft = _base(gpu, file)
        if gpus_per_node is not None:
            draft = draft.with_("given", gpus_per_node=gpus_per_node)
        elif draft.cluster.sources["gpus_per_node"] == "assumed" and (gpu is not None or file is not None):
            usual = draft.cluster.gpus_per_node
            draft = draft.with_("assumed", f"{counted(usual, 'GPU')} in a node, as usual with {draft.cluster.device.name} "
                                "(--gpus-per-node says otherwise)", gpus_per_node=usual)  # fmt: skip
        if nodes is not None:
            draft = draft.with_("given", num_nodes=nodes)
        draft = _with_links(draft, intra, inter)
    except ValueError as error:
        raise _hardware_error(error) from error
    _check_counts(draft.cluster.gpus_per_node, draft.cluster.num_nodes)
    return draft.cluster, draft.assumptions


def _base(gpu: str | None, file: str | Path | None) -> _Draft:
    """The cluster before counts and links given as options."""
    if file is not None:
        cluster, assumptions = read_cluster_file(Path(file), base=usual_cluster)
        draft = _Draft(cluster=cluster, assumptions=assumptions)
        return draft if gpu is None else _with_device(draft, gpu)
    if gpu is not None:
        draft = _Draft(cluster=usual_cluster(gpu))
        if catalogue.is_presumed(gpu):
            draft = draft.with_("assumed", f'"{gpu}" is taken for {draft.cluster.device.name}; name another variant with --gpu')
        return draft
    found = local_gpus()
    if found is not None:
        return _local(found)
    name = _DEFAULT_GPU
    text = f"no GPU was named and none was found here: planned for one node of 8 {name}; name yours with --gpu"
    return _Draft(cluster=usual_cluster(name)).with_("assumed", text, gpus_per_node=8)


def usual_cluster(gpu: str) -> Cluster:
    """One node of the kind this GPU usually sits in; links and counts are assumptions.

    Raises:
        ValueError: unknown GPU.
    """
    device = catalogue.find_gpu(gpu)
    intra, inter = catalogue.default_links(device.name)
    slot = intra if device.family == "cpu" else catalogue.parse_link("PCIe", where="intra", gpu=device.name)
    sources = {
        **dict.fromkeys(_CATALOGUE_FIGURES, "catalogue"),
        **dict.fromkeys(("gpus_per_node", "num_nodes", "intra", "inter", "host_bytes_per_s", "host_memory_bytes"), "assumed"),
    }
    return Cluster(
        device=device, gpus_per_node=catalogue.default_gpus_per_node(device.name), num_nodes=1, intra=intra, inter=inter,
        host_bytes_per_s=_PINNED_COPY_SHARE * slot.bytes_per_s, sources=sources,
    )  # fmt: skip


def _with_device(draft: _Draft, gpu: str) -> _Draft:
    sources = {**draft.cluster.sources, **dict.fromkeys(_CATALOGUE_FIGURES, "catalogue")}
    return _Draft(
        cluster=dataclasses.replace(draft.cluster, device=catalogue.find_gpu(gpu), sources=sources), assumptions=draft.assumptions
    )


def _local(found: LocalGpus) -> _Draft:
    try:
        name = catalogue.gpu_for_device_name(found.device_name, memory_bytes=found.memory_bytes)
    except ValueError as error:
        raise HardwareError(
            f"This machine has {found.count} x {found.device_name}, which the catalogue doesn't know.",
            hint=f"{error} Or plan for another GPU with --gpu.",
        ) from error
    usual = usual_cluster(name)
    device = dataclasses.replace(usual.device, memory_bytes=found.memory_bytes)
    sources = {**usual.sources, "device": "measured", "memory_bytes": "measured", "gpus_per_node": "measured"}
    draft = _Draft(cluster=dataclasses.replace(usual, device=device, gpus_per_node=found.count, sources=sources))
    if found.intra is not None:
        draft = draft.with_("measured", intra=found.intra)
    if found.other_names:
        others = ", ".join(found.other_names)
        draft = dataclasses.replace(draft, assumptions=(f"planned for the {found.count} x {name} here; left out: {others}",))
    return draft


def _with_links(draft: _Draft, intra: str | None, inter: str | None) -> _Draft:
    cluster = draft.cluster
    name = cluster.device.name if cluster.device.name in (*catalogue.gpu_names(), "cpu") else ""
    if intra is not None:
        link = catalogue.parse_link(intra, where="intra", gpu=name)
        draft = draft.with_("given", _reading(intra, link), intra=link)
    elif cluster.sources["intra"] == "assumed" and cluster.gpus_per_node > 1:
        draft = draft.with_("assumed", f"{_shown(cluster.intra)} inside a node (--intra says otherwise)", intra=cluster.intra)
    if inter is not None:
        link = catalogue.parse_link(inter, where="inter", gpu=name, gpus_per_node=cluster.gpus_per_node)
        draft = draft.with_("given", _reading(inter, link), inter=link)
    elif cluster.sources["inter"] == "assumed" and cluster.num_nodes > 1:
        draft = draft.with_("assumed", f"{_shown(cluster.inter)} between nodes (--inter says otherwise)", inter=cluster.inter)
    return draft


def _reading(text: str, link: Link) -> str:
    """A sentence where free text was read as something it doesn't spell out, else ""."""
    if text.strip().casefold() == link.name:
        return ""
    family, _, adapters = link.name.rpartition("-")
    if adapters == "1x":
        return f'"{text}" is read as {link.name}: one {_rate(link)} adapter per node ({family}-8x for eight)'
    return f'"{text}" is read as {_shown(link).rstrip(",")}'


def _shown(link: Link) -> str:
    return f"{link.name}, {_rate(link)} each way,"


def _rate(link: Link) -> str:
    rate = link.bytes_per_s / 1e9
    return f"{rate:,.0f} GB/s" if rate >= 100 else f"{rate:.3g} GB/s"


def _check_counts(gpus_per_node: int | None, nodes: int | None) -> None:
    for name, value, most in (("GPUs in a node", gpus_per_node, _MOST_GPUS_PER_NODE), ("nodes", nodes, _MOST_NODES)):
        if value is None:
            continue
        if value < 1:
            raise HardwareError(f"A cluster can't have {value} {name}.", hint="Leave the option out for the usual number.")
        if value > most:
            raise HardwareError(f"{value:,} {name} is beyond any cluster this can plan for.", hint=f"The most is {most:,}.")
    if gpus_per_node and nodes and gpus_per_node * nodes > _MOST_GPUS:
        raise HardwareError(f"{gpus_per_node * nodes:,} GPUs is beyond any cluster this can plan for.", hint=f"The most is {_MOST_GPUS:,}.")


def _hardware_error(error: ValueError) -> HardwareError:
    """The catalogue's sentences, split into what is wrong and what to try."""
    message, _, hint = str(error).partition(". ")
    return HardwareError(message if not hint else f"{message}.", hint=hint)


def cluster_mapping(cluster: Cluster) -> dict[str, Any]:
    """report.json's "cluster": name -> value, unit and source (catalogue, measured, given or assumed).

    A figure of the catalogue also says where the catalogue has it from ("reference").
    """
    device, sources = cluster.device, cluster.sources
    figures: dict[str, tuple[Any, str, str]] = {
        "device": (device.name, "", "device"),
        "num_gpus": (cluster.num_gpus, "", "gpus_per_node"),
        "gpus_per_node": (cluster.gpus_per_node, "", "gpus_per_node"),
        "num_nodes": (cluster.num_nodes, "", "num_nodes"),
        "memory_bytes": (device.memory_bytes, "bytes", "memory_bytes"),
        "memory_bytes_per_s": (device.memory_bytes_per_s, "bytes/s", "memory_bytes_per_s"),
        "num_multiprocessors": (device.num_multiprocessors, "", "num_multiprocessors"),
    }
    for dtype, rate in device.peak_flops_per_s.items():
        figures[f"peak_{dtype}_flops_per_s"] = (rate, "flops/s", "peak_flops_per_s")
    for place, link in (("intra", cluster.intra), ("inter", cluster.inter)):
        figures[f"{place}_link"] = (link.name, "", place)
        figures[f"{place}_bytes_per_s"] = (link.bytes_per_s, "bytes/s", place)
        figures[f"{place}_latency_s"] = (link.latency_s, "s", place)
    figures["host_bytes_per_s"] = (cluster.host_bytes_per_s, "bytes/s", "host_bytes_per_s")
    if cluster.host_memory_bytes:
        figures["host_memory_bytes"] = (cluster.host_memory_bytes, "bytes", "host_memory_bytes")
    references = _references(device, cluster)
    rows = {}
    for name, (value, unit, key) in figures.items():
        source = sources.get(key, "given")
        rows[name] = {"value": value, "unit": unit, "source": source}
        if key in references and source in ("catalogue", "assumed"):
            rows[name]["reference"] = references[key]
    return rows


def _references(device: Device, cluster: Cluster) -> Mapping[str, str]:
    references: dict[str, str] = {}
    if device.name in (*catalogue.gpu_names(), "cpu"):
        references.update(dict.fromkeys(_CATALOGUE_FIGURES, catalogue.describe_gpu(device.name)["source"]))
    for place, link in (("intra", cluster.intra), ("inter", cluster.inter)):
        if link.name in catalogue.link_names():
            references[place] = catalogue.describe_link(link.name)["source"]
    return references
