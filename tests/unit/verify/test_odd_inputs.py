"""Users who press Ctrl-C twice, batches that are named tuples, models without repeated layers."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from advisor.cli_verify import _stopping_once
from advisor.profiling.schema import load_profile
from advisor.verify.charges import check_collectives
from advisor.verify.reference import _piece
from advisor.verify.verdicts import FAILED, MEASURED
from advisor.workload import shape
from cost_models.types import Plan

PROFILES = Path(__file__).parents[2] / "profiles"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_only_the_first_signal_interrupts_so_that_all_is_cleared_away(number: int) -> None:
    before, cleared = signal.getsignal(number), False
    with pytest.raises(KeyboardInterrupt), _stopping_once():
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)
            cleared = True
    assert cleared
    assert signal.getsignal(number) == before


def test_a_named_tuple_stays_one_for_the_single_process() -> None:
    pair = namedtuple("pair", "images labels")
    found = _piece(pair(torch.arange(4), torch.arange(4)), 1, 2, 4)
    assert isinstance(found, pair)
    assert found.labels.tolist() == [2, 3]


def test_sharding_units_of_a_model_without_repeated_layers_are_only_measured() -> None:
    workload = shape(load_profile(PROFILES / "gpt2"))
    bare = dataclasses.replace(workload, groups=tuple(dataclasses.replace(g, can_recompute=False) for g in workload.groups))
    once = [{"collectives": [{"kind": "all-gather", "ranks": 2, "bytes": 4096, "count": 1}]}]
    assert check_collectives(once, bare, Plan(dp_shard_degree=2, zero_stage=3, runtime="fsdp2"), engine="fsdp2").status == MEASURED
    assert check_collectives(once, bare, Plan(dp_replicate_degree=2, runtime="torch-ddp"), engine="ddp").status == FAILED
