"""Odd names of scripts, odd batches, plan.json files that were damaged, and engines that can't do what they are asked for."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_plans import resnet

from advisor.engines import plan_files, read_plan, why_no_files, write_plan
from cost_models.types import Plan

DDP = Plan(dp_replicate_degree=2, micro_batch=4, runtime="torch-ddp")


@pytest.mark.parametrize("name", ['my "odd" model.py', "back\\slash\\x1.py", "it's {{ ours }} $(id).py", 'three""".py', "é ü.py"])
@pytest.mark.parametrize("form", ["functions", "script"])
def test_any_name_of_a_script_can_be_written_into_python(name: str, form: str) -> None:
    inp = dataclasses.replace(resnet(DDP), script=f"/data/my models/{name}", form=form)
    texts = plan_files(inp, Path("/data/advice/plan-1"))
    trains = {file: ast.parse(text) for file, text in texts.items() if Path(file).name.startswith("train") and "helpers" not in file}
    heads = [ast.get_docstring(tree) or "" for file, tree in trains.items() if "checkpoints" not in file]
    assert heads
    assert all(name in head for head in heads)


def test_a_named_tuple_stays_one_in_each_rank_s_share() -> None:
    text = plan_files(resnet(DDP), Path("/data/advice/plan-1"))["train.py"]
    share = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == "share")
    names: dict[str, Any] = {"torch": torch, "Mapping": dict, "MICRO_BATCH": 2, "GLOBAL_BATCH": 4}
    exec(ast.unparse(share), names)
    pair = namedtuple("pair", "images labels")
    found = names["share"](pair(torch.arange(4), {"label": (torch.arange(4), "cat")}), 1, torch.device("cpu"))
    assert isinstance(found, pair)
    assert found.images.tolist() == [2, 3]
    assert found.labels["label"][0].tolist() == [2, 3]
    assert found.labels["label"][1] == "cat"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda values: [1, 2], "schema_version"),
        (lambda values: None, "schema_version"),
        (lambda values: {**values, "schema_version": 9}, "schema_version"),
        (lambda values: {**values, "model": []}, r"model is \[\]"),
        (lambda values: {**values, "meta": {**values["meta"], "accumulation": "x"}}, "accumulation is 'x'"),
        (lambda values: {**values, "plan": {**values["plan"], "dp_replicate_degree": "two"}}, "dp_replicate_degree is 'two'"),
        (lambda values: {**values, "plan": {**values["plan"], "micro_batch": 0}}, "micro_batch is 0"),
        (lambda values: {**values, "plan": {**values["plan"], "zero_stage": 4}}, "zero_stage 4"),
        (lambda values: {**values, "plan": {**values["plan"], "schedule": "zebra"}}, "zebra"),
    ],
)
def test_a_damaged_plan_is_refused_with_what_is_wrong(tmp_path: Path, damage: Any, said: str) -> None:
    write_plan(resnet(DDP), tmp_path)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))
    with pytest.raises(ValueError, match=said):
        read_plan(tmp_path)


def test_only_the_engines_asked_for_say_why_they_have_no_files() -> None:
    inp = resnet(Plan(dp_shard_degree=2, zero_stage=3, runtime="fsdp2"))
    said = why_no_files(dataclasses.replace(inp, engines=("ddp",)))
    assert said.startswith("No files, as no engine asked for can express this plan (PyTorch DDP: ")
    assert "FSDP2" not in said
