"""Records which flags torchtitan takes and their types, from an installed torchtitan (which needs triton, tyro, datasets and others).

python tests/tools/record_torchtitan.py        # rewrites advisor/engines/tables/torchtitan.json
"""

import dataclasses
import importlib.metadata
import json
import types
import typing
from pathlib import Path

TABLE = Path(__file__).parents[2] / "advisor/engines/tables/torchtitan.json"
SECTIONS = ("training", "parallelism", "compile", "debug")
NAMES = {bool: "bool", int: "int", float: "float", str: "str", list: "list", type(None): "none"}


def recorded() -> dict:
    from torchtitan.trainer import Trainer

    hints = typing.get_type_hints(Trainer.Config)
    flags = {}
    for section in SECTIONS:
        inner = typing.get_type_hints(hints[section])
        flags |= {f"{section}.{f.name}": option(inner[f.name]) for f in dataclasses.fields(hints[section])}
    return {"version": importlib.metadata.version("torchtitan"), "flags": flags}


def option(hint) -> dict:
    if typing.get_origin(hint) is typing.Literal:
        return {"types": ["str"], "choices": list(typing.get_args(hint))}
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return {"types": sorted({NAMES[typing.get_origin(m) or m] for m in members})}


if __name__ == "__main__":
    TABLE.write_text(json.dumps(recorded(), indent=1) + "\n", encoding="utf8")
