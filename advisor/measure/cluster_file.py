"""Cluster files: TOML that names a catalogue GPU and overrides any figure, or gives all of them.

gpu = "a100-sxm-80gb"         # start from this catalogue entry; without it [device] must be complete
gpus_per_node = 8
num_nodes = 4                 # "nodes" is read too
host_bytes_per_s = 25e9       # one direction, per GPU, pinned copies
host_memory_bytes = 2e12      # per node

[device]                      # any of these overrides the catalogue
name = "my-a100"
memory_bytes = 84e9
memory_bytes_per_s = 1.8e12
num_multiprocessors = 108
family = "ampere"
[device.peak_flops_per_s]     # dense, by dtype
bf16 = 290e12

[intra]                       # inside a node, per GPU; or intra = "nvlink-3"
link = "nvlink-3"             # start from this one
bytes_per_s = 280e9
latency_s = 4e-6

[inter]                       # between nodes, all adapters of a node; or inter = "ib-hdr-4x"
link = "ib-hdr-4x"

[sources]                     # figure -> measured, given, catalogue or assumed
intra = "measured"
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from advisor.errors import HardwareError
from cost_models import catalogue
from cost_models.hardware_data import DTYPES
from cost_models.types import Cluster, Device, Link

_TOP = ("gpu", "gpus_per_node", "num_nodes", "nodes", "host_bytes_per_s", "host_memory_bytes", "device", "intra", "inter", "sources")
_DEVICE = ("name", "memory_bytes", "memory_bytes_per_s", "num_multiprocessors", "family", "peak_flops_per_s")
_LINK = ("link", "name", "bytes_per_s", "latency_s", "kind")
_SOURCES = ("catalogue", "measured", "given", "assumed")
_FIGURES = (
    "device", "memory_bytes", "memory_bytes_per_s", "peak_flops_per_s", "num_multiprocessors", "gpus_per_node", "num_nodes",
    "intra", "inter", "host_bytes_per_s", "host_memory_bytes",
)  # fmt: skip


def read_cluster_file(path: Path, *, base: Callable[[str], Cluster]) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster a file describes, and what it leaves to assumption.

    Args:
        path: the TOML file.
        base: gives the usual cluster of a catalogue GPU, which the file then overrides.

    Raises:
        HardwareError: unreadable, an unknown key, a value that cannot be, or a figure missing.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf8"))
    except OSError as error:
        raise HardwareError(
            f"The cluster file {path} can't be read ({error.strerror}).", hint="Check the path given to --cluster."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HardwareError(f"The cluster file {path} is not TOML ({error}).", hint=_SEE) from error
    try:
        return _cluster(data, base)
    except ValueError as error:
        raise HardwareError(f"The cluster file {path} doesn't do: {error}", hint=_SEE) from error


_SEE = "The README shows the format; `advise measure -o FILE` writes one."


def to_toml(cluster: Cluster) -> str:
    """A cluster file with every figure; reading it gives an equal cluster."""
    device = cluster.device
    lines = [
        f"gpus_per_node = {cluster.gpus_per_node}", f"num_nodes = {cluster.num_nodes}",
        f"host_bytes_per_s = {cluster.host_bytes_per_s!r}", f"host_memory_bytes = {cluster.host_memory_bytes!r}", "",
        "[device]", f"name = {json.dumps(device.name)}", f"memory_bytes = {device.memory_bytes!r}",
        f"memory_bytes_per_s = {device.memory_bytes_per_s!r}", f"num_multiprocessors = {device.num_multiprocessors}",
        f"family = {json.dumps(device.family)}", "", "[device.peak_flops_per_s]  # dense",
        *(f"{dtype} = {rate!r}" for dtype, rate in device.peak_flops_per_s.items()),
    ]  # fmt: skip
    for place, link in (("intra", cluster.intra), ("inter", cluster.inter)):
        lines += ["", f"[{place}]", f"name = {json.dumps(link.name)}", f"bytes_per_s = {link.bytes_per_s!r}",
                  f"latency_s = {link.latency_s!r}", f"kind = {json.dumps(link.kind)}"]  # fmt: skip
    lines += ["", "[sources]", *(f"{figure} = {json.dumps(source)}" for figure, source in cluster.sources.items())]
    return "\n".join(lines) + "\n"


def _cluster(data: dict[str, Any], base: Callable[[str], Cluster]) -> tuple[Cluster, tuple[str, ...]]:
    _known(data, _TOP, "")
    usual = base(_string(data["gpu"], "gpu")) if "gpu" in data else None
    given: dict[str, str] = {}
    device = _device(_table(data, "device"), usual.device if usual else None, given)
    counts = {
        "gpus_per_node": _count(data, "gpus_per_node", given) or (usual.gpus_per_node if usual else None),
        "num_nodes": _count(data, "num_nodes", given) or _count(data, "nodes", given) or 1,
    }
    if counts["gpus_per_node"] is None:
        raise ValueError("gpus_per_node is missing.")
    assumptions = []
    if usual and catalogue.is_presumed(data["gpu"]):
        assumptions.append(f'"{data["gpu"]}" is taken for {usual.device.name}; name another variant in the cluster file')
    links: dict[str, Link] = {}
    for place in ("intra", "inter"):
        like = getattr(usual, place) if usual else None
        links[place] = _link(data, place, like, device.name, counts["gpus_per_node"], given)
    host_bytes_per_s = _number(data, "host_bytes_per_s", given) or (usual.host_bytes_per_s if usual else 25e9)
    if "host_bytes_per_s" not in given:
        assumptions.append(f"host copies at {host_bytes_per_s / 1e9:.3g} GB/s a GPU: the cluster file doesn't say")
    host_memory_bytes = _number(data, "host_memory_bytes", given, least=0.0) or 0.0
    sources = {**dict.fromkeys(_FIGURES, "assumed"), **(dict(usual.sources) if usual else {}), **given}
    stated = _stated_sources(data)
    cluster = Cluster(
        device=device, gpus_per_node=counts["gpus_per_node"], num_nodes=counts["num_nodes"] or 1, intra=links["intra"],
        inter=links["inter"], host_bytes_per_s=host_bytes_per_s,
        host_memory_bytes=host_memory_bytes, sources={**sources, **stated},
    )  # fmt: skip
    return cluster, tuple(assumptions)


def _device(table: dict[str, Any], usual: Device | None, given: dict[str, str]) -> Device:
    _known(table, _DEVICE, "device.")
    rates = _table(table, "peak_flops_per_s", "device.")
    _known(rates, DTYPES, "device.peak_flops_per_s.")
    peaks = {**(usual.peak_flops_per_s if usual else {}), **{k: _number(rates, k, {}) or 0.0 for k in rates}}
    if rates:
        given["peak_flops_per_s"] = "given"
    if usual is None:
        missing = [k for k in ("name", "memory_bytes", "memory_bytes_per_s", "peak_flops_per_s") if k not in table]
        if missing:
            raise ValueError(f"without gpu = ..., [device] needs {', '.join(missing)}.")
        usual = Device(name="", memory_bytes=0.0, memory_bytes_per_s=0.0, peak_flops_per_s={})
        given.update(dict.fromkeys(("device", "num_multiprocessors"), "given"))
    if "name" in table:
        given["device"] = "given"
    return Device(
        name=_string(table.get("name", usual.name), "device.name"), memory_bytes=_number(table, "memory_bytes", given) or usual.memory_bytes,
        memory_bytes_per_s=_number(table, "memory_bytes_per_s", given) or usual.memory_bytes_per_s,
        peak_flops_per_s=MappingProxyType(peaks),
        num_multiprocessors=_count(table, "num_multiprocessors", given) or usual.num_multiprocessors,
        family=_string(table.get("family", usual.family), "device.family"),
    )  # fmt: skip


def _link(data: dict[str, Any], place: str, usual: Link | None, gpu: str, gpus_per_node: int | None, given: dict[str, str]) -> Link:  # noqa: PLR0917 - one value each
    value = data.get(place)
    if value is None:
        if usual is None:
            raise ValueError(f"{place} is missing.")
        return usual
    given[place] = "given"
    known = gpu if gpu in catalogue.gpu_names() else ""
    table = {"link": value} if isinstance(value, str) else _table(data, place)
    _known(table, _LINK, f"{place}.")
    if "link" in table:
        usual = catalogue.parse_link(_string(table["link"], f"{place}.link"), where=place, gpu=known, gpus_per_node=gpus_per_node or 8)
    elif usual is None:
        missing = [k for k in ("name", "bytes_per_s", "latency_s") if k not in table]
        if missing:
            raise ValueError(f"[{place}] needs {', '.join(missing)}, or link = a catalogue name.")
        usual = Link(name="", bytes_per_s=0.0, latency_s=0.0)
    return Link(
        name=_string(table.get("name", usual.name), f"{place}.name"), bytes_per_s=_number(table, "bytes_per_s", {}) or usual.bytes_per_s,
        latency_s=_number(table, "latency_s", {}, least=0.0) or usual.latency_s, kind=_string(table.get("kind", usual.kind), f"{place}.kind"),
    )  # fmt: skip


def _stated_sources(data: dict[str, Any]) -> Mapping[str, str]:
    table = _table(data, "sources")
    _known(table, _FIGURES, "sources.")
    for figure, source in table.items():
        if source not in _SOURCES:
            raise ValueError(f"sources.{figure} is {source!r}; it is one of {', '.join(_SOURCES)}.")
    return table


def _known(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            help_ = f"did you mean {where}{near[0]}?" if near else f"known: {', '.join(keys)}."
            raise ValueError(f"there is no {where}{key}; {help_}")


def _table(data: Mapping[str, Any], key: str, where: str = "") -> dict[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{where}{key} must be a table.")  # noqa: TRY004 - a mistake in a file, not in a call
    return value


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be text in quotes, not {value!r}.")  # noqa: TRY004 - a mistake in a file
    return value


def _number(table: Mapping[str, Any], key: str, given: dict[str, str], least: float | None = None) -> float | None:
    """A positive number (or one of at least `least`), noted as given; None where the file doesn't have it."""
    if key not in table:
        return None
    value = table[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} must be a number, not {value!r}.")
    if value <= 0 if least is None else value < least:
        raise ValueError(f"{key} is {value:g}; it must be {'above 0' if least is None else f'at least {least:g}'}.")
    given[key] = "given"
    return float(value)


def _count(table: Mapping[str, Any], key: str, given: dict[str, str]) -> int | None:
    value = _number(table, key, given)
    if value is None:
        return None
    if value != int(value):
        raise ValueError(f"{key} must be a whole number, not {value:g}.")
    if key == "nodes":
        given["num_nodes"] = given.pop("nodes")
    return int(value)


__all__ = ["read_cluster_file", "to_toml"]
