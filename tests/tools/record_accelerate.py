"""Records what Accelerate's configuration file takes, from the installed version.

python tests/tools/record_accelerate.py        # rewrites advisor/engines/tables/accelerate.json
"""

import argparse
import dataclasses
import json
import typing
from pathlib import Path

TABLE = Path(__file__).parents[2] / "advisor/engines/tables/accelerate.json"
#: Sections of the file, and the beginning of their options in the parser of `accelerate launch`.
PREFIXES = {"fsdp_config": "fsdp_", "megatron_lm_config": "megatron_lm_", "parallelism_config": "parallelism_config_"}


def recorded() -> dict:
    import accelerate
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    hints = typing.get_type_hints(ClusterConfig)
    parser = launch_command_parser()
    deepspeed = [a for g in parser._action_groups if g.title == "DeepSpeed Arguments" for a in g._group_actions]
    actions = {section: [a for a in parser._actions if a.dest.startswith(prefix)] for section, prefix in PREFIXES.items()}
    actions["deepspeed_config"] = deepspeed
    sections = {section: {a.dest: option(a) for a in found} for section, found in actions.items()}
    for section, key, names in choices():
        (sections[section] if section else {}).get(key, {})["choices"] = names
    sections["fsdp_config"]["fsdp_version"]["types"] = ["int"]
    sections["fsdp_config"]["fsdp_version"]["choices"] = [1, 2]
    sections["fsdp_config"]["fsdp_reshard_after_forward"]["types"] = ["bool", "str"]
    top = {f.name: {"types": kinds(hints[f.name])} for f in dataclasses.fields(ClusterConfig)}
    for key, names in top_choices().items():
        top[key]["choices"] = names
    return {"version": accelerate.__version__, "top": top, "sections": sections}


def kinds(hint) -> list[str]:
    members = typing.get_args(hint) if typing.get_origin(hint) is typing.Union else [hint]
    names = []
    for member in members:
        member = typing.get_origin(member) or member
        names.append({bool: "bool", int: "int", str: "str", dict: "dict", list: "list", type(None): "none"}.get(member, "str"))
    return sorted(set(names))


def option(action: argparse.Action) -> dict:
    """Options declared as text are truth values where their help says so."""
    says_boolean = "true|false" in (action.help or "") or action.default in {"true", "false"} or action.type is bool
    name = "bool" if says_boolean else {int: "int", float: "float"}.get(action.type, "str")
    return {"types": [name]} | ({"choices": list(action.choices)} if action.choices else {})


def choices() -> list[tuple[str, str, list]]:
    from accelerate.utils import constants as c

    return [
        ("fsdp_config", "fsdp_auto_wrap_policy", c.FSDP_AUTO_WRAP_POLICY),
        ("fsdp_config", "fsdp_backward_prefetch", c.FSDP_BACKWARD_PREFETCH),
        ("fsdp_config", "fsdp_state_dict_type", c.FSDP_STATE_DICT_TYPE),
        ("fsdp_config", "fsdp_sharding_strategy", c.FSDP_SHARDING_STRATEGY),
        ("deepspeed_config", "deepspeed_multinode_launcher", c.DEEPSPEED_MULTINODE_LAUNCHERS),
        ("deepspeed_config", "zero_stage", [0, 1, 2, 3]),
        ("deepspeed_config", "offload_optimizer_device", ["none", "cpu", "nvme"]),
        ("deepspeed_config", "offload_param_device", ["none", "cpu", "nvme"]),
        ("megatron_lm_config", "megatron_lm_recompute_granularity", ["full", "selective"]),
        ("megatron_lm_config", "megatron_lm_recompute_method", ["uniform", "block"]),
    ]


def top_choices() -> dict[str, list]:
    from accelerate.utils import ComputeEnvironment, DistributedType, PrecisionType

    return {
        "compute_environment": [e.value for e in ComputeEnvironment],
        "distributed_type": [e.value for e in DistributedType],
        "mixed_precision": PrecisionType.list(),
        "rdzv_backend": ["static", "c10d"],
    }


if __name__ == "__main__":
    TABLE.write_text(json.dumps(recorded(), indent=1) + "\n", encoding="utf8")
