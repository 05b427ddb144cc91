"""Records which arguments ColossalAI's plugins take, from its sources (it can't be installed beside today's torch).

    python tests/tools/record_colossalai.py FOLDER VERSION     # rewrites advisor/engines/tables/colossalai.json

FOLDER is where the source distribution is unpacked.
"""

import ast
import json
import sys
from pathlib import Path

TABLE = Path(__file__).parents[2] / "advisor/engines/tables/colossalai.json"
PLUGINS = {"HybridParallelPlugin": "hybrid_parallel_plugin", "GeminiPlugin": "gemini_plugin", "TorchDDPPlugin": "torch_ddp_plugin",
           "LowLevelZeroPlugin": "low_level_zero_plugin"}  # fmt: skip


def recorded(folder: str, version: str) -> dict:
    place = Path(folder) / "colossalai/booster/plugin"
    return {"version": version, "calls": {name: parameters(place / f"{file}.py", name) for name, file in PLUGINS.items()}}


def parameters(file: Path, name: str) -> dict:
    tree = ast.parse(file.read_text(encoding="utf8"))
    (kind,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    (init,) = [n for n in kind.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    return {a.arg: {"types": types(a.annotation)} for a in (*init.args.args[1:], *init.args.kwonlyargs)}


def types(hint: ast.expr | None) -> list[str]:
    """Types of an annotation such as int, Optional[float] or Union[str, Dict]; what isn't plain is anything."""
    text = ast.unparse(hint) if hint else ""
    optional = text.startswith("Optional[")
    inner = text.removeprefix("Optional[").removesuffix("]") if optional else text
    known = [inner] if inner in {"bool", "int", "float", "str"} else ["any"]
    return sorted([*known, "none"] if optional else known)


if __name__ == "__main__":
    TABLE.write_text(json.dumps(recorded(*sys.argv[1:3]), indent=1) + "\n", encoding="utf8")
