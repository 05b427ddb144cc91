"""The Python API: what it takes, and one sentence for what it can't."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import advisor


def test_whole_numbers_of_numpy_are_whole_numbers(small_gpt2):
    report = advisor.plan(small_gpt2, gpu="a100", nodes=np.int64(2), engine=["fsdp2"])
    assert report.plans == advisor.plan(small_gpt2, gpu="a100", nodes=2, engine=("fsdp2",)).plans
    assert report.plans[0].plan["world_size"] == 16


@pytest.mark.parametrize("step", ["train.py", Path("profile"), None])
def test_a_plan_needs_a_profile(step):
    with pytest.raises(advisor.AdvisorError, match=r"advisor\.plan\(advisor\.profile"):
        advisor.plan(step, gpu="a100")


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"engine": None}, "engine is a list of names"),
        ({"engine": "fsdp2"}, "engine is a list of names"),
        ({"nodes": 2.0}, "--nodes must be a whole number"),
        ({"nodes": True}, "--nodes must be a whole number"),
        ({"max_memory_share": "most"}, "--max-memory-share must be a number"),
        ({"max_memory_share": float("nan")}, "--max-memory-share must be above 0"),
        ({"node": 2}, "Did you mean 'nodes'?"),
    ],
)
def test_wishes_of_the_wrong_kind_are_one_sentence(small_gpt2, wish, says):
    with pytest.raises(advisor.AdvisorError, match=says.replace("?", r"\?")):
        advisor.plan(small_gpt2, gpu="a100", **wish)
