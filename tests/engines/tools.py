"""Modules of tests/tools for the tests here."""

import importlib.util
from pathlib import Path


def tool(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"tools/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
