"""Runtimes as data."""

import pytest

from cost_models import load_runtime, runtime_names
from cost_models.catalogue import find_gpu, gpu_names


def test_every_runtime_says_where_its_traits_were_read():
    assert {"torch", "ddp", "fsdp2", "deepspeed", "megatron-core", "torchtitan", "nanotron"} <= set(runtime_names())
    for name in runtime_names():
        runtime = load_runtime(name)
        assert runtime.title
        assert runtime.source
        assert not runtime.calibrated_as or runtime.calibrated_as in runtime_names()


def test_successors_are_runtimes_of_gpu_families():
    families = {find_gpu(name).family for name in gpu_names()}
    for name in runtime_names():
        successors = load_runtime(name).successors
        assert set(successors) <= families
        assert set(successors.values()) <= set(runtime_names()) - {name}


def test_quirks_belong_to_the_runtime_whose_runs_showed_them():
    assert {name for name in runtime_names() if load_runtime(name).quirks} == {"nanotron"}


def test_an_unknown_runtime_names_the_nearest():
    with pytest.raises(ValueError, match="megatron"):
        load_runtime("megatrom")
