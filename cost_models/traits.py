"""Runtime: what a training framework does about overlap, buckets, accumulation, fusion, recomputation and pipelines, as data.

One file per runtime in `runtimes/`. Traits are read from a framework's code or documentation; what is only fitted lives in the
calibration. Quirks are conditions seen in one framework's published runs; they are off for all others.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

PIPELINE_CUTS = ("even", "balanced", "greedy")
#: Kernels of fused attention: FlashAttention in Triton, FlashAttention-2 (both written for Ampere), or ones written for the GPU's family
#: (cuDNN, FlashAttention-3).
ATTENTION_KERNELS = ("triton", "flash2", "native")
#: "attention"; a "share" of the forward pass with its collectives; or a share of the weight "products" with everything that moves memory
#: and the gathers before them, while attention and sums over tensor ranks are kept.
SELECTIVE = ("attention", "share", "products")
#: Recomputation, from none to all.
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Traits of one runtime. Shares and flags are 0..1."""

    name: str
    title: str = ""
    source: str = ""  # where the traits were read
    calibrated_as: str = ""  # runtime whose fitted factors it shares; "" its own name
    frameworks: tuple[str, ...] = ()  # spellings in the column "framework" of run tables
    sources: tuple[str, ...] = ()  # starts of the column "source_repo_or_doc" of run tables
    sequence_parallel: float = 0.0  # tensor parallelism comes with sequence parallelism unless said otherwise
    whole_outside: float = 0.0  # under tensor parallelism sequences and logits are whole outside the layers: gathered, summed by all-reduce
    equal_tables: float = 0.0  # embeddings and heads are divided only untied, and where tensor x shard ranks divide their rows
    reduces_whole_gradients: float = 0.0  # sequence parallelism all-reduces gradients of what every tensor rank holds whole, one by one
    regathers_weight_gradient: float = 0.0  # sequence parallelism gathers the input again for the weight gradient
    tp_overlap: float = (
        0.0  # sequence-parallel gathers and scatters of layers without experts run under their products, in a part per tensor rank
    )
    dp_overlap: float = 1.0  # the gradient reduction runs under the last backward pass
    zero_overlap: float = 1.0  # the same where optimizer states are sharded (ZeRO-1, 2)
    reduces_every_micro_batch: float = 0.0  # ZeRO-2 reduces gradients after each micro-batch
    gradient_reduce_bytes: float = 4.0  # per element in the gradient reduction; 0: as the gradients are kept
    bucket_bytes: float = 0.0  # gradients all-reduced together; 0: those of a sharding unit
    pipeline_reduces_tensors: float = 0.0  # pipelines all-reduce gradients between replicas tensor by tensor
    fsdp_reduce_bytes: float = 4.0  # per element in FSDP's reduce-scatter; 0: as the gradients are kept
    fsdp_gathers: float = 2.0  # parameter gathers per micro-batch (1: kept between forward and backward)
    regathers_root: float = 0.0  # what lies outside the layers is gathered as often as they are (FSDP: once)
    zero2_gathers: float = 0.0  # stage 2 is FSDP without resharding: gathers in each forward pass, not after the optimizer step
    zero1_broadcasts: float = 0.0  # stage 1 all-reduces gradients, then broadcasts each parameter (ZeroRedundancyOptimizer)
    zero_all_reduces: float = 0.0  # stages 1 and 2 all-reduce gradients and keep their part of them (DeepSpeed)
    pads_rows: float = 0.0  # sharded parameters are cut along their first dimension into equal, padded parts (FSDP2)
    tied_reduce_bytes: float = (
        0.0  # per element as first and last pipeline stage all-reduce gradients of embeddings they share; 0: not priced
    )
    dispatches_once_per_node: float = (
        0.0  # tokens reach experts by DeepEP or HybridEP: to each node once, copied inside; else a plain all-to-all
    )
    early_stop: float = 0.0  # full recomputation ends before a layer's last sum over tensor ranks (torch's non-reentrant checkpoint)
    accumulate_bytes_per_param: float = 0.0  # traffic per micro-batch of adding into an fp32 gradient buffer
    memory_traffic_share: float = 1.0  # of the eager traffic of memory-bound operators left by fused or compiled kernels
    kernels_share: float = 1.0  # of the eager launches left by fused or compiled kernels
    fused_softmax_multiple: float = 0.0  # unfused attention's softmax kernel needs heads x samples on a device to be a multiple of this
    selective: str = "attention"  # what selective recomputation re-runs: one of SELECTIVE
    selective_share: float = 0.28  # of the forward pass, for "share"; of the weight products, for "products"
    pipeline_cut: str = "even"  # how layers go to stages: one of PIPELINE_CUTS
    virtual_stages: int = 1  # presumed where a run doesn't say
    zero_stage: int = 0  # the same
    divides_layers: bool = False  # its users divide what is too large by tensor parallelism and pipelines; else they shard it
    compiled: bool = False  # torch.compile is presumed where a run doesn't say
    autocast: bool = False  # "amp" means torch.autocast over fp32 weights, not the framework's own 16-bit training
    splits_batch: bool = False  # pipelines cut a rank's stated batch into micro-batches of one sample (torch.distributed.pipelining)
    whole_batch: bool = False  # a rank's whole batch is presumed to be one micro-batch where a run doesn't say
    flash_attention: bool = True  # presumed where a run doesn't say
    presumed_recompute: tuple[str, ...] = ("none", "full")  # of RECOMPUTE; where a run doesn't say, the first that lets it fit
    frozen: bool = False  # its code is the published one on whatever GPU it runs
    successors: Mapping[str, str] = field(default_factory=dict)  # GPU family -> runtime that its project had become by then
    attention_kernels: str = "flash2"  # one of ATTENTION_KERNELS
    quirks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)  # traits of the memory model

    def __post_init__(self) -> None:
        if self.pipeline_cut not in PIPELINE_CUTS:
            raise ValueError(f"runtime {self.name}: pipeline_cut {self.pipeline_cut!r} is none of {', '.join(PIPELINE_CUTS)}")
        if self.attention_kernels not in ATTENTION_KERNELS:
            raise ValueError(f"runtime {self.name}: attention_kernels {self.attention_kernels!r} is none of {', '.join(ATTENTION_KERNELS)}")
        if self.selective not in SELECTIVE:
            raise ValueError(f"runtime {self.name}: selective {self.selective!r} is none of {', '.join(SELECTIVE)}")
        for mode in self.presumed_recompute:
            if mode not in RECOMPUTE:
                raise ValueError(f"runtime {self.name}: presumed_recompute {mode!r} is none of {', '.join(RECOMPUTE)}")


@functools.cache
def runtime_names() -> tuple[str, ...]:
    """Names of the runtimes that have a file, sorted."""
    folder = resources.files("cost_models") / "runtimes"
    stems = (f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))
    return tuple(sorted(stem for stem in stems if "." not in stem))


@functools.cache
def load_runtime(name: str) -> Runtime:
    """Read the traits of a runtime.

    Raises:
        ValueError: no such runtime, or a trait in its file that doesn't exist.
    """
    names = runtime_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3)
        raise ValueError(f"unknown runtime {name!r}; " + (f"near: {', '.join(near)}" if near else f"known: {', '.join(names)}"))
    data = tomllib.loads((resources.files("cost_models") / "runtimes" / f"{name}.toml").read_text(encoding="utf8"))
    unknown = sorted(set(data) - {f.name for f in dataclasses.fields(Runtime)})
    if unknown:
        raise ValueError(f"runtime {name} names traits that don't exist: {', '.join(unknown)}")
    for key in ("frameworks", "sources", "presumed_recompute"):
        if key in data:
            data[key] = tuple(data[key])
    return Runtime(name=name, **data)
