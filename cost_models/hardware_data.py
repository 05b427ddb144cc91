"""Reads `hardware/**/*.toml` once and checks it: the private half of `cost_models.catalogue`."""

from __future__ import annotations

import datetime
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import Any

from cost_models.types import Device, Link

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
_VENDOR_WORDS = frozenset({"nvidia", "amd", "instinct", "geforce", "tesla", "gpu", "gpus", "graphics", "generation"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEntry:
    """One file of `hardware/gpus` (or `hardware/cpus`)."""

    device: Device
    title: str  # as people write it
    vendor: str
    per: str  # "package" or "die": what one device is
    memory_label_gb: int  # capacity on the box, decimal or binary as the vendor likes
    intra_link: str  # catalogue names of links
    inter_link: str
    pcie_link: str
    nvlink_link: str  # "" where the card has none
    gpus_per_node: int
    device_names: tuple[str, ...]  # as the driver reports the card
    aliases: tuple[str, ...]
    presumed_aliases: tuple[str, ...]  # spellings that leave something open
    shared_aliases: tuple[str, ...]  # such spellings whose presumed meaning is another entry
    source: str
    checked_on: datetime.date
    checks: tuple[str, ...]  # what was compared with a second source; empty: nothing
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEntry:
    """One link of `hardware/links`."""

    link: Link
    where: str  # "intra": per GPU, inside a node; "inter": per node
    source: str
    checked_on: datetime.date
    aliases: tuple[str, ...] = ()
    note: str = ""
    family: str = ""  # "ib-hdr" for ib-hdr-4x


def normalize(text: str) -> str:
    """Spelling-insensitive form of a GPU's or link's name: "NVIDIA A100-SXM4-80GB" -> "a100-sxm4-80gb"."""
    text = re.sub(r"(\d+)\s*gi?b?\b(?!\s*/|\s*ps|\s*it)", r"\1gb", text.casefold().strip())
    words = re.findall(r"[a-z0-9.+]+", text)
    kept = [w for w in words if w not in _VENDOR_WORDS]
    return "-".join(kept or words)


@functools.cache
def gpu_entries() -> Mapping[str, GpuEntry]:
    """Catalogue name -> entry; GPUs in the order of their files, then the CPU."""
    entries: dict[str, GpuEntry] = {}
    for folder in ("gpus", "cpus"):
        for file, data in _toml_files(folder):
            entry = _gpu_entry(data, file)
            entries[entry.device.name] = entry
    return MappingProxyType(entries)


@functools.cache
def link_entries() -> Mapping[str, LinkEntry]:
    """Catalogue name -> entry."""
    entries: dict[str, LinkEntry] = {}
    for file, data in _toml_files("links"):
        for entry in _links_of_file(data, file):
            if entry.link.name in entries:
                raise ValueError(f"{file}: link {entry.link.name} is described twice")
            entries[entry.link.name] = entry
    return MappingProxyType(entries)


@functools.cache
def gpu_aliases() -> Mapping[str, str]:
    """Normalized spelling -> catalogue name, for spellings that leave nothing open (device names included)."""
    return _index((n, (n, e.title, *e.aliases, *e.device_names)) for n, e in gpu_entries().items())


@functools.cache
def presumed_gpu_aliases() -> Mapping[str, str]:
    """Normalized spelling -> the entry it most often means."""
    return _index((n, e.presumed_aliases) for n, e in gpu_entries().items())


@functools.cache
def shared_gpu_aliases() -> Mapping[str, tuple[str, ...]]:
    """Normalized presumed spelling -> every entry it may mean, the presumed one first."""
    table: dict[str, list[str]] = {key: [name] for key, name in presumed_gpu_aliases().items()}
    for name, entry in gpu_entries().items():
        for alias in entry.shared_aliases:
            table[normalize(alias)].append(name)
    return MappingProxyType({key: tuple(names) for key, names in table.items()})


@functools.cache
def link_aliases() -> Mapping[str, str]:
    """Normalized spelling -> catalogue name."""
    return _index((n, (n, *e.aliases)) for n, e in link_entries().items())


def _index(spellings: Iterator[tuple[str, tuple[str, ...]]] | Any) -> Mapping[str, str]:
    table: dict[str, str] = {}
    for name, names in spellings:
        for spelling in names:
            key = normalize(spelling)
            if table.setdefault(key, name) != name:
                raise ValueError(f'"{spelling}" names both {table[key]} and {name}')
    return MappingProxyType(table)


def _toml_files(folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    root: Traversable = resources.files("cost_models").joinpath("hardware", folder)
    for file in sorted(root.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            yield f"{folder}/{file.name}", tomllib.loads(file.read_text(encoding="utf8"))


def _gpu_entry(data: dict[str, Any], file: str) -> GpuEntry:
    try:
        rates = {str(k): float(v) for k, v in data["peak_flops_per_s"].items()}
        if unknown := set(rates) - set(DTYPES):
            raise ValueError(f"{file}: unknown dtypes {sorted(unknown)}")
        if f"{data['name']}.toml" != file.rsplit("/", maxsplit=1)[-1]:
            raise ValueError(f"{file}: the name inside is {data['name']}")
        device = Device(
            name=data["name"], memory_bytes=float(data["memory_bytes"]), memory_bytes_per_s=float(data["memory_bytes_per_s"]),
            peak_flops_per_s=MappingProxyType(rates), num_multiprocessors=int(data["num_multiprocessors"]), family=data["family"],
        )  # fmt: skip
        return GpuEntry(
            device=device, title=data["title"], vendor=data["vendor"], per=data["per"], memory_label_gb=data["memory_label_gb"],
            intra_link=data["intra_link"], inter_link=data["inter_link"], pcie_link=data["pcie_link"],
            nvlink_link=data.get("nvlink_link", ""), gpus_per_node=data["gpus_per_node"], device_names=tuple(data["device_names"]),
            aliases=tuple(data.get("aliases", ())), presumed_aliases=tuple(data.get("presumed_aliases", ())),
            shared_aliases=tuple(data.get("shared_aliases", ())), source=data["source"], checked_on=data["checked_on"],
            checks=tuple(data["checks"]), note=data.get("note", ""),
        )  # fmt: skip
    except KeyError as error:
        raise ValueError(f"{file}: {error} is missing") from error


def _links_of_file(data: dict[str, Any], file: str) -> Iterator[LinkEntry]:
    try:
        for item in data.get("link", ()):
            yield _link_entry(data, item, count=0)
        for item in data.get("adapter", ()):
            for count in item["counts"]:
                yield _link_entry(data, item, count=count)
    except KeyError as error:
        raise ValueError(f"{file}: {error} is missing") from error


def _link_entry(data: dict[str, Any], item: dict[str, Any], *, count: int) -> LinkEntry:
    """A link, or (count > 0) that many adapters of a kind in one node."""
    name = f"{item['name']}-{count}x" if count else item["name"]
    latency_s = float(item.get("latency_s", data["latency_s"]))
    link = Link(name=name, bytes_per_s=max(count, 1) * float(item["bytes_per_s"]), latency_s=latency_s, kind=data["kind"])
    return LinkEntry(
        link=link, where=data["where"], source=data["source"], checked_on=data["checked_on"], note=item.get("note", ""),
        aliases=tuple(item.get(f"aliases_{count}x" if count else "aliases", ())), family=item["name"] if count else "",
    )  # fmt: skip
