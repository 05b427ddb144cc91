"""The closed list of facts that rules may ask for: name, unit, meaning, and what is needed to know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cost_models.types import OP_CLASSES

#: Units that facts may have; `advisor.rulebook.explain.shown` writes each of them.
UNITS = ("share", "bytes", "s", "bytes/s", "count", "params", "ratio", "flag", "text")

#: What the profile may have noticed in the script, and what it means. Unknown ids of newer profiles are ignored.
HAZARDS: Mapping[str, str] = MappingProxyType({
    "batch-norm": "batch normalization, whose statistics belong to one rank's samples",
    "tied-weights": "one tensor used as two parameters, e.g. embedding and head",
    "unused-parameters": "trainable parameters that got no gradient in the step",
    "host-sync": "the host waited for a device value inside the step",
    "recurrent-state-carried": "hidden state carried from one step to the next",
    "several-optimizers": "more than one optimizer stepped",
    "ema-copy": "a second copy of the model that is never trained by gradients",
    "already-distributed": "the script already wraps its model for distributed training",
    "shared-module-called-n-times": "one module is called several times in a forward pass",
    "contrastive-global-batch": "a loss over similarities between all samples of the batch",
    "data-dependent-shapes": "shapes or control flow that depend on the data",
    "device-map-sequential": "layers laid over devices that work one after the other (device_map)",
    "two-device-split": "a model split by hand over devices",
    "custom-autograd-function": "autograd functions of the script's own",
    "hand-written-optimizer": "parameters updated by the script's own code, not a torch optimizer",
    "sparse-gradients": "gradients that hold only the rows that were used (sparse=True)",
    "frozen-parameters": "parameters that don't train beside ones that do",
    "process-group-at-import": "a process group is made when the script is imported",
    "data-loader-workers": "the data loader starts worker processes",
    "model-built-eagerly": "a large model built in full on every process before it is wrapped",
})  # fmt: skip

#: Strategy families in facts' names: the best candidate of each, or why there is none.
FAMILIES: Mapping[str, str] = MappingProxyType({
    "ddp": "plain data parallel",
    "zero1": "data parallel with sharded optimizer states (ZeRO-1)",
    "zero2": "data parallel with sharded optimizer states and gradients (ZeRO-2)",
    "fsdp": "fully sharded data parallel (ZeRO-3) over all ranks",
    "hsdp": "hybrid sharding: sharded in a group, replicated between groups",
    "tp": "any plan with tensor parallelism",
    "pp": "any plan with pipeline parallelism",
    "offload": "any plan with optimizer states on the host",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that may be known of a case."""

    name: str
    unit: str
    meaning: str
    needs: str = ""  # what must be there to know it; "" where it is always known


def _hotspot_facts() -> list[Fact]:
    facts = [
        Fact(name=f"{name.replace('-', '_')}_time_share", unit="share", meaning=f"device time in class {name}", needs="an operator profile")
        for name in OP_CLASSES
    ]
    facts += [
        Fact(name=f"{bound}_bound_share", unit="share", meaning=f"device time in classes bound by {bound}", needs="an operator profile")
        for bound in ("compute", "memory", "latency", "communication", "host")
    ]
    return facts


def _hazard_facts() -> list[Fact]:
    facts = []
    for hazard, meaning in HAZARDS.items():
        name = hazard.replace("-", "_")
        facts.append(Fact(name=f"has_{name}", unit="flag", meaning=meaning))
        facts.append(Fact(name=f"{name}_evidence", unit="text", meaning=f"what the profile saw: {meaning}", needs="the hazard itself"))
    return facts


def _family_facts() -> list[Fact]:
    facts = []
    for key, meaning in FAMILIES.items():
        plan = f"a plan of that kind: {meaning}"
        facts += [
            Fact(name=f"{key}_fits", unit="flag", meaning=f"whether it fits: {meaning}", needs=plan),
            Fact(name=f"{key}_short_by_bytes", unit="bytes", meaning=f"memory a GPU lacks for it: {meaning}", needs="a plan that doesn't fit"),
            Fact(name=f"best_{key}_plan_label", unit="text", meaning=f"best of {meaning}", needs=plan),
            Fact(name=f"best_{key}_plan_step_s", unit="s", meaning=f"predicted step of the best of {meaning}", needs=plan),
            Fact(name=f"best_{key}_plan_slowdown_share", unit="share", meaning=f"its step over the best plan's, less 1: {meaning}", needs=plan),
            Fact(name=f"best_{key}_plan_memory_share", unit="share", meaning=f"peak over the device's memory: {meaning}", needs=plan),
            Fact(name=f"best_{key}_plan_communication_share", unit="share", meaning=f"exposed communication of its step: {meaning}", needs=plan),
        ]  # fmt: skip
    return facts


_PLAN = "a plan that fits"
_MEASURED = "a step measured on a device"
_OWN = [
    # the script
    Fact(name="num_optimizers", unit="count", meaning="optimizers that stepped"),
    Fact(name="clips_gradients", unit="flag", meaning="the script clips gradients"),
    Fact(name="uses_checkpointing", unit="flag", meaning="the script recomputes activations already"),
    Fact(name="buffer_bytes", unit="bytes", meaning="buffers of the model"),
    Fact(name="other_model_params", unit="params", meaning="parameters of models that are never trained (EMA, teacher)"),
    Fact(name="idle_share", unit="share", meaning="step time with an idle device", needs=_MEASURED),
    Fact(name="measured_memory_share", unit="share", meaning="measured peak memory over the device's", needs=_MEASURED),
    Fact(name="mean_kernel_s", unit="s", meaning="device time over kernels of one micro-batch", needs="an operator profile"),
    # the model
    Fact(name="num_params", unit="params", meaning="unique parameters"),
    Fact(name="trainable_share", unit="share", meaning="trainable parameters over all"),
    Fact(name="states_bytes", unit="bytes", meaning="weights, gradients and optimizer states on one GPU without sharding"),
    Fact(name="weights_bytes", unit="bytes", meaning="working copy of the weights"),
    Fact(name="gradient_bytes", unit="bytes", meaning="gradients of all trainable parameters"),
    Fact(name="optimizer_bytes", unit="bytes", meaning="optimizer states and master weights without sharding"),
    Fact(name="optimizer_states_share", unit="share", meaning="optimizer states and master weights over all states"),
    Fact(name="states_memory_share", unit="share", meaning="all states without sharding over the device's memory"),
    Fact(name="activations_bytes_per_sample", unit="bytes", meaning="saved for backward, one sample, no recomputation"),
    Fact(name="activations_memory_share", unit="share", meaning="the same for one sample, over the device's memory"),
    Fact(name="logits_bytes_per_sample", unit="bytes", meaning="logits and loss temporaries of one sample"),
    Fact(name="logits_share_of_activations", unit="share", meaning="those over the saved activations and them together"),
    Fact(name="vocab_size", unit="count", meaning="classes of the output", needs="a vocabulary"),
    Fact(name="seq_len", unit="count", meaning="positions of one sample", needs="token sequences"),
    Fact(name="num_layers", unit="count", meaning="repeated blocks"),
    Fact(name="num_heads", unit="count", meaning="attention heads", needs="attention"),
    Fact(name="num_kv_heads", unit="count", meaning="key and value heads", needs="attention"),
    Fact(name="num_experts", unit="count", meaning="experts of a mixture layer"),
    Fact(name="expert_params_share", unit="share", meaning="parameters in experts over all"),
    Fact(name="embedding_params_share", unit="share", meaning="parameters of embedding and, unless tied, head (classes x width) over all", needs="a vocabulary"),
    Fact(name="can_tensor_parallel", unit="flag", meaning="the model has column- and row-parallel pairs"),
    Fact(name="can_pipeline", unit="flag", meaning="the model is a chain of layers"),
    Fact(name="compute_dtype", unit="text", meaning="dtype of the matrix products"),
    Fact(name="zero1_saving_share", unit="share", meaning="states saved per GPU by sharding optimizer states over all GPUs"),
    Fact(name="zero2_saving_share", unit="share", meaning="the same with gradients"),
    Fact(name="zero3_saving_share", unit="share", meaning="the same with parameters"),
    # the cluster
    Fact(name="device_name", unit="text", meaning="GPU planned for"),
    Fact(name="device_memory_bytes", unit="bytes", meaning="memory of one GPU"),
    Fact(name="has_bf16", unit="flag", meaning="the GPU multiplies bf16"),
    Fact(name="num_gpus", unit="count", meaning="GPUs in the cluster"),
    Fact(name="gpus_per_node", unit="count", meaning="GPUs in a node"),
    Fact(name="num_nodes", unit="count", meaning="nodes"),
    Fact(name="intra_link", unit="text", meaning="link inside a node"),
    Fact(name="inter_link", unit="text", meaning="network between nodes"),
    Fact(name="intra_bytes_per_s", unit="bytes/s", meaning="line rate inside a node, per GPU"),
    Fact(name="inter_bytes_per_s", unit="bytes/s", meaning="line rate between nodes, per node"),
    Fact(name="link_ratio", unit="ratio", meaning="rate inside a node over the rate between nodes, both per GPU"),
    Fact(name="network_has_rdma", unit="flag", meaning="the network between nodes copies without the host (InfiniBand, RoCE, EFA)"),
    Fact(name="intra_is_nvlink", unit="flag", meaning="the link inside a node is NVLink or Infinity Fabric"),
    Fact(name="sharded_traffic_bytes", unit="bytes", meaning="what a node receives for one forward and backward pass with sharded parameters"),
    Fact(name="sharded_traffic_s", unit="s", meaning="the least time that takes at the network's line rate"),
    Fact(name="eager_load_bytes", unit="bytes", meaning="host memory if every process of a node builds the model in fp32"),
    # the best plan
    Fact(name="best_plan_label", unit="text", meaning="first plan of the ranking", needs=_PLAN),
    Fact(name="best_plan_step_s", unit="s", meaning="its predicted step", needs=_PLAN),
    Fact(name="best_plan_memory_share", unit="share", meaning="its peak over the device's memory", needs=_PLAN),
    Fact(name="best_plan_cautious_memory_share", unit="share", meaning="upper end of its peak over the device's memory", needs=_PLAN),
    Fact(name="best_plan_communication_share", unit="share", meaning="exposed communication over its step", needs=_PLAN),
    Fact(name="best_plan_bubble_share", unit="share", meaning="pipeline bubble over its step", needs=_PLAN),
    Fact(name="best_plan_host_share", unit="share", meaning="launch and host overhead over its step", needs=_PLAN),
    Fact(name="best_plan_recompute_share", unit="share", meaning="recomputation over its step", needs=_PLAN),
    Fact(name="best_plan_offload_share", unit="share", meaning="host optimizer and copies over its step", needs=_PLAN),
    Fact(name="best_plan_gather_share", unit="share", meaning="exposed gathers and scatters of sharded parameters over its step", needs=_PLAN),
    Fact(name="best_plan_gradient_share", unit="share", meaning="exposed gradient reduction over its step", needs=_PLAN),
    Fact(name="best_plan_activation_share", unit="share", meaning="activations over its peak memory", needs=_PLAN),
    Fact(name="best_plan_tp_degree", unit="count", meaning="its tensor-parallel degree", needs=_PLAN),
    Fact(name="best_plan_pp_degree", unit="count", meaning="its pipeline degree", needs=_PLAN),
    Fact(name="best_plan_dp_degree", unit="count", meaning="its data-parallel degree", needs=_PLAN),
    Fact(name="best_plan_zero_stage", unit="count", meaning="its ZeRO stage", needs=_PLAN),
    Fact(name="best_plan_micro_batch", unit="count", meaning="samples per rank and pass", needs=_PLAN),
    Fact(name="best_plan_num_microbatches", unit="count", meaning="passes per optimizer step", needs=_PLAN),
    Fact(name="best_plan_offloads", unit="flag", meaning="it keeps optimizer states on the host", needs=_PLAN),
    Fact(name="best_plan_recompute", unit="text", meaning="its recomputation: none, selective or full", needs=_PLAN),
    Fact(name="best_plan_layers_per_stage", unit="ratio", meaning="repeated blocks over pipeline stages", needs=_PLAN),
    Fact(name="best_plan_pipeline_uneven", unit="flag", meaning="the blocks don't divide over its stages", needs=_PLAN),
    Fact(name="global_batch", unit="count", meaning="samples per optimizer step", needs=_PLAN),
    Fact(name="samples_per_gpu", unit="ratio", meaning="samples per optimizer step and GPU", needs=_PLAN),
    Fact(name="hsdp_saves_s", unit="s", meaning="best fully sharded step less the best hybrid-sharded one", needs="both kinds of plan"),
    Fact(name="hsdp_extra_bytes", unit="bytes", meaning="peak memory that hybrid sharding adds to full sharding", needs="both kinds of plan"),
]  # fmt: skip

#: Name -> fact.
FACTS: Mapping[str, Fact] = MappingProxyType({f.name: f for f in [*_OWN, *_hotspot_facts(), *_hazard_facts(), *_family_facts()]})
