"""DeepSpeed's configuration: split layers, hosts, and a validator that lets no changed key through."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_plans import CASES, llama

from advisor.engines import deepspeed, engines_for, plan_files
from cost_models.types import Plan

FOLDER = Path("advice/plan-1")
TENSOR = Plan(tp_degree=4, dp_shard_degree=4, zero_stage=2, num_microbatches=2, runtime="torch-tp")
OFFLOAD = Plan(dp_shard_degree=16, zero_stage=3, offload=True, runtime="fsdp2")
PIPELINE = Plan(pp_degree=2, schedule="1f1b", dp_shard_degree=4, zero_stage=1, num_microbatches=4, runtime="torch-tp")
STAGES = {"stages": [[f"model.layers.{i}" for i in range(16)], [f"model.layers.{i}" for i in range(16, 32)]]}
INPUTS = {
    "tensor": llama(TENSOR), "offload": llama(OFFLOAD), "half": dataclasses.replace(CASES["zero2"], precision="fp16"),
    "pipeline": llama(PIPELINE, model=STAGES),
}  # fmt: skip


def config(inp) -> dict[str, Any]:
    return json.loads(deepspeed.files(inp, "../../x.py")["ds_config.json"])


def paths(values: Any, path: tuple = ()) -> Iterator[tuple]:
    """Ways to every key, through dicts and lists."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from paths(value, (*path, key))


def mutations(inp) -> Iterator[tuple[str, dict]]:
    """Each key misspelt, given another value, given a value of another type."""
    original = config(inp)
    for *parents, key in paths(original):
        for name in ("misspelt", "other value", "other type"):
            changed = copy.deepcopy(original)
            place = changed
            for parent in parents:
                place = place[parent]
            value = place[key]
            if name == "misspelt" and isinstance(key, str):
                place[f"{key}_"] = place.pop(key)
            elif name == "other value" and isinstance(value, bool | int | float | str):
                place[key] = (not value) if isinstance(value, bool) else f"{value}x" if isinstance(value, str) else value + 1
            elif name == "other type":
                place[key] = 7 if isinstance(value, dict | list | str) else "many"
            else:
                continue
            yield f"{'.'.join(map(str, (*parents, key)))} {name}", changed


@pytest.mark.parametrize(
    ("case", "change", "changed"), [(case, change, changed) for case, inp in INPUTS.items() for change, changed in mutations(inp)]
)
def test_no_changed_key_gets_through(case: str, change: str, changed: dict) -> None:
    files = deepspeed.files(INPUTS[case], "../../x.py")
    assert deepspeed.validate(files, INPUTS[case]) == []
    assert deepspeed.validate(files | {"ds_config.json": json.dumps(changed)}, INPUTS[case]) != [], change


def test_split_layers_are_named_one_by_one() -> None:
    split = config(INPUTS["tensor"])["tensor_parallel"]
    column, row = split["partition_config"]["layer_specs"]
    assert split["autotp_size"] == 4
    assert split["partition_config"]["use_default_specs"] is False
    assert r"(model\.layers\.\d+)\.self_attn\.q_proj\.weight$" in column["patterns"]
    assert r"(model\.layers\.\d+)\.mlp\.down_proj\.weight$" in row["patterns"]


def test_split_layers_leave_the_global_batch_to_deepspeed() -> None:
    """DeepSpeed multiplies by all ranks where layers are split, and would refuse the right number."""
    assert "train_batch_size" not in config(INPUTS["tensor"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sequence_parallel": True}, "whole sequences"),
        ({"zero_stage": 3}, "ZeRO 1 and 2"),
        ({"zero_stage": 0}, "ZeRO 1 and 2"),
        ({"offload": True}, "on the GPU"),
        ({"pp_degree": 2, "schedule": "1f1b"}, "its pipeline"),
    ],
)
def test_split_layers_that_it_cant_do_are_refused(change: dict, reason: str) -> None:
    assert reason in deepspeed.supports(dataclasses.replace(TENSOR, **change), INPUTS["tensor"].model)


@pytest.mark.parametrize("model", [{}, {"tp_pairs": [{"column": ["attn.c_attn"], "row": ["attn.c_proj"]}], "block_paths": ["h.0"]}])
def test_weights_that_a_cut_would_mix_are_refused(model: dict) -> None:
    assert deepspeed.supports(TENSOR, model)
    assert not [e for e in engines_for(TENSOR, model) if e.engine == "DeepSpeed" and e.supported]


def test_hosts_are_listed_for_deepspeeds_launcher() -> None:
    files = plan_files(INPUTS["tensor"], FOLDER)
    assert files["hostfile"] == "node-1 slots=8\nnode-2 slots=8\n"
    assert "hostfile" in files["README.md"]
    assert "hostfile" not in plan_files(CASES["zero2"], FOLDER)


@pytest.mark.parametrize("text", ["node-1 slots=8\n", "node-1 slots=8\nnode-2 slots=4\n", "node-1\nnode-2\n"])
def test_a_wrong_hostfile_is_caught(text: str) -> None:
    files = deepspeed.files(INPUTS["tensor"], "../../x.py")
    assert deepspeed.validate(files | {"hostfile": text}, INPUTS["tensor"])
