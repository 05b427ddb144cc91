"""Captures of several small scripts at once: each costs a child process and an import of torch, so two run side by side."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from advisor.errors import AdvisorError
from advisor.profiling import capture

#: A script that starts with this line gets the small model below.
WITH_NET = "# with Net\n"
NET = """
import os, sys, time
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self, width=32, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, 10)

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.out(x)
"""


@pytest.fixture(scope="session")
def capture_all(tmp_path_factory):
    """Writes scripts into a fresh folder and captures them; returns profile or error by name, and the folder."""

    def run(scripts, **options):
        folder = tmp_path_factory.mktemp("scripts")
        for name, text in scripts.items():
            (folder / f"{name}.py").write_text(text.replace(WITH_NET, NET), encoding="utf8")

        def one(name):
            try:
                return name, capture(str(folder / f"{name}.py"), **{"capture": "traced", "timeout_s": 60.0, **options.get(name, {})})
            except AdvisorError as error:
                return name, error

        with ThreadPoolExecutor(2) as pool:
            return dict(pool.map(one, scripts)), folder

    return run


@pytest.fixture
def command_lines():
    """Gives the command lines of all processes; those that end meanwhile are left out."""

    def read():
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found.append(file.read_bytes())
        return found

    return read
