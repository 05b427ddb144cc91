"""Train files of the frameworks for scripts that lack something, and the sentence where there is none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from engine_plans import gpt2, resnet
from framework_cases import BOTTLENECKS, GPT2_SMALL, LLAMA_8B, python_problems, with_model

from advisor.engines import accelerate, lightning, trainer, why_no_files
from cost_models.types import Plan

DDP = Plan(dp_replicate_degree=2, micro_batch=4)


@pytest.mark.parametrize(
    ("engine", "facts", "expression"),
    [
        (accelerate, BOTTLENECKS, "accelerator.prepare(model, torch.optim.SGD(model.parameters()))"),
        (trainer, LLAMA_8B, "self.optimizer = torch.optim.SGD(model.parameters())"),
        (lightning, BOTTLENECKS, "return torch.optim.SGD(self.model.parameters())"),
    ],
    ids=["accelerate", "trainer", "lightning"],
)
def test_functions_without_an_optimizer_get_the_profiled_kind(engine, facts: dict, expression: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def build_model(): ...\ndef make_batch(n): ...\ndef loss_fn(m, b): ...\n")
    texts = engine.files(dataclasses.replace(with_model(resnet(DDP), facts), script=str(script)), "script.py")
    assert expression in texts[engine.TRAIN_FILE]
    (tmp_path / "made").mkdir()
    assert python_problems(texts, tmp_path / "made") == ""


@pytest.mark.parametrize("engine", [accelerate, trainer, lightning], ids=lambda e: e.NAME)
def test_functions_without_a_loss_get_no_loop(engine, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def build_model(): ...\ndef make_batch(n): ...\n")
    assert engine.TRAIN_FILE not in engine.files(dataclasses.replace(with_model(resnet(DDP), LLAMA_8B), script=str(script)), "script.py")


def test_engines_that_start_nothing_are_said_to() -> None:
    inp = dataclasses.replace(with_model(gpt2(DDP), GPT2_SMALL), engines=("colossalai",))
    assert why_no_files(inp) == "No train file, because the engines that can express the plan don't run the script itself."
