"""The values that cost models take and give: Workload, Cluster, PlanTable, Estimates.

All frozen, all in base units (bytes, seconds, flops), every unit in the name. NumPy and the standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Hotspot classes; every operator belongs to exactly one. The names appear in reports and in `report.json`.
OP_CLASSES = (
    "convolution", "matmul", "attention", "embedding", "normalization", "elementwise", "reduction", "recurrent",
    "optimizer", "copy-host-to-device", "copy-device-to-host", "copy-device-to-device", "copy-same-device",
    "collective", "idle", "other",
)  # fmt: skip
#: How an operator is priced: a (batched) matrix product, a convolution as an implicit product, fused attention, bytes.
PRICING_KINDS = ("gemm", "convolution", "attention", "memory")
#: Phases of a step an operator may belong to.
PHASES = ("forward", "backward", "optimizer")
#: Which dimension of an operator grows with the micro-batch.
BATCH_DIMS = ("none", "m", "n", "k", "batch")
#: What tensor parallelism divides: a GEMM dimension; "inner" = activation bytes between a column- and a row-parallel
#: weight; "sequence" = activation bytes that only sequence parallelism divides; "none" = replicated work.
TP_SPLITS = ("none", "m", "n", "k", "batch", "inner", "sequence")
RECOMPUTES = ("none", "selective", "full")
SCHEDULES = ("none", "gpipe", "1f1b", "interleaved")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable:
    """Operators of one layer group and one sample (micro-batch 1), one entry per call; all arrays have equal length.

    Sizes are those of ONE sample; `batch_dim` names the dimension that is multiplied by the micro-batch.
    """

    op_class: IntArray  # index into OP_CLASSES
    kind: IntArray  # index into PRICING_KINDS
    phase: IntArray  # index into PHASES
    batch_dim: IntArray  # index into BATCH_DIMS
    tp_split: IntArray  # index into TP_SPLITS
    m: FloatArray  # rows of the product (attention: query positions)
    n: FloatArray  # columns of the product (attention: key positions)
    k: FloatArray  # inner dimension (attention: head size)
    batch: FloatArray  # independent products (attention: heads; grouped convolution: groups)
    work_share: FloatArray  # share of the m*n*k work really done: 0.5 for causal attention, else 1
    bytes_per_sample: FloatArray  # device memory read and written, growing with the micro-batch
    bytes_fixed: FloatArray  # device memory read and written whatever the micro-batch (weights)
    num_kernels: FloatArray  # device kernels launched

    def __post_init__(self) -> None:
        lengths = {f.name: len(getattr(self, f.name)) for f in dataclasses.fields(self)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"operator columns differ in length: {lengths}")

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamShape:
    """One parameter tensor, as sharding engines cut it: along its first dimension."""

    rows: float  # size of the first dimension
    num_elements: float
    trainable: bool = True
    tp_split: str = "none"  # "rows" or "columns" divided by tensor parallelism; "none": whole on every rank; "bias": likewise, added to a sum over ranks
    tp_shares: tuple[float, ...] = (1.0,)  # of its rows: products side by side (q, k and v in one) are divided one by one

    @property
    def is_divided(self) -> bool:
        return self.tp_split in ("rows", "columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Equal layers that follow each other (or one prefix, suffix or ragged stage, with `num_repeats` 1).

    Everything is per repeat; saved bytes are per sample and split by what divides them: `inner` by tensor parallelism,
    `sequence` by tensor parallelism only with sequence parallelism, the rest by neither.
    """

    name: str  # module path, "layers.*" for repeated ones
    num_repeats: int
    ops: OpTable
    num_params: float  # unique parameters, all of them
    num_trainable_params: float
    num_tp_params: float = 0.0  # of num_params: divided by tensor parallelism
    num_expert_params: float = 0.0  # of num_params: divided by expert parallelism
    num_layers: int = 1  # smallest units in a repeat that a stage boundary may separate (1 for a block)
    saved_inner_bytes: float = 0.0  # kept for backward, per sample, no recomputation
    saved_sequence_bytes: float = 0.0
    saved_other_bytes: float = 0.0
    selective_inner_bytes: float = 0.0  # the same under selective recomputation
    selective_sequence_bytes: float = 0.0
    selective_other_bytes: float = 0.0
    boundary_bytes: float = 0.0  # output handed to the next group, per sample; also what full recomputation keeps
    temporary_bytes: float = 0.0  # largest short-lived working set of forward or backward, per sample
    num_tp_collectives: float = 0.0  # all-reduces of boundary_bytes in a forward pass under tensor parallelism
    num_row_adapters: float = 0.0  # low-rank products whose input tensor parallelism divides: one sum of their outputs in a forward pass
    num_column_adapters: float = 0.0  # the same whose output it divides: one sum of input gradients in a backward pass
    row_adapter_bytes: float = 0.0  # what they sum, per sample
    column_adapter_bytes: float = 0.0
    can_recompute: bool = False  # the engines can checkpoint this group's repeats
    can_cut: bool = False  # a pipeline stage may end after a repeat
    param_shapes: tuple[ParamShape, ...] = ()  # in order of use, for bucket and shard boundaries; () unknown

    @property
    def is_unit(self) -> bool:
        """Whether engines shard and gather this group's repeats one by one; everything else is one root unit."""
        return self.num_repeats > 1 or self.can_cut or self.can_recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """What one optimizer step keeps and moves."""

    name: str  # "adamw", "sgd", ...
    state_bytes_per_param: float  # moments and the like, without a master copy (Adam in fp32: 8)
    num_kernels: float = 0.0  # launches per step; foreach and fused optimizers need few


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model's training step, as the cost models need it."""

    name: str
    groups: tuple[LayerGroup, ...]  # in execution order
    num_params: float  # unique
    num_trainable_params: float
    optimizer: OptimizerSpec
    compute_dtype: str = "bf16"  # fp32, tf32, fp16, bf16, fp8: dtype of the matrix products
    param_bytes: float = 2.0  # bytes per element of the working copy of the weights
    master_bytes: float = 4.0  # bytes per trainable parameter of an fp32 master copy kept beside it (0: none)
    grad_bytes: float = 2.0  # bytes per element of the gradients
    tokens_per_sample: float = 1.0  # 1 for images
    sample_unit: str = "samples"  # "tokens" when tokens_per_sample is meaningful
    seq_len: float = 0.0  # 0 where there is no sequence
    hidden_size: float = 0.0  # of the repeated block; 0 unknown
    num_heads: int = 0  # attention heads that tensor parallelism must divide; 0: no attention
    num_kv_heads: int = 0
    vocab_size: float = 0.0
    num_experts: int = 0
    num_active_experts: int = 0
    routed_share: float = 1.0  # of the experts that one token may choose from, where routing is limited to some groups of them
    tied_params: float = 0.0  # parameters shared by the first and the last stage of a pipeline
    logits_bytes: float = 0.0  # logits and loss temporaries alive at once, per sample
    cuts_loss: bool = False  # nothing but a cross-entropy sees the logits: tensor ranks may each keep their part of the vocabulary
    input_bytes: float = 0.0  # host-to-device copy per sample
    buffer_bytes: float = 0.0  # module buffers: what DDP broadcasts before a forward pass
    resident_bytes: float = 0.0  # on every rank whatever the plan: buffers, models that are never trained (EMA, teacher, frozen tower)
    model_flops: float = 0.0  # forward + backward of one sample, without recomputation: for MFU
    can_tensor_parallel: bool = False
    can_pipeline: bool = False
    traced_batch: int = 1  # batch size of the step that was seen
    measured_step_s: float | None = None  # one device, no parallelism; None where nothing was measured
    measured_device: str = ""  # catalogue name of the device of measured_step_s
    measured_host_s_per_kernel: float | None = None  # launch and Python overhead, from a live profile

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("a workload needs at least one layer group")
        total = sum(g.num_params * g.num_repeats for g in self.groups)
        if abs(total - self.num_params) > 1e-6 * max(total, 1.0):
            raise ValueError(f"groups hold {total:.0f} parameters, the model {self.num_params:.0f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator as the framework sees it. Dense rates."""

    name: str  # catalogue name, e.g. "h100-sxm-80gb"
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float]  # by dtype: fp32, tf32, fp16, bf16, fp8 (absent: not supported)
    num_multiprocessors: int = 108
    family: str = ""  # "volta", "ampere", "hopper", ...: constants are fitted per family


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A network between devices. Line rates; the achieved share is a calibration constant."""

    name: str  # catalogue name, e.g. "nvlink-4"
    bytes_per_s: float  # one direction; per GPU for an intra-node link, per NODE (all NICs) for an inter-node one
    latency_s: float
    kind: str = ""  # "nvlink", "pcie", "infiniband", "ethernet", "efa"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices."""

    device: Device
    gpus_per_node: int
    num_nodes: int
    intra: Link
    inter: Link
    host_bytes_per_s: float = 25e9  # one direction, per GPU, pinned copies
    host_memory_bytes: float = 0.0  # per node; 0 unknown
    sources: Mapping[str, str] = field(default_factory=dict)  # figure -> catalogue | measured | given | assumed

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_node * self.num_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One legal way to spread a step. Degrees multiply to the world size."""

    dp_replicate_degree: int = 1  # data ranks that hold equal copies (DDP; outer dimension of hybrid sharding)
    dp_shard_degree: int = 1  # data ranks that shard states
    tp_degree: int = 1
    cp_degree: int = 1
    ep_degree: int = 1
    pp_degree: int = 1
    virtual_stages: int = 1  # model chunks per pipeline rank (1: not interleaved)
    zero_stage: int = 0  # what dp_shard ranks shard: 0 nothing, 1 optimizer, 2 + gradients, 3 + parameters
    micro_batch: int = 1  # samples per data rank and forward pass
    num_microbatches: int = 1  # accumulation steps (or pipeline micro-batches) per optimizer step
    recompute: str = "none"
    schedule: str = "none"
    sequence_parallel: bool = False
    offload: bool = False  # optimizer states and step on the host; under ZeRO-3 the parameter and gradient shards too
    runtime: str = "torch"  # file name in cost_models/runtimes

    @property
    def dp_degree(self) -> int:
        return self.dp_replicate_degree * self.dp_shard_degree

    @property
    def world_size(self) -> int:
        return self.dp_degree * self.tp_degree * self.cp_degree * self.pp_degree

    @property
    def global_batch(self) -> int:
        return self.dp_degree * self.micro_batch * self.num_microbatches

    def label(self) -> str:
        """Short human name, e.g. "TP 2 x FSDP 16, recompute full"."""
        parts = []
        if self.pp_degree > 1:
            parts.append(f"PP {self.pp_degree}" + (f" interleave {self.virtual_stages}" if self.virtual_stages > 1 else ""))
        if self.tp_degree > 1:
            parts.append(f"TP {self.tp_degree}")
        if self.cp_degree > 1:
            parts.append(f"CP {self.cp_degree}")
        if self.dp_shard_degree > 1 and self.zero_stage:
            kind = {1: "ZeRO-1", 2: "ZeRO-2", 3: "FSDP"}[self.zero_stage]
            hybrid = f"HSDP {self.dp_replicate_degree} x {self.dp_shard_degree}"
            parts.append(hybrid if self.dp_replicate_degree > 1 else f"{kind} {self.dp_shard_degree}")
        elif self.dp_degree > 1:
            parts.append(f"DDP {self.dp_degree}")
        text = " x ".join(parts) or "single GPU"
        if self.recompute != "none":
            text += f", recompute {self.recompute}"
        if self.offload:
            text += ", CPU offload" if self.zero_stage == 3 else ", optimizer offload"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """Plans as arrays of equal length; `recompute`, `schedule` and `runtime` are indices or codes (see fields)."""

    dp_replicate_degree: IntArray
    dp_shard_degree: IntArray
    tp_degree: IntArray
    cp_degree: IntArray
    ep_degree: IntArray
    pp_degree: IntArray
    virtual_stages: IntArray
    zero_stage: IntArray
    micro_batch: IntArray
    num_microbatches: IntArray
    recompute: IntArray  # index into RECOMPUTES
    schedule: IntArray  # index into SCHEDULES
    sequence_parallel: IntArray  # 0 or 1
    offload: IntArray  # 0 or 1
    runtime: IntArray  # index into runtime_names
    runtime_names: tuple[str, ...] = ("torch",)

    def __len__(self) -> int:
        return len(self.tp_degree)

    @classmethod
    def from_plans(cls, plans: list[Plan] | tuple[Plan, ...]) -> PlanTable:
        names = tuple(dict.fromkeys(p.runtime for p in plans)) or ("torch",)
        columns: dict[str, IntArray] = {}
        for f in dataclasses.fields(Plan):
            raw = [getattr(p, f.name) for p in plans]
            order = {"recompute": RECOMPUTES, "schedule": SCHEDULES, "runtime": names}.get(f.name)
            columns[f.name] = np.array([order.index(v) if order else int(v) for v in raw], dtype=np.int64)
        return cls(**columns, runtime_names=names)

    def plan(self, i: int) -> Plan:
        values: dict[str, object] = {f.name: int(getattr(self, f.name)[i]) for f in dataclasses.fields(Plan)}
        values["recompute"] = RECOMPUTES[int(self.recompute[i])]
        values["schedule"] = SCHEDULES[int(self.schedule[i])]
        values["runtime"] = self.runtime_names[int(self.runtime[i])]
        values["sequence_parallel"], values["offload"] = bool(self.sequence_parallel[i]), bool(self.offload[i])
        return Plan(**values)  # type: ignore[arg-type]

    def take(self, index: IntArray) -> PlanTable:
        columns = {f.name: getattr(self, f.name)[index] for f in dataclasses.fields(Plan)}
        return PlanTable(**columns, runtime_names=self.runtime_names)


#: Parts of a step, seconds on the critical path; they sum to step_time_s.
TIME_PARTS = (
    "compute", "host_overhead", "recompute", "tp_communication", "pipeline_bubble", "pipeline_p2p", "dp_communication",
    "fsdp_communication", "optimizer", "offload", "data_loading", "fixed",
)  # fmt: skip
#: Parts of the peak, bytes on the fullest rank at the largest of load, step and save; they sum to peak_memory_bytes.
MEMORY_PARTS = (
    "parameters", "gradients", "optimizer", "activations", "recomputed", "logits", "gathered", "buckets", "temporaries",
    "inputs", "reserve",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Prices of a PlanTable: arrays of len(plans)."""

    step_time_s: FloatArray
    low_s: FloatArray  # 80% of unseen measured runs lie in [low_s, high_s]
    high_s: FloatArray
    breakdown_s: Mapping[str, FloatArray]  # keys TIME_PARTS; sums to step_time_s
    peak_memory_bytes: FloatArray  # device memory in use as the driver sees it (reserved + context)
    allocated_memory_bytes: FloatArray
    high_memory_bytes: FloatArray  # cautious upper end, what `fits` is decided on
    breakdown_bytes: Mapping[str, FloatArray]  # keys MEMORY_PARTS; sums to peak_memory_bytes
    load_memory_bytes: FloatArray  # at load, at save: other moments than the step
    save_memory_bytes: FloatArray
    mfu: FloatArray  # model flops / (peak * gpus * step time), 0..1
    host_memory_bytes: FloatArray = field(default_factory=lambda: np.zeros(0))  # of a node: offloaded states, models built on the host
