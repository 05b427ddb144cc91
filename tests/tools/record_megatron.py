"""Records which arguments Megatron-LM takes: names, kinds and choices, from the parser of its wheel.

    python tests/tools/record_megatron.py FOLDER VERSION     # rewrites advisor/engines/tables/megatron.json

FOLDER is where the wheel of megatron-core (which holds `megatron.training` since 0.17) is unpacked. No GPU is needed, triton is.
"""

import argparse
import json
import sys
import typing
from pathlib import Path

TABLE = Path(__file__).parents[2] / "advisor/engines/tables/megatron.json"


def recorded(folder: str, version: str) -> dict:
    sys.path.insert(0, folder)
    if not hasattr(typing, "override"):  # the wheel is for Python 3.12 and newer
        import typing_extensions

        typing.override = typing_extensions.override
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    arguments = {}
    for action in parser._actions:
        for name in action.option_strings:
            if name.startswith("--") and name != "--help":
                arguments[name.removeprefix("--")] = option(action, name)
    return {"version": version, "arguments": arguments}


def option(action: argparse.Action, name: str) -> dict:
    if action.nargs == 0:
        return {"types": ["flag"]}
    if isinstance(action, argparse.BooleanOptionalAction):
        return {"types": ["flag"]}
    kind = {int: "int", float: "float", str: "str", None: "str"}.get(action.type, "str")
    found = {"types": ["list" if action.nargs in {"*", "+"} or isinstance(action.nargs, int) else kind]}
    plain = action.choices and all(isinstance(c, str | int | float) for c in action.choices)
    return found | ({"choices": list(action.choices)} if plain else {})


if __name__ == "__main__":
    TABLE.write_text(json.dumps(recorded(*sys.argv[1:3]), indent=1) + "\n", encoding="utf8")
