"""Records what transformers' TrainingArguments take, from the installed version.

python tests/tools/record_transformers.py        # rewrites advisor/engines/tables/transformers.json
"""

import dataclasses
import enum
import inspect
import json
import re
import types
import typing
from pathlib import Path

TABLE = Path(__file__).parents[2] / "advisor/engines/tables/transformers.json"
NAMES = {bool: "bool", int: "int", float: "float", str: "str", dict: "dict", list: "list", type(None): "none"}
#: Of the FSDP settings, by name; the code reads most of them as text.
FSDP_TYPES = {"version": "int", "min_num_params": "int", "transformer_layer_cls_to_wrap": "list", "auto_wrap_policy": "str",
              "state_dict_type": "str", "backward_prefetch": "str", "xla_fsdp_settings": "dict"}  # fmt: skip


def recorded() -> dict:
    import transformers
    from transformers import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    arguments = {f.name: option(hints[f.name]) for f in dataclasses.fields(TrainingArguments)}
    arguments["fsdp"]["types"].append("bool")  # declared as text for the sake of the command line
    return {"version": transformers.__version__, "arguments": arguments, "fsdp_config": fsdp_options(TrainingArguments)}


def option(hint) -> dict:
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    plain = [typing.get_origin(m) or m for m in members]
    choices = [e.value for m in plain if isinstance(m, type) and issubclass(m, enum.Enum) for e in m]
    names = sorted({NAMES.get(m, "str") for m in plain})
    return {"types": names} | ({"choices": choices} if choices else {})


def fsdp_options(kind) -> dict:
    from accelerate.utils import constants as c

    source = inspect.getsource(kind._process_fsdp_args)
    found = re.findall(r'self\.fsdp_config(?:\.get\(|\.setdefault\(|\[)"(\w+)"', source) + re.findall(
        r'"(\w+)" in self\.fsdp_config', source
    )
    options = {name: {"types": [FSDP_TYPES.get(name, "bool")]} for name in dict.fromkeys(found)}
    options["version"]["choices"] = [1, 2]
    options["reshard_after_forward"]["types"] = ["bool", "str"]
    options["auto_wrap_policy"]["choices"] = c.FSDP_AUTO_WRAP_POLICY
    options["state_dict_type"]["choices"] = c.FSDP_STATE_DICT_TYPE
    return options


if __name__ == "__main__":
    TABLE.write_text(json.dumps(recorded(), indent=1) + "\n", encoding="utf8")
