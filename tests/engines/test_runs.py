"""Generated files run for real under gloo, two processes, and compute what one process computes; nothing is compiled for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_cells import DEEPSPEED_IMPORTS, EXAMPLES, GPT2_ARGS, HERE, RESNET_ENV, Cell, generated, losses, run_cells, script_input

from advisor.engines import write_plan
from cost_models.types import Plan


def ddp(**more) -> Plan:
    return Plan(dp_replicate_degree=2, runtime="torch-ddp", **more)


def sharded(stage: int, **more) -> Plan:
    return Plan(dp_shard_degree=2, zero_stage=stage, runtime={3: "fsdp2"}.get(stage, "deepspeed-zero"), **more)


DEEPSPEED, FSDP1 = "train_deepspeed.py", "fsdp1/train.py"
CELLS = (
    Cell(name="gpt2-ddp", script="gpt2", plan=ddp(micro_batch=2), reference="gpt2"),
    Cell(name="gpt2-ddp-accumulate-recompute", script="gpt2", plan=ddp(micro_batch=1, num_microbatches=2, recompute="full"), reference="gpt2"),
    Cell(name="gpt2-zero1", script="gpt2", plan=sharded(1, micro_batch=1, num_microbatches=2), reference="gpt2"),
    Cell(name="gpt2-zero2-selective", script="gpt2", plan=sharded(2, micro_batch=2, recompute="selective"), reference="gpt2"),
    Cell(name="gpt2-zero3", script="gpt2", plan=sharded(3, micro_batch=2), reference="gpt2"),
    Cell(name="gpt2-zero3-accumulate", script="gpt2", plan=sharded(3, micro_batch=1, num_microbatches=2, recompute="full"), reference="gpt2"),
    Cell(name="gpt2-fsdp1", script="gpt2", plan=sharded(3, micro_batch=1, num_microbatches=2, recompute="full"), file=FSDP1, reference="gpt2"),
    Cell(name="gpt2-deepspeed-0", script="gpt2", plan=ddp(micro_batch=1, num_microbatches=2), file=DEEPSPEED, reference="gpt2"),
    Cell(name="gpt2-deepspeed-1", script="gpt2", plan=sharded(1, micro_batch=1, num_microbatches=2), file=DEEPSPEED, reference="gpt2"),
    Cell(name="gpt2-deepspeed-2", script="gpt2", plan=sharded(2, micro_batch=2, recompute="selective"), file=DEEPSPEED, reference="gpt2"),
    Cell(name="gpt2-deepspeed-3", script="gpt2", plan=sharded(3, micro_batch=2, recompute="full"), file=DEEPSPEED, reference="gpt2"),
    Cell(name="llama-ddp", script="llama", plan=ddp(), reference="llama"),
    Cell(name="llama-zero3", script="llama", plan=sharded(3), reference="llama"),
    Cell(name="llama-deepspeed-3", script="llama", plan=sharded(3), file=DEEPSPEED, reference="llama"),
    Cell(name="resnet-ddp", script="resnet", plan=ddp(micro_batch=8, num_microbatches=2), reference="resnet"),
    Cell(name="resnet-zero3-offload", script="resnet", plan=sharded(3, micro_batch=8, num_microbatches=2, offload=True), reference="resnet"),
    Cell(name="resnet-deepspeed-2-offload", script="resnet", plan=sharded(2, micro_batch=8, num_microbatches=2, offload=True), file=DEEPSPEED,
         reference="resnet"),
    Cell(name="tiny-ddp", script="tiny", plan=ddp(micro_batch=2), reference="tiny"),
    Cell(name="tiny-zero1", script="tiny", plan=sharded(1, micro_batch=1, num_microbatches=2), reference="tiny"),
    Cell(name="tiny-zero2", script="tiny", plan=sharded(2, micro_batch=1, num_microbatches=2), reference="tiny"),
    Cell(name="tiny-zero3-selective", script="tiny", plan=sharded(3, micro_batch=2, recompute="selective"), reference="tiny"),
    Cell(name="tiny-deepspeed-1", script="tiny", plan=sharded(1, micro_batch=1, num_microbatches=2), file=DEEPSPEED, reference="tiny"),
    Cell(name="tiny-deepspeed-3-offload", script="tiny", plan=sharded(3, micro_batch=2, offload=True), file=DEEPSPEED, reference="tiny"),
    Cell(name="tiny-ddp-bf16", script="tiny", plan=ddp(micro_batch=2), precision="bf16", tolerance=2e-2, reference="tiny"),
    Cell(name="tiny-zero3-bf16", script="tiny", plan=sharded(3, micro_batch=2), precision="bf16", tolerance=2e-2, reference="tiny"),
    Cell(name="tiny-deepspeed-2-bf16", script="tiny", plan=sharded(2, micro_batch=2), file=DEEPSPEED, precision="bf16", tolerance=2e-2,
         reference="tiny"),
    Cell(name="tiny-tensor", script="tiny", plan=Plan(tp_degree=2, micro_batch=4, runtime="torch-tp"), reference="tiny"),
    Cell(name="tiny-tensor-sequence", script="tiny", reference="tiny",
         plan=Plan(tp_degree=2, micro_batch=2, num_microbatches=2, sequence_parallel=True, recompute="selective", runtime="torch-tp")),
)  # fmt: skip
HABITS = (
    Cell(name="habits-ddp", script="habits", plan=ddp(micro_batch=2, num_microbatches=4), reference="habits"),
    Cell(name="habits-zero1", script="habits", plan=sharded(1, micro_batch=4, num_microbatches=2), reference="habits"),
    Cell(name="habits-zero3", script="habits", plan=sharded(3, micro_batch=2, num_microbatches=4, recompute="full"), reference="habits"),
    Cell(
        name="habits-deepspeed-2", script="habits", plan=sharded(2, micro_batch=2, num_microbatches=4), file=DEEPSPEED, reference="habits"
    ),
    Cell(name="habits-fsdp1-2", script="habits", plan=sharded(2, micro_batch=2, num_microbatches=4), file=FSDP1, reference="habits"),
    Cell(name="habits-fsdp1-0", script="habits", plan=ddp(micro_batch=2, num_microbatches=4), file=FSDP1, reference="habits"),
    Cell(name="stream-ddp", script="stream", plan=ddp(micro_batch=4, num_microbatches=2), reference="habits"),
)
REFUSED = Cell(name="never-calls", script="never_calls", plan=ddp(micro_batch=2))
#: Cells in which one rank saves alone, and that rank.
SAVE_ALONE = (
    (Cell(name="saves-alone-zero3", script="saves_alone", plan=sharded(3, micro_batch=2)), 1),
    (Cell(name="saves-alone-deepspeed-3", script="saves_alone", plan=sharded(3, micro_batch=2), file=DEEPSPEED), 0),
)
#: Cells that go on from what they saved.
RESUMED = [cell for cell in HABITS if cell.name in {"habits-ddp", "habits-zero3", "habits-fsdp1-2"}]
ONE_GROUP = CELLS  # DeepSpeed steps each parameter group by itself
CELLS += HABITS
REFERENCES = (
    {"name": "gpt2", "file": str(EXAMPLES / "gpt2.py"), "args": GPT2_ARGS.format(steps=3).split()},
    {"name": "llama", "file": str(HERE / "references.py"), "args": ["llama", str(EXAMPLES / "llama3_8b.py"), "2"]},
    {
        "name": "resnet",
        "file": str(HERE / "references.py"),
        "args": ["functions", str(EXAMPLES / "resnet50.py"), "8", "4"],
        "env": RESNET_ENV,
    },
    {"name": "habits", "file": str(HERE / "habits.py"), "args": ["--save", "{folder}/habits.pt"]},
    {"name": "tiny", "file": str(HERE / "references.py"), "args": ["functions", str(HERE / "tiny_transformer.py"), "4", "1"]},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def saving_alone(cell: Cell, rank: int, folder: Path) -> dict:
    """A cell in which only `rank` saves, and waits a few seconds for the others, not a minute."""
    made = generated(cell, folder)
    file = Path(made["file"])
    text = file.read_text()
    assert "SAVE_WAIT_S = 60" in text
    file.write_text(text.replace("SAVE_WAIT_S = 60", "SAVE_WAIT_S = 4"))
    return made | {"args": [str(rank), str(folder / f"{cell.name}.pt")]}


def resuming(cell: dict, folder: Path) -> dict:
    return cell | {"name": f"{cell['name']}-resumed", "args": ["--resume", str(folder / f"{cell['name']}.pt")]}


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[dict]]:
    alone = [dict(c, alone=True, args=[a.format(folder=folder) for a in c["args"]]) for c in REFERENCES]
    cells = (
        alone
        + [resuming(cell, folder) for cell in alone if cell["name"] == "habits"]
        + [generated(cell, folder) for cell in (*CELLS, REFUSED)]
        + [resuming(generated(cell, folder), folder) for cell in RESUMED]
        + [saving_alone(cell, rank, folder) for cell, rank in SAVE_ALONE]
    )
    return run_cells(cells, folder, num_procs=2, imports=DEEPSPEED_IMPORTS)


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: c.name)
def test_reproduces_the_losses_of_one_process(cell: Cell, results: dict[str, list[dict]]) -> None:
    ranks, (alone,) = results[cell.name], results[cell.reference]
    assert alone["code"] == 0, alone["output"]
    assert [rank["code"] for rank in ranks] == [0, 0], "\n".join(rank["output"][-3000:] for rank in ranks)
    expected = losses(alone["output"])
    assert len(expected) == 3
    assert losses(ranks[0]["output"]) == pytest.approx(expected, rel=cell.tolerance)


def sharded_cells(file: str, *stages: int) -> list[Cell]:
    return [c for c in ONE_GROUP if c.file == file and c.plan.zero_stage in stages]


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: c.name)
def test_runs_on_two_processes_over_gloo(cell: Cell, results: dict[str, list[dict]]) -> None:
    for rank in results[cell.name]:
        assert {(step["world_size"], step["backend"]) for step in rank["steps"]} == {(2, "gloo")}


@pytest.mark.parametrize("cell", ONE_GROUP, ids=lambda c: c.name)
def test_takes_one_optimizer_step_per_global_batch(cell: Cell, results: dict[str, list[dict]]) -> None:
    kind = "SGD" if cell.script == "resnet" else "AdamW"
    for rank in results[cell.name]:
        assert [step["optimizer"] for step in rank["steps"] if step["optimizer"] == kind] == [kind] * 3


@pytest.mark.parametrize("cell", sharded_cells("train.py", 2, 3), ids=lambda c: c.name)
def test_fsdp2_shards_every_parameter_and_its_states(cell: Cell, results: dict[str, list[dict]]) -> None:
    ranks = [rank["steps"][-1] for rank in results[cell.name]]
    states_per_param = 1 if cell.script == "resnet" else 2
    for held in ranks:
        assert held["num_plain_tensors"] == 0
        assert (held["placements"], held["meshes"]) == (["(Shard(dim=0),)"], ["(2,)"])
        assert held["num_local"] == pytest.approx(held["num_params"] / 2, rel=0.01)
        assert held["num_state"] == states_per_param * held["num_local"]
    assert sum(held["num_local"] for held in ranks) == ranks[0]["num_params"]


@pytest.mark.parametrize("cell", [c for c in CELLS if c.file == FSDP1 and c.plan.zero_stage], ids=lambda c: c.name)
def test_fsdp1_holds_half_of_the_parameters_and_states(cell: Cell, results: dict[str, list[dict]]) -> None:
    ranks = [rank["steps"][-1] for rank in results[cell.name]]
    alone = results[cell.reference][0]["steps"][-1]
    for held in ranks:
        assert held["num_state"] == pytest.approx(alone["num_state"] / 2, rel=0.02)
    assert sum(held["num_state"] for held in ranks) == alone["num_state"]


@pytest.mark.parametrize("cell", sharded_cells("train.py", 1), ids=lambda c: c.name)
def test_zero_redundancy_optimizer_splits_the_states(cell: Cell, results: dict[str, list[dict]]) -> None:
    ranks = [[s for s in rank["steps"] if s["optimizer"] == "AdamW"][-1] for rank in results[cell.name]]
    whole = [s for s in results[cell.name][0]["steps"] if s["optimizer"] == "ZeroRedundancyOptimizer"][-1]["num_params"]
    assert sum(held["num_state"] for held in ranks) == 2 * whole
    assert max(held["num_state"] for held in ranks) < 1.4 * whole


@pytest.mark.parametrize("cell", sharded_cells(DEEPSPEED, 1, 2, 3), ids=lambda c: c.name)
def test_deepspeed_partitions_the_optimizer(cell: Cell, results: dict[str, list[dict]]) -> None:
    ranks = [rank["steps"][-1] for rank in results[cell.name]]
    alone = results[cell.reference][0]["steps"][-1]
    for held in ranks:
        assert held["num_params"] == pytest.approx(alone["num_params"] / 2, rel=0.01)
        assert held["num_state"] == pytest.approx(alone["num_state"] / 2, rel=0.01)


@pytest.mark.parametrize("cell", [c for c in CELLS if c.plan.dp_degree > 1 and c.plan.zero_stage == 0], ids=lambda c: c.name)
def test_replicated_plans_hold_everything_on_every_rank(cell: Cell, results: dict[str, list[dict]]) -> None:
    alone = results[cell.reference][0]["steps"][-1]
    for rank in results[cell.name]:
        assert rank["steps"][-1]["num_params"] == rank["steps"][-1]["num_local"] == alone["num_params"]


@pytest.mark.parametrize("cell", [c for c in HABITS if c.file != DEEPSPEED], ids=lambda c: c.name)
def test_ends_with_the_weights_states_and_schedule_of_one_process(cell: Cell, results: dict[str, list[dict]], folder: Path) -> None:
    assert results
    alone, here = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("habits", cell.name))
    assert here["lr"] == alone["lr"]
    assert here["model"].keys() == alone["model"].keys()
    for name, weight in alone["model"].items():
        torch.testing.assert_close(here["model"][name], weight, rtol=1e-4, atol=5e-5)
    if cell.plan.zero_stage != 1:  # ZeRO-1's are in an optimizer that the script doesn't know
        found, expected = here["optimizer"], alone["optimizer"]
        assert [group["params"] for group in found["param_groups"]] == [group["params"] for group in expected["param_groups"]]
        for number, states in expected["state"].items():
            torch.testing.assert_close(found["state"][number], states, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("cell", RESUMED, ids=lambda c: c.name)
def test_a_script_goes_on_from_what_it_saved(cell: Cell, results: dict[str, list[dict]]) -> None:
    ranks, (alone,) = results[f"{cell.name}-resumed"], results["habits-resumed"]
    assert [rank["code"] for rank in (*ranks, alone)] == [0, 0, 0], ranks[0]["output"][-3000:]
    expected = losses(alone["output"])
    assert expected[0] != pytest.approx(losses(results["habits"][0]["output"])[0], rel=1e-2)
    assert losses(ranks[0]["output"]) == pytest.approx(expected, rel=1e-4)


def test_deepspeed_saves_its_own_checkpoint(results: dict[str, list[dict]], folder: Path) -> None:
    assert results
    assert (folder / "habits-deepspeed-2.pt.deepspeed" / "latest").is_file()


def test_deepspeed_says_where_its_checkpoint_is(results: dict[str, list[dict]]) -> None:
    assert "habits-deepspeed-2.pt.deepspeed/; what the script hands over is not saved" in results["habits-deepspeed-2"][0]["output"]


@pytest.mark.parametrize(("cell", "rank"), SAVE_ALONE, ids=lambda value: getattr(value, "name", ""))
def test_a_rank_that_saves_alone_stops_the_run(cell: Cell, rank: int, results: dict[str, list[dict]], folder: Path) -> None:
    ranks = results[cell.name]
    assert f"rank {rank} saves although others don't: saves_alone.py decides from its own rank's loss" in ranks[rank]["output"]
    assert [one["code"] for one in ranks] == [1, 1]
    assert not (folder / f"{cell.name}.pt").exists()


def norms(output: str) -> list[float]:
    """Gradient norms printed in the last turn of each optimizer step."""
    found = [float(x) for x in re.findall(r"norm (\S+)", output)]
    return found[len(found) // 3 - 1 :: len(found) // 3]


@pytest.mark.parametrize("cell", [c for c in HABITS if c.file != DEEPSPEED], ids=lambda c: c.name)
def test_clips_the_norm_that_one_process_clips(cell: Cell, results: dict[str, list[dict]]) -> None:
    assert norms(results[cell.name][0]["output"]) == pytest.approx(norms(results["habits"][0]["output"]), rel=1e-3)


def test_only_rank_0_prints(results: dict[str, list[dict]]) -> None:
    for cell in CELLS:
        if cell.file != DEEPSPEED:
            assert losses(results[cell.name][1]["output"]) == []


def test_stops_rather_than_train_copies_apart(results: dict[str, list[dict]]) -> None:
    for rank in results[REFUSED.name]:
        assert rank["code"] == 1
    assert "never calls its model" in results[REFUSED.name][0]["output"]


def test_nothing_is_compiled(results: dict[str, list[dict]], folder: Path) -> None:
    assert results
    assert not (folder / "extensions").exists()


def test_launch_script_starts_the_plan(tmp_path: Path, results: dict[str, list[dict]]) -> None:
    names = write_plan(script_input("tiny", ddp(micro_batch=2)), tmp_path)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [tmp_path / "launch.sh", "--steps", "3"], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert "launch.sh" in names
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(done.stdout) == pytest.approx(losses(results["tiny"][0]["output"]), rel=1e-4)
