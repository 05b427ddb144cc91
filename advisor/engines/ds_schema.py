"""A strict check of ds_config.json: DeepSpeed itself ignores unknown keys at the top level and in several sections."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

#: Keys by section, with the JSON types they take; a section's own keys follow under its name. Checked against DeepSpeed 0.19.
KEYS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "": {
        "train_batch_size": (int,), "train_micro_batch_size_per_gpu": (int,), "gradient_accumulation_steps": (int,),
        "gradient_clipping": (int, float), "steps_per_print": (int,), "wall_clock_breakdown": (bool,), "prescale_gradients": (bool,),
        "communication_data_type": (str,), "zero_allow_untested_optimizer": (bool,), "zero_force_ds_cpu_optimizer": (bool,),
        "zero_optimization": (dict,), "bf16": (dict,), "fp16": (dict,), "torch_autocast": (dict,), "optimizer": (dict,), "scheduler": (dict,),
        "data_types": (dict,), "tensor_parallel": (dict,), "pipeline": (dict,), "activation_checkpointing": (dict,), "checkpoint": (dict,),
    },
    "zero_optimization": {
        "stage": (int,), "contiguous_gradients": (bool,), "reduce_scatter": (bool,), "reduce_bucket_size": (int,),
        "allgather_partitions": (bool,), "allgather_bucket_size": (int,), "overlap_comm": (bool,), "round_robin_gradients": (bool,),
        "offload_param": (dict,), "offload_optimizer": (dict,), "sub_group_size": (int,), "stage3_max_live_parameters": (int,),
        "stage3_max_reuse_distance": (int,), "stage3_prefetch_bucket_size": (int,), "stage3_param_persistence_threshold": (int,),
        "stage3_gather_16bit_weights_on_model_save": (bool,), "zero_hpz_partition_size": (int,),
    },
    "zero_optimization.offload_optimizer": {
        "device": (str,), "pin_memory": (bool,), "nvme_path": (str,), "buffer_count": (int,), "ratio": (int, float),
    },
    "zero_optimization.offload_param": {
        "device": (str,), "pin_memory": (bool,), "nvme_path": (str,), "buffer_count": (int,), "buffer_size": (int,), "max_in_cpu": (int,),
    },
    "bf16": {
        "enabled": (bool,), "immediate_grad_update": (bool,), "check_grad_overflow": (bool,), "bf16_master_weights_and_grads": (bool,),
        "bf16_optimizer_states": (bool,),
    },
    "fp16": {
        "enabled": (bool,), "loss_scale": (int, float), "initial_scale_power": (int,), "loss_scale_window": (int,), "hysteresis": (int,),
        "min_loss_scale": (int, float), "consecutive_hysteresis": (bool,), "auto_cast": (bool,),
    },
    "torch_autocast": {"enabled": (bool,), "dtype": (str,), "lower_precision_safe_modules": (list,)},
    "optimizer": {"type": (str,), "params": (dict,)},
    "scheduler": {"type": (str,), "params": (dict,)},
    "tensor_parallel": {"autotp_size": (int,), "tp_overlap_comm": (bool,), "partition_config": (dict,)},
    "tensor_parallel.partition_config": {"use_default_specs": (bool,), "layer_specs": (list,)},
    "pipeline": {"activation_checkpoint_interval": (int,), "pipe_partitioned": (bool,), "grad_partitioned": (bool,), "use_reentrant": (bool,)},
    "data_types": {"grad_accum_dtype": (str,)},
    "activation_checkpointing": {
        "partition_activations": (bool,), "cpu_checkpointing": (bool,), "contiguous_memory_optimization": (bool,),
        "number_checkpoints": (int,), "synchronize_checkpoint_boundary": (bool,), "profile": (bool,),
    },
    "checkpoint": {"tag_validation": (str,), "load_universal": (bool,), "use_node_local_storage": (bool,), "writer": (dict,)},
}  # fmt: skip
#: Sections whose keys are the optimizer's or the scheduler's own.
_FREE = {"optimizer.params", "scheduler.params", "checkpoint.writer"}
#: Allowed values of string keys.
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "optimizer.type": ("Adam", "AdamW", "Lamb", "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "Lion", "Adagrad", "Muon", "SGD"),
    "zero_optimization.offload_optimizer.device": ("cpu", "nvme", "none"),
    "zero_optimization.offload_param.device": ("cpu", "nvme", "none"),
    "torch_autocast.dtype": ("bfloat16", "float16", "bf16", "fp16"),
    "data_types.grad_accum_dtype": ("fp32", "fp16", "bf16"),
}
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def problems(text: str, *, world_size: int) -> list[str]:
    """Everything wrong with a DeepSpeed configuration; empty when nothing is.

    Args:
        text: content of ds_config.json.
        world_size: data ranks, for train_batch_size = micro-batch x accumulation x ranks.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        return [f"not JSON: {error}"]
    if not isinstance(config, dict):
        return ["not a JSON object"]
    found = _section(config, "")
    if found:
        return found
    return [*_batch(config, world_size), *_zero(config), *_precision(config), *_split(config)]


def _section(values: Mapping[str, Any], path: str) -> list[str]:
    found = []
    allowed = KEYS[path]
    for key, value in values.items():
        where = f"{path}.{key}" if path else key
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            found.append(f"unknown key {where}" + (f" (did you mean {near[0]}?)" if near else ""))
        elif not isinstance(value, allowed[key]) or (isinstance(value, bool) and bool not in allowed[key]):
            found.append(f"{where} is {value!r}, which is no {' or '.join(t.__name__ for t in allowed[key])}")
        elif where in _CHOICES and value not in _CHOICES[where]:
            found.append(f"{where} is {value!r}, not one of {', '.join(_CHOICES[where])}")
        elif isinstance(value, dict) and where not in _FREE:
            found += _section(value, where)
    return found


def _batch(config: Mapping[str, Any], world_size: int) -> list[str]:
    missing = [key for key in _BATCH_KEYS if key not in config]
    if missing == ["train_batch_size"] and config.get("tensor_parallel"):  # DeepSpeed would multiply by all ranks, not by the data ranks
        return []
    if missing:
        return [f"{key} is missing" for key in missing]
    total, micro, steps = (config[key] for key in _BATCH_KEYS)
    if min(total, micro, steps) < 1:
        return ["batch sizes and accumulation steps start at 1"]
    if total != micro * steps * world_size:
        return [f"train_batch_size {total} is not {micro} x {steps} x {world_size} ranks"]
    return []


def _zero(config: Mapping[str, Any]) -> list[str]:
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    found = [] if stage in (0, 1, 2, 3) else [f"zero_optimization.stage is {stage}, not 0 to 3"]
    if "offload_optimizer" in zero and stage == 0:
        found.append("offload_optimizer needs stage 1, 2 or 3")
    if "offload_param" in zero and stage != 3:
        found.append("offload_param needs stage 3")
    found += [f"{key} needs stage 3" for key in zero if key.startswith("stage3_") and stage != 3]
    return found


def _precision(config: Mapping[str, Any]) -> list[str]:
    enabled = [name for name in ("bf16", "fp16", "torch_autocast") if config.get(name, {}).get("enabled")]
    return [f"{' and '.join(enabled)} are both enabled"] if len(enabled) > 1 else []


def _split(config: Mapping[str, Any]) -> list[str]:
    """DeepSpeed takes any layer specification; one that names no weights or no kind leaves layers whole without a word."""
    specs = config.get("tensor_parallel", {}).get("partition_config", {}).get("layer_specs", [])
    where = "tensor_parallel.partition_config.layer_specs"
    found = []
    for i, spec in enumerate(specs):
        if not isinstance(spec, dict) or spec.keys() != {"patterns", "partition_type"}:
            found.append(f"{where}[{i}] has other keys than patterns and partition_type")
        elif spec["partition_type"] not in {"column", "row"}:
            found.append(f"{where}[{i}].partition_type is {spec['partition_type']!r}, not column or row")
        elif (
            not isinstance(spec["patterns"], list)
            or not spec["patterns"]
            or not all(isinstance(pattern, str) for pattern in spec["patterns"])
        ):
            found.append(f"{where}[{i}].patterns is no list of names")
    return found
