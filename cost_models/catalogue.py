"""The catalogue of GPUs and links: data files with sources, looked up by any usual spelling.

An unknown name is a `ValueError` that names the nearest entries; there is never a silent stand-in.
Figures are line rates and dense peaks; what is achieved of them is a calibration constant.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable
from typing import Any

from cost_models import hardware_data
from cost_models.hardware_data import GpuEntry, LinkEntry, normalize
from cost_models.link_text import read_inter, read_intra
from cost_models.types import Device, Link

_OWN_FILE_HINT = "Or describe your hardware in a cluster file (--cluster FILE.toml)."
_WELL_KNOWN_GPUS = ("h100-sxm-80gb", "h200-sxm-141gb", "a100-sxm-80gb", "b200-180gb", "l4", "rtx-4090", "mi300x")
_SAME_MEMORY = 0.15  # by how much a capacity in a name may miss the label
_WELL_KNOWN_LINKS = ("nvlink-4", "nvlink-3", "pcie-4-x16", "ib-ndr-8x", "ib-hdr-4x", "roce-1600", "efa-3200", "ethernet-100g")


def gpu_names() -> tuple[str, ...]:
    """Catalogue names of all GPUs."""
    return tuple(name for name, entry in hardware_data.gpu_entries().items() if entry.device.family != "cpu")


def link_names(where: str = "") -> tuple[str, ...]:
    """Catalogue names of all links; `where` is "intra", "inter" or "" for both."""
    return tuple(name for name, entry in hardware_data.link_entries().items() if where in ("", entry.where))


def find_gpu(name: str, *, memory_gb: float | None = None) -> Device:
    """The device that a name means ("a100-sxm-80gb", "A100 80GB", "NVIDIA H100 80GB HBM3", "cpu").

    Args:
        name: catalogue name, alias or device name; case and punctuation don't matter.
        memory_gb: capacity on the box, to choose where the name leaves it open ("A100" with 40).

    Raises:
        ValueError: unknown; the message names the nearest entries.
    """
    return _gpu_entry(name, memory_gb).device


def is_presumed(name: str) -> bool:
    """Whether a GPU's name leaves something open ("A100": form factor and memory), so that the answer is an assumption."""
    key = normalize(name)
    presumed, settled = hardware_data.presumed_gpu_aliases(), hardware_data.gpu_aliases()
    return key not in settled and (key in presumed or _plain_gpu_name(key)[0] in presumed)


def gpu_for_device_name(device_name: str, *, memory_bytes: float | None = None) -> str:
    """Catalogue name of the card that a driver reports, e.g. "NVIDIA H200" -> "h200-sxm-141gb".

    Args:
        device_name: as CUDA, NVML or HIP report it.
        memory_bytes: capacity as the driver reports it, to tell cards of one name apart.

    Raises:
        ValueError: unknown, or a MIG slice.
    """
    if re.search(r"\bMIG\b", device_name):
        raise ValueError(f'"{device_name}" is a slice of a GPU (MIG), which the catalogue cannot price. {_OWN_FILE_HINT}')
    memory_gb = None if memory_bytes is None else memory_bytes / 2**30
    return _gpu_entry(device_name, memory_gb).device.name


def find_link(name: str) -> Link:
    """The link that a catalogue name or alias means; "ib-hdr-3x" and the like work for any number of adapters.

    Raises:
        ValueError: unknown; the message names the nearest entries.
    """
    return _link_entry(name).link


def default_links(gpu: str) -> tuple[Link, Link]:
    """Links inside and between nodes that this GPU usually has: an assumption, to be shown as one.

    Raises:
        ValueError: unknown GPU.
    """
    entry = _gpu_entry(gpu)
    return find_link(entry.intra_link), find_link(entry.inter_link)


def default_gpus_per_node(gpu: str) -> int:
    """GPUs of the usual node (of the NVLink domain for NVL72 racks).

    Raises:
        ValueError: unknown GPU.
    """
    return _gpu_entry(gpu).gpus_per_node


def describe_gpu(name: str) -> dict[str, Any]:
    """Everything the catalogue knows of a GPU, with its sources.

    Raises:
        ValueError: unknown GPU.
    """
    entry = _gpu_entry(name)
    device = entry.device
    return {
        "name": device.name, "title": entry.title, "vendor": entry.vendor, "family": device.family, "per": entry.per,
        "memory_label_gb": entry.memory_label_gb, "memory_bytes": device.memory_bytes, "memory_bytes_per_s": device.memory_bytes_per_s,
        "num_multiprocessors": device.num_multiprocessors, "peak_flops_per_s": dict(device.peak_flops_per_s),
        "intra_link": entry.intra_link, "inter_link": entry.inter_link, "gpus_per_node": entry.gpus_per_node,
        "device_names": list(entry.device_names), "aliases": [*entry.aliases, *entry.presumed_aliases],
        "source": entry.source, "checked_on": entry.checked_on.isoformat(), "checks": list(entry.checks), "note": entry.note,
    }  # fmt: skip


def describe_link(name: str) -> dict[str, Any]:
    """Everything the catalogue knows of a link, with its source.

    Raises:
        ValueError: unknown link.
    """
    entry = _link_entry(name)
    link = entry.link
    return {
        "name": link.name, "kind": link.kind, "where": entry.where, "bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s,
        "aliases": list(entry.aliases), "source": entry.source, "checked_on": entry.checked_on.isoformat(), "note": entry.note,
    }  # fmt: skip


def parse_link(text: str, *, where: str, gpu: str = "", gpus_per_node: int = 8) -> Link:
    """A link from free text: "ib-hdr-4x", "NVLink", "PCIe", "1600 Gbps/node RoCE", "400 Gb/s RDMA per GPU", "Omni-Path 4x".

    Args:
        text: what the user or a table says; "" means the usual link of `gpu`.
        where: "intra" (between GPUs of a node) or "inter" (between nodes).
        gpu: GPU the text is about; decides which NVLink or PCIe a bare word means.
        gpus_per_node: what "per GPU" is multiplied by to get the rate of a node.

    Raises:
        ValueError: the text says neither a known link nor a rate.
    """
    if where not in ("intra", "inter"):
        raise ValueError(f'where is "{where}"; it must be "intra" or "inter"')
    entry = _gpu_entry(gpu) if gpu else None
    if not text.strip():
        if entry is None:
            raise ValueError("no link was named, and without a GPU there is no usual one")
        return find_link(entry.intra_link if where == "intra" else entry.inter_link)
    name = hardware_data.link_aliases().get(normalize(text)) or _counted(text)
    if name is not None:
        return _checked_place(_link_entry(name), where, text)
    link = read_intra(text, entry) if where == "intra" else read_inter(text, gpus_per_node)
    if link is None:
        raise ValueError(_unknown_link(text, where))
    return link


def _gpu_entry(name: str, memory_gb: float | None = None) -> GpuEntry:
    entries, key = hardware_data.gpu_entries(), normalize(name)
    exact = hardware_data.gpu_aliases().get(key)
    candidates = hardware_data.shared_gpu_aliases().get(key, ())
    if memory_gb is not None and candidates:  # the label when given by people, up to 7 % less when reported by a driver
        return entries[min(candidates, key=lambda n: abs(entries[n].memory_label_gb - memory_gb))]
    if exact or candidates:
        return entries[exact or candidates[0]]
    plain, memory_label_gb = _plain_gpu_name(key)
    if plain != key and plain in _whole_names().values():
        entry = _gpu_entry(plain, memory_gb or memory_label_gb)
        if memory_label_gb is None or abs(entry.memory_label_gb / memory_label_gb - 1) < _SAME_MEMORY:
            return entry
    if key.startswith("mixed") or ("+" in name and len(re.findall(r"[a-z]{1,3}\d{1,4}", key)) > 1):
        raise ValueError(f'"{name}" names different GPUs; one cluster has equal nodes of equal GPUs. Plan each part by itself.')
    raise ValueError(_unknown_gpu(name))


def _plain_gpu_name(key: str) -> tuple[str, float | None]:
    """A normalized name without how many cards ("8x-a100"), capacity ("v100-16gb", also returned) and odd hyphens ("rtx-2080ti")."""
    plain = re.sub(r"^\d{1,2}-?x-?|-x-?\d{1,2}$", "", key)
    capacity = re.search(r"-?\b(\d+)gb\b", plain)
    if capacity and plain.replace("-", "") not in _whole_names():
        plain = plain.replace(capacity[0], "", 1).strip("-")
    return _whole_names().get(plain.replace("-", ""), plain), float(capacity[1]) if capacity else None


@functools.cache
def _whole_names() -> dict[str, str]:
    """Known spellings without their hyphens -> the spelling."""
    return {key.replace("-", ""): key for key in (*hardware_data.shared_gpu_aliases(), *hardware_data.gpu_aliases())}


def _unknown_gpu(name: str) -> str:
    spellings = {**hardware_data.presumed_gpu_aliases(), **hardware_data.gpu_aliases()}
    near = _nearest(normalize(name), spellings)
    known = f"Nearest: {', '.join(near)}." if near else f"It has {len(gpu_names())}, such as {', '.join(_WELL_KNOWN_GPUS)}."
    return f'The catalogue has no GPU "{name}". {known} {_OWN_FILE_HINT}'


def _link_entry(name: str) -> LinkEntry:
    entries = hardware_data.link_entries()
    known = hardware_data.link_aliases().get(normalize(name)) or _counted(name)
    if known is None:
        raise ValueError(_unknown_link(name, ""))
    if known in entries:
        return entries[known]
    family, count = known.rsplit("-", 1)
    like = next(e for e in entries.values() if e.family == family)
    one, factor = entries[f"{family}-1x"].link, int(count[:-1])
    link = Link(name=known, bytes_per_s=factor * one.bytes_per_s, latency_s=one.latency_s, kind=one.kind)
    return LinkEntry(link=link, where=like.where, source=like.source, checked_on=like.checked_on, family=family)


def _counted(text: str) -> str | None:
    """Canonical name of "<family>-<n>x" for any n from 1 to 128, else None."""
    match = re.fullmatch(r"(.+)-(\d{1,3})x", normalize(text))
    families = {e.family for e in hardware_data.link_entries().values() if e.family}
    if match and match[1] in families and 1 <= int(match[2]) <= 128:
        return f"{match[1]}-{int(match[2])}x"
    return None


def _checked_place(entry: LinkEntry, where: str, text: str) -> Link:
    if entry.where != where:
        place = {"intra": "inside a node", "inter": "between nodes"}
        raise ValueError(f'"{text}" is a link {place[entry.where]}, not {place[where]}.')
    return entry.link


def _unknown_link(text: str, where: str) -> str:
    aliases = {k: n for k, n in hardware_data.link_aliases().items() if where in ("", hardware_data.link_entries()[n].where)}
    near = _nearest(normalize(text), aliases) or [n for n in _WELL_KNOWN_LINKS if n in aliases.values()]
    return f'"{text}" is no known link and states no rate. Try {", ".join(near)}, or a rate such as "400 Gb/s". {_OWN_FILE_HINT}'


def _nearest(key: str, spellings: dict[str, str], count: int = 5) -> list[str]:
    """Catalogue names whose spellings are closest to `key`, best first."""
    close: Iterable[str] = difflib.get_close_matches(key, spellings, n=3 * count, cutoff=0.6)
    inside = [s for s in spellings if len(key) > 1 and (key in s or (len(s) > 2 and s in key))]
    return list(dict.fromkeys(spellings[s] for s in [*inside, *close]))[:count]
