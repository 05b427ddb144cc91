"""Records which arguments Lightning's Trainer and strategies take, from the installed version.

python tests/tools/record_lightning.py        # rewrites advisor/engines/tables/lightning.json
"""

import inspect
import json
import typing
from pathlib import Path

TABLE = Path(__file__).parents[2] / "advisor/engines/tables/lightning.json"
NAMES = {bool: "bool", int: "int", float: "float", str: "str", dict: "dict", list: "list", type(None): "none"}


def recorded() -> dict:
    import lightning
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
    from torch.nn.parallel import DistributedDataParallel

    calls = {kind.__name__: parameters(kind) for kind in (Trainer, DeepSpeedStrategy, ModelParallelStrategy)}
    calls["DDPStrategy"] = parameters(DistributedDataParallel) | parameters(DDPStrategy)  # hands on what it doesn't know
    return {"version": lightning.__version__, "calls": calls}


def parameters(kind: type) -> dict:
    """Types by parameter; defaults tell where there is no annotation, and what neither tells is anything."""
    hints = typing.get_type_hints(kind.__init__) if kind.__module__.startswith("lightning.pytorch.trainer") else {}
    found = list(inspect.signature(kind.__init__).parameters.values())[1:]
    return {p.name: {"types": types(hints.get(p.name, p.annotation), p.default)} for p in found if p.kind is not p.VAR_KEYWORD}


def types(hint, default) -> list[str]:
    if hint is inspect.Parameter.empty:
        return [NAMES[type(default)]] if isinstance(default, bool | int) else ["any"]
    members = typing.get_args(hint) if typing.get_origin(hint) is typing.Union else (hint,)
    names = set()
    for member in members:
        if typing.get_origin(member) is typing.Literal:
            names |= {NAMES[type(value)] for value in typing.get_args(member)}
        else:
            names.add(NAMES.get(typing.get_origin(member) or member, "any"))
    return sorted(names)


if __name__ == "__main__":
    TABLE.write_text(json.dumps(recorded(), indent=1) + "\n", encoding="utf8")
