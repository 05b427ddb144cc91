"""What the train files of the functions form offer beside the loop: restarts to the digit, clipping, warm-up, metrics, evaluation."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch
from engine_cells import DEEPSPEED_IMPORTS, HERE, TORCH_IMPORTS, run_cells, script_input

from advisor.engines import EngineInput, write_plan
from cost_models.types import Plan

RESTARTS, ADAPTERS = HERE / "restarts.py", HERE / "adapters.py"
STEPS, KEPT = 6, 3  # steps of a run; after so many it is stopped and started again
CLIP_NORM, WARMUP_STEPS = 0.5, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A plan through one engine's train file."""

    name: str
    plan: Plan
    file: str = "train.py"
    script: Path = RESTARTS
    dropout: float = 0.0  # with it, the numbers that restarts go on with are each rank's own
    killed: bool = False  # else the first part ends by itself
    keep: int = 3  # checkpoints


def sharded(stage: int, **more) -> Plan:
    return Plan(dp_shard_degree=2, zero_stage=stage, **({"micro_batch": 2} | more))


RUNS = (
    Run(name="ddp", plan=Plan(dp_replicate_degree=2, micro_batch=1, num_microbatches=2), killed=True),
    Run(name="zero1", plan=sharded(1), dropout=0.1),
    Run(name="zero3", plan=sharded(3, recompute="full"), killed=True, keep=1),
    Run(name="fsdp1", plan=sharded(2, micro_batch=1, num_microbatches=2), file="fsdp1/train.py"),
    Run(name="tensor", plan=Plan(tp_degree=2, micro_batch=4)),
    Run(name="deepspeed", plan=sharded(3), file="train_deepspeed.py", keep=1),
    Run(name="adapters", plan=sharded(3), script=ADAPTERS),
)
OF_FOUR = (
    Run(name="tensor-zero3", plan=Plan(tp_degree=2, dp_shard_degree=2, zero_stage=3, micro_batch=2, sequence_parallel=True)),
    Run(name="fsdp1-hybrid", plan=Plan(dp_replicate_degree=2, dp_shard_degree=2, zero_stage=3), file="fsdp1/train.py"),
)
#: Those that a single process can be compared with: the data set's order is its own.
COMPARED = [run for run in (*RUNS, *OF_FOUR) if run.script == RESTARTS and not run.dropout]


def input_of(run: Run) -> EngineInput:
    return dataclasses.replace(script_input("tiny", run.plan), script=str(run.script))


def cells_of(run: Run, folder: Path) -> list[dict]:
    """A run that is never stopped, one that is, and its restart."""
    assert run.file in write_plan(input_of(run), folder / run.name)
    checkpoints = folder / f"{run.name}-checkpoints"
    plain = ["--steps", STEPS, "--eval-every", 2, "--eval-batches", 2, "--clip-norm", CLIP_NORM, "--warmup-steps", WARMUP_STEPS]
    kept = [*plain, "--checkpoint", checkpoints, "--checkpoint-every", KEPT, "--keep-checkpoints", run.keep]
    kill = {"KILLED": f"1:{KEPT + 2}", "CHECKPOINTS": str(checkpoints)} if run.killed else {}
    kinds = {
        "whole": ([*plain, "--metrics", folder / f"{run.name}.whole"], {}),
        "stopped": (kept if run.killed else [*kept, "--steps", KEPT], kill),
        "again": ([*kept, "--metrics", folder / f"{run.name}.again"], {}),
    }
    return [
        {
            "name": f"{run.name}-{kind}",
            "file": str(folder / run.name / run.file),
            "args": [str(arg) for arg in args],
            "env": {"DROPOUT": str(run.dropout)} | env,
        }
        for kind, (args, env) in kinds.items()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train-files")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[dict]]:
    two = run_cells([cell for run in RUNS for cell in cells_of(run, folder)], folder, num_procs=2, imports=DEEPSPEED_IMPORTS)
    four = run_cells([cell for run in OF_FOUR for cell in cells_of(run, folder)], folder, num_procs=4, imports=TORCH_IMPORTS)
    return two | four


def metrics(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def losses(output: str) -> list[str]:
    return re.findall(r"step \d+ loss (\S+)", output)


def evaluations(output: str) -> list[str]:
    return re.findall(r"step \d+ evaluation (\S+)", output)


@pytest.mark.parametrize("run", (*RUNS, *OF_FOUR), ids=lambda r: r.name)
def test_a_restart_reaches_the_same_losses_to_the_digit(run: Run, results: dict[str, list[dict]]) -> None:
    whole, stopped, again = (results[f"{run.name}-{kind}"] for kind in ("whole", "stopped", "again"))
    for rank in (*whole, *again):
        assert rank["code"] == 0, rank["output"][-3000:]
    assert stopped[1]["code"] == (-1 if run.killed else 0)
    expected = losses(whole[0]["output"])
    assert len(expected) == STEPS
    assert losses(stopped[0]["output"])[:KEPT] == expected[:KEPT]
    assert losses(again[0]["output"]) == expected[KEPT:]
    assert evaluations(again[0]["output"]) == evaluations(whole[0]["output"])[KEPT // 2 :]


@pytest.fixture(scope="module")
def alone() -> list[tuple[float, float]]:
    """Loss and gradient norm by step of one process, clipped and warmed up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.syspath_prepend(str(HERE))
        numpy.random.seed(0)
        torch.manual_seed(0)
        user = runpy.run_path(str(RESTARTS))
        model = user["build_model"]()
        optimizer = user["build_optimizer"](model)
        full_rate = optimizer.param_groups[0]["lr"]
        found = []
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = full_rate * min(1, (step + 1) / WARMUP_STEPS)
            loss = user["loss_fn"](model, user["make_batch"](4))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss.item(), norm.item()))
    return found


@pytest.mark.parametrize("run", COMPARED, ids=lambda r: r.name)
def test_clips_and_warms_up_as_one_process_does(
    run: Run, results: dict[str, list[dict]], folder: Path, alone: list[tuple[float, float]]
) -> None:
    assert results
    lines = metrics(folder, f"{run.name}.whole")
    assert [line["loss"] for line in lines] == pytest.approx([loss for loss, _ in alone], rel=1e-4)
    assert [line["gradient_norm"] for line in lines] == pytest.approx([norm for _, norm in alone], rel=1e-3)
    assert min(norm for _, norm in alone) > CLIP_NORM  # so that clipping counts


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)
def test_metrics_have_a_line_a_step_and_reasons_for_what_is_missing(run: Run, results: dict[str, list[dict]], folder: Path) -> None:
    assert results
    lines = metrics(folder, f"{run.name}.again")
    assert [line["step"] for line in lines] == list(range(KEPT, STEPS))
    for line in lines:
        assert line["step_time_s"] > 0
        assert 0 < line["memory_share"] < 1
        assert line["peak_memory_bytes"] > 2**20
        assert line["gpu_utilization_share"] is None
    assert "no GPU" in lines[0]["missing"]["gpu_utilization_share"]  # said once
    assert all("gpu_utilization_share" not in line.get("missing", ()) for line in lines[1:])
    shares = [line["communication_share"] for line in lines]
    assert shares[1:] == [None, None]
    assert 0 < shares[0] <= 1
    assert lines[0]["step_time_variation"] is None
    assert lines[-1]["step_time_variation"] >= 0


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)
def test_the_newest_checkpoints_are_kept_and_complete(run: Run, results: dict[str, list[dict]], folder: Path) -> None:
    assert results
    checkpoints = folder / f"{run.name}-checkpoints"
    assert (checkpoints / "latest").read_text() == f"step-{STEPS}"
    kept = [f"step-{KEPT}", f"step-{STEPS}"][-run.keep :]
    assert sorted(p.name for p in checkpoints.glob("step-*")) == kept
    assert (checkpoints / "complete").read_text().split() == kept


def test_evaluation_follows_the_weights(results: dict[str, list[dict]]) -> None:
    found = evaluations(results["ddp-whole"][0]["output"])
    assert len(found) == len(set(found)) == STEPS // 2
