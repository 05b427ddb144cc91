"""A hand-made report of a real situation: Llama 8B on four nodes of eight A100s."""

import dataclasses
import json
from pathlib import Path

import pytest

from advisor.report.report import Report


@pytest.fixture
def sample() -> Report:
    return Report.from_json(json.loads((Path(__file__).parent / "sample_report.json").read_text(encoding="utf8")))


@pytest.fixture
def bare() -> Report:
    """A report in which every part is missing that may be."""
    return Report(inputs={}, model={}, profile={}, hotspots=(), memory={}, cluster={}, plans=(), rejected=(), findings=())


@pytest.fixture
def hostile(sample: Report) -> Report:
    """The sample with text of a user who means harm, or has odd file names."""
    nasty = "<script>alert(1)</script>\x1b[31m\x07 [bold]{{ 7 * 7 }}\udc80"
    plan = dataclasses.replace(sample.plans[0], label=nasty, reasons=(nasty,), launch=f"python {nasty}")
    return dataclasses.replace(
        sample,
        inputs={**sample.inputs, "script": nasty},
        model={**sample.model, "class": nasty},
        plans=(plan, *sample.plans[1:]),
        warnings=(nasty,),
    )
