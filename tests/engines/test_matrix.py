"""Engines x models x plans: what the engines take runs and computes what one process computes; a wrong file is caught."""

from __future__ import annotations

from pathlib import Path

import matrix
import pytest
from matrix import BEGIN, END, MODELS, PLANS, Cell, Mutation, all_cells, different_in_mechanism, not_here, refusal

from advisor.verify.verdicts import FAILED, Check

README = Path(__file__).parents[2] / "README.md"


MUTATIONS = (
    Mutation("same samples on all ranks", Cell("ddp", "bert", "DDP"), "train.py", "i * WORLD_SIZE + rank", "i", "losses"),
    Mutation("sums over micro-batches", Cell("ddp", "bert", "DDP"), "train.py", "(loss / NUM_MICROBATCHES).backward()", "loss.backward()",
             "gradient norms"),
    Mutation("gradients not averaged", Cell("ddp", "bert", "DDP"), "train.py", "contextlib.nullcontext() if last else model.no_sync()",
             "model.no_sync()", "gradient norms"),
    Mutation("states on all ranks", Cell("ddp", "bert", "ZeRO-1"), "train.py", "optimizer_class=type(optimizer))",
             "optimizer_class=type(optimizer), process_group=dist.new_subgroups(1)[0])", "sharding"),
    Mutation("embedding and head not sharded", Cell("fsdp2", "bert", "FSDP"), "parallelize.py", "    shard(model)", "    _ = model", "sharding"),
    Mutation("another stage", Cell("deepspeed", "bert", "ZeRO-1"), "ds_config.json", '"stage": 1', '"stage": 0', "sharding"),
)  # fmt: skip


@pytest.fixture(scope="module")
def runnable() -> list[Cell]:
    return [cell for cell in all_cells() if not refusal(cell) and not not_here(cell)]


@pytest.fixture(scope="module")
def results(runnable: list[Cell], tmp_path_factory: pytest.TempPathFactory) -> dict[object, list[Check]]:
    return matrix.run([*different_in_mechanism(runnable), *MUTATIONS], tmp_path_factory.mktemp("matrix"))


def test_every_chosen_cell_computes_what_one_process_computes(results: dict[object, list[Check]]) -> None:
    wrong = [
        f"{cell.name}: {check.name}: {check.detail}"
        for cell, checks in results.items()
        if isinstance(cell, Cell)
        for check in checks
        if matrix.is_failure(check)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_engine_runs_every_plan_and_every_model_that_it_takes(runnable: list[Cell], results: dict[object, list[Check]]) -> None:
    run = [cell for cell in results if isinstance(cell, Cell)]
    assert {(c.engine, c.plan) for c in run} == {(c.engine, c.plan) for c in runnable}
    assert {(c.engine, c.model) for c in run} == {(c.engine, c.model) for c in runnable}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_wrong_file_is_caught(mutation: Mutation, results: dict[object, list[Check]]) -> None:
    failed = {check.name for check in results[mutation] if check.status == FAILED}
    assert mutation.caught_by in failed, results[mutation]


def test_every_model_and_every_plan_has_an_engine(runnable: list[Cell]) -> None:
    assert {cell.model for cell in runnable} == set(MODELS)
    assert {cell.plan for cell in runnable} == set(PLANS)


def test_every_refusal_has_a_reason_that_ends_a_sentence() -> None:
    reasons = {reason for cell in all_cells() if (reason := refusal(cell))}
    assert all(reason[0].islower() or reason[0].isdigit() for reason in reasons), reasons
    assert not [reason for reason in reasons if reason.endswith(".")]


def test_the_readme_shows_what_the_engines_say() -> None:
    text = README.read_text(encoding="utf8")
    if BEGIN not in text:
        pytest.skip("the README holds no matrix yet")
    shown = text.partition(BEGIN)[2].partition(END)[0]
    assert matrix.table() in shown, "the engines changed: put the output of `python -m tests.engines.matrix` into the README"
