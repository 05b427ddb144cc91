"""One row of a table of runs -> workload, cluster, plan. Every default taken is named."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from advisor.measure.known_networks import KnownNetwork, known_network
from advisor.measure.presumed_shapes import presumed_shape
from advisor.measure.row_notes import with_notes
from advisor.measure.run_batch import states_batch
from advisor.measure.run_era import RECENT_FAMILIES, runtime_of_its_time
from advisor.measure.run_layout import ReadRow
from advisor.measure.run_plan import network_plan, transformer_plan
from advisor.measure.run_shapes import find_shape, known_shapes, plain_name, transformer_shape
from advisor.measure.run_values import Fields, Record, Skip, is_number
from cost_models.catalogue import default_gpus_per_node, default_links, find_gpu, parse_link
from cost_models.traits import Runtime, load_runtime, runtime_names
from cost_models.transformer import transformer_workload
from cost_models.types import Cluster, Device, Link, Workload

_MOST_GPUS = 10**9
#: Spellings, the first that occurs counts, and the precision they mean.
_PRECISIONS = (
    (r"fp4", "fp4"), (r"fp8|^container default", "fp8"), (r"tf32", "tf32"), (r"bf16|bfloat16", "bf16"), (r"fp16|float16|amp|half|mixed|^16|^o[12]\b", "fp16"),
    (r"fp32|float32|single|fp64|float64|double|^32|^o0\b", "fp32"),
)  # fmt: skip
#: What takes the place of a precision that a device has no units for.
_NEXT_PRECISION = {"fp4": "fp8", "fp8": "bf16", "bf16": "fp16", "fp16": "fp32", "tf32": "fp32"}
_TEXTS = ("model_name", "moe")  # columns of a table of shapes that hold no numbers


@dataclass(slots=True)
class RowReader:
    """Reads rows; equal models and clusters become one object, so that they are flattened once."""

    arch: pd.DataFrame | None = None
    _workloads: dict[tuple[object, ...], Workload] = field(default_factory=dict)
    _clusters: dict[tuple[object, ...], tuple[Cluster, tuple[str, ...]]] = field(default_factory=dict)
    _shapes: dict[str, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for table in (known_shapes(), *([] if self.arch is None else [self.arch])):
            for shape in table.to_dict("records"):
                stated = {str(k): v for k, v in shape.items() if is_number(v) or (k in _TEXTS and isinstance(v, str))}
                name = plain_name(str(shape["model_name"]))
                self._shapes[name] = {**self._shapes.get(name, {}), **stated}

    def read(self, record: Record) -> ReadRow:
        """What a row says, and the plain defaults of what it leaves open.

        Raises:
            Skip: the row can't be priced.
        """
        try:
            return self._read(Fields(with_notes(record)))
        except ValueError as error:
            raise Skip(f"the row contradicts itself: {error}") from error

    def _read(self, row: Fields) -> ReadRow:
        device = _device(row)
        stated, presumed = row.text("runtime"), runtime_of(row.text("source_repo_or_doc"), row.text("framework"))
        runtime = load_runtime(stated) if stated else runtime_of_its_time(row, presumed, device.family)
        num_gpus = int(row.number("n_gpus") or 0)
        if not 1 <= num_gpus <= _MOST_GPUS:
            raise Skip(f"the number of GPUs is {row.text('n_gpus') or 'not stated'}")
        cluster = self._cluster(row, device, num_gpus)
        workload, network = self._workload(row, runtime, device)
        known: dict[str, Any] = {"runtime": runtime, "num_gpus": num_gpus, "workload": workload, "cluster": cluster}
        plan_of = (
            functools.partial(transformer_plan, **known) if network is None else functools.partial(network_plan, network=network, **known)
        )
        return ReadRow(
            row=row, workload=workload, cluster=cluster, plan=plan_of(row), states_batch=states_batch(row), runtime=runtime,
            plan_of=plan_of, is_transformer=network is None, units_per_sample=network.units_per_sample(row.text("notes")) if network else 1.0,
        )  # fmt: skip

    def _cluster(self, row: Fields, device: Device, num_gpus: int) -> Cluster:
        per_node = int(row.or_default("gpus_per_node", min(num_gpus, default_gpus_per_node(device.name))))
        domain = max(default_gpus_per_node(device.name), per_node) if default_gpus_per_node(device.name) > 8 else max(per_node, 1)
        key = (device.name, domain, num_gpus, row.text("intra_link"), row.text("inter_link"))
        if key not in self._clusters:
            named = Fields(row.record)
            cluster = Cluster(
                device=device, gpus_per_node=domain, num_nodes=math.ceil(num_gpus / domain), intra=_link(named, device, "intra", domain),
                inter=_link(named, device, "inter", domain),
            )  # fmt: skip
            unused = {"intra_link": num_gpus == 1, "inter_link": num_gpus <= domain}
            self._clusters[key] = cluster, tuple(name for name in named.assumed if not unused.get(name, False))
        cluster, assumed = self._clusters[key]
        row.assumed += assumed
        return cluster

    def _workload(self, row: Fields, runtime: Runtime, device: Device) -> tuple[Workload, KnownNetwork | None]:
        """The model, and the network that it is by its name, if it is no transformer by its sizes."""
        precision = _precision(row, device, runtime)
        name = row.text("model_name")
        arch = find_shape(name, self._shapes) or presumed_shape(row)
        if row.number("hidden") is None and not is_number(arch.get("hidden")):
            is_autocast = "amp" in row.text("precision").lower() and precision == "fp16"  # Apex's own way of "amp" is known for BERT alone
            network = self._network(row, name, "amp16" if is_autocast else precision)
            return network.workload, network
        shape = transformer_shape(row, arch, runtime, recent=device.family in RECENT_FAMILIES)
        optimizer = row.text("optimizer_name") or "adamw"
        key = (shape, precision, optimizer, runtime.name)
        if key not in self._workloads:
            self._workloads[key] = transformer_workload(shape, name=name, precision=precision, optimizer=optimizer, runtime=runtime.name)
        return self._workloads[key], None

    def _network(self, row: Fields, name: str, precision: str) -> KnownNetwork:
        found = known_network(name, precision, int(row.number("seq_len") or 0))
        if found is None:
            raise Skip(f'the shape of "{name}" is neither stated nor known')
        row.assumed += found.assumed
        workload = self._workloads.setdefault((name, precision, found.workload.seq_len), found.workload)
        return dataclasses.replace(found, workload=workload)


@functools.cache
def runtime_of(source: str, framework: str) -> Runtime:
    """Runtime whose traits a row gets: its source's (of several, the one that lists the framework), else its framework's, else generic."""
    runtimes = [load_runtime(name) for name in runtime_names()]
    matches = [(_longest(source, r.sources), _longest(framework, r.frameworks), r) for r in runtimes]
    by_source = [m for m in matches if m[0]]
    by_framework = [m for m in matches if m[1]]
    for found in (by_source, by_framework):
        if found:
            return max(found, key=lambda m: m[:2])[2]
    return load_runtime("torch")


def _longest(text: str, starts: tuple[str, ...]) -> int:
    """Length of the longest of the spellings that the text starts with, in capitals or not; 0 if none."""
    return max((len(s) for s in starts if text.lower().startswith(s.lower())), default=0)


def _device(row: Fields) -> Device:
    name = re.split(r"^mixed | \+ ", row.text("gpu"))[-1 if not row.text("gpu").startswith("mixed ") else 1]
    try:
        return find_gpu(name, memory_gb=row.number("gpu_mem_gb"))
    except ValueError as error:
        raise Skip(f'unknown GPU "{row.text("gpu")}": {error}') from error


def _link(row: Fields, device: Device, where: str, gpus_per_node: int) -> Link:
    text = row.text(f"{where}_link")
    usual = default_links(device.name)[0 if where == "intra" else 1]
    if not text:
        row.assumed.append(f"{where}_link")
        return usual
    try:
        link = parse_link(text, where=where, gpu=device.name, gpus_per_node=gpus_per_node)
    except ValueError:
        row.assumed.append(f"{where}_link")
        return usual
    if where == "inter" and link.bytes_per_s in (25e9, 50e9) and link.kind in ("infiniband", "roce") and "node" not in text.lower():
        row.assumed.append("inter_link")  # "400G" alone is the speed of an adapter; such nodes have one per GPU
        return dataclasses.replace(link, name=f"{link.name} per GPU", bytes_per_s=link.bytes_per_s * gpus_per_node)
    return link


def _precision(row: Fields, device: Device, runtime: Runtime) -> str:
    """The row's precision, or the next one that its device has units for, which is then named."""
    text = row.text("precision").lower().removeprefix("torch.")
    stated = next((name for pattern, name in _PRECISIONS if re.search(pattern, text)), "")
    if not stated:
        row.assumed.append(f'precision ("{text}" is not known)' if text else "precision")
        stated = "bf16" if not text and "bf16" in device.peak_flops_per_s else "fp16"
    found = stated
    while found in _NEXT_PRECISION and found not in device.peak_flops_per_s:
        found = _NEXT_PRECISION[found]
    if found != stated and (stated, found) != ("tf32", "fp32") and text:
        row.assumed.append(f"precision = {found} (no {stated} units)")
    return "amp16" if found == "fp16" and "amp" in text and runtime.autocast else found
