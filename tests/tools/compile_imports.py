"""Imports what processes of the tests import, so that its bytecode lies there: most of them write none, and would compile it each time.

python tests/tools/compile_imports.py
"""

from importlib import import_module

from advisor.options import ENGINE_NAMES
from advisor.verify.starts import heavy_imports

OTHERS = ("advisor.profiling.traced", "advisor.verify.watch", "torch.distributed.run", "transformers.models.llama.modeling_llama")

if __name__ == "__main__":
    for name in (*OTHERS, *heavy_imports(ENGINE_NAMES)):
        import_module(name)
