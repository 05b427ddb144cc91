"""Reads what people write about links: "NVLink", "8x HDR IB 200Gb/s", "800 Gbps/node". Private to the catalogue."""

from __future__ import annotations

import re

from cost_models import hardware_data
from cost_models.hardware_data import GpuEntry
from cost_models.types import Link

#: Words -> kind of the link, in order; the first that occurs counts.
_KINDS = (
    (r"roce|tomahawk|spectrum-?x", "roce"),
    (r"\befa\b", "efa"),
    (r"infiniband|\bib\b|hdr|ndr|edr|xdr|mellanox|cx-?\d", "infiniband"),
    (r"omni-?path|\bopa\b|slingshot", "fabric"),
    (r"rdma", "infiniband"),
    (r"ethernet|\d+\s*gbe\b|\btcp\b", "ethernet"),
)
_ADAPTERS = (
    (r"hdr-?100", "ib-hdr100"), (r"ndr-?200", "ib-ndr200"), (r"\bxdr", "ib-xdr"), (r"\bndr", "ib-ndr"), (r"\bhdr", "ib-hdr"),
    (r"\bedr", "ib-edr"), (r"\bfdr", "ib-fdr"), (r"omni-?path|\bopa\b", "omni-path"), (r"slingshot", "slingshot"),
)  # fmt: skip
_LIKE = {"roce": "roce-100", "efa": "efa-100", "infiniband": "ib-edr-1x", "fabric": "omni-path-1x", "ethernet": "ethernet-10g"}


def read_intra(text: str, gpu: GpuEntry | None) -> Link | None:
    """A link inside a node, or None when the text says nothing usable."""
    lower, links = text.casefold(), hardware_data.link_entries()
    if "nvlink" in lower or "nvl72" in lower or "nvswitch" in lower or "sxm" in lower:
        generation = re.search(r"nvlink\W*(?:gen\W*)?(\d)\b", lower)
        if generation and f"nvlink-{generation[1]}" in links:
            return links[f"nvlink-{generation[1]}"].link
        if gpu is not None and gpu.nvlink_link:
            return links[gpu.nvlink_link].link
        return None
    if "pcie" in lower or "pci express" in lower or "pci-e" in lower:
        return _pcie(lower, gpu)
    if ("xgmi" in lower or "infinity fabric" in lower) and gpu is not None and gpu.intra_link.startswith("xgmi"):
        return links[gpu.intra_link].link
    rate = _bytes_per_s(text)
    if rate is None:
        return None
    latency_s = links["nvlink-4" if rate > 100e9 else "pcie-4-x16"].link.latency_s
    return Link(name=f"intra-{rate / 1e9:g}GBps", bytes_per_s=rate, latency_s=latency_s, kind="nvlink" if rate > 100e9 else "pcie")


def _pcie(lower: str, gpu: GpuEntry | None) -> Link | None:
    links = hardware_data.link_entries()
    generation = re.search(r"(?:pcie|pci express|pci-e)\W*(?:gen\W*)?([345])", lower)
    if generation:
        name = f"pcie-{generation[1]}-x16"
    elif gpu is not None and gpu.pcie_link.startswith("pcie"):
        name = gpu.pcie_link
    else:
        return None
    no_p2p = re.search(r"(?:p2p|peer)\W*(?:disabled|off|no)|(?:no|without)\W*(?:p2p|peer)", lower)
    return links[f"{name}-host" if no_p2p else name].link


def read_inter(text: str, gpus_per_node: int) -> Link | None:
    """The network of one node, or None when the text says nothing usable.

    "per GPU" multiplies by the GPUs of a node; a leading or trailing "4x" multiplies by adapters; of a range ("10-50 Gb/s")
    the smaller rate counts, since a ring is as slow as its slowest link.
    """
    lower, links = text.casefold(), hardware_data.link_entries()
    count = _count(lower)
    if "per gpu" in lower or "/gpu" in lower or "a gpu" in lower:
        count *= gpus_per_node
    adapter = next((name for pattern, name in _ADAPTERS if re.search(pattern, lower)), None)
    if adapter is not None:
        one = links[f"{adapter}-1x"].link
        return Link(name=f"{adapter}-{count}x", bytes_per_s=count * one.bytes_per_s, latency_s=one.latency_s, kind=one.kind)
    kind = next((kind for pattern, kind in _KINDS if re.search(pattern, lower)), "")
    rate = _bytes_per_s(text)
    if rate is None:
        generation = re.search(r"\bp([45])", lower) if kind == "efa" else None
        return links["efa-3200" if generation[1] == "5" else "efa-400"].link if generation else None
    return _named_like(kind, rate, count)


def _named_like(kind: str, adapter_bytes_per_s: float, count: int) -> Link:
    """The catalogue's link of this kind and rate, else one of that rate with the kind's latency."""
    links = hardware_data.link_entries()
    rate = adapter_bytes_per_s * count
    same = [e for e in links.values() if e.where == "inter" and e.link.kind == kind and abs(e.link.bytes_per_s - rate) < 1e-6 * rate]
    for entry in sorted(same, key=lambda e: not e.link.name.endswith(f"-{count}x")):  # of equal rates, the one with as many adapters
        return entry.link
    latency_s = links[_LIKE.get(kind, "ib-edr-1x")].link.latency_s
    return Link(name=f"{kind or 'network'}-{rate * 8 / 1e9:g}g", bytes_per_s=rate, latency_s=latency_s, kind=kind)


def _count(lower: str) -> int:
    match = re.search(r"(?<![\w.])(\d{1,3})\s*[x×](?![a-z_])", lower) or re.search(r"\b[x×](\d{1,3})\b", lower)
    return max(int(match[1]), 1) if match else 1


def _bytes_per_s(text: str) -> float | None:
    """First rate in the text. "Gb/s", "Gbps", "Gbit/s", "200G" are bits; "GB/s" and "GiB/s" are bytes (the case of B counts)."""
    match = re.search(
        r"(\d+(?:\.\d+)?)(?:\s*-\s*\d+(?:\.\d+)?)?\s*([TGMtgm])i?(B/s|Bps|b/s|bps|bit/s|bits/s|bit|b|[Bb][Ee]|)(?![A-Za-z])", text
    )
    if not match:
        return None
    scale = {"T": 1e12, "G": 1e9, "M": 1e6}[match[2].upper()]
    is_bytes = match[3] in ("B/s", "Bps")
    rate = float(match[1]) * scale / (1 if is_bytes else 8)
    return rate if rate > 0 else None
