"""The same with four processes: sharding inside pairs, replicas of the pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_cells import DEEPSPEED_IMPORTS, EXAMPLES, GPT2_ARGS, HERE, Cell, generated, losses, run_cells

from cost_models.types import Plan

HYBRID = {"dp_replicate_degree": 2, "dp_shard_degree": 2, "zero_stage": 3, "runtime": "fsdp2"}
DEEPSPEED = "train_deepspeed.py"
TENSOR = {"tp_degree": 2, "dp_shard_degree": 2, "runtime": "torch-tp"}
CELLS = (
    Cell(name="gpt2-hybrid", script="gpt2", plan=Plan(micro_batch=1, **HYBRID), reference="gpt2"),
    Cell(name="tiny-tensor-zero3", script="tiny", plan=Plan(zero_stage=3, micro_batch=2, num_microbatches=2, **TENSOR), reference="tiny"),
    Cell(
        name="tiny-tensor-replicated",
        script="tiny",
        plan=Plan(tp_degree=2, dp_replicate_degree=2, micro_batch=4, runtime="torch-tp"),
        reference="tiny",
    ),
    Cell(
        name="llama-tensor-zero2",
        script="llama",
        plan=Plan(zero_stage=2, sequence_parallel=True, recompute="selective", **TENSOR),
        reference="llama",
    ),
    Cell(name="tiny-hybrid-accumulate", script="tiny", plan=Plan(micro_batch=1, num_microbatches=2, **HYBRID), reference="tiny"),
)
#: DeepSpeed's AutoTP with ZeRO over two data ranks.
AUTO = (
    Cell(name="tiny-deepspeed-tensor-1", script="tiny", plan=Plan(zero_stage=1, micro_batch=4, **TENSOR), file=DEEPSPEED, reference="tiny"),
    Cell(name="llama-deepspeed-tensor-2", script="llama", plan=Plan(zero_stage=2, **TENSOR), file=DEEPSPEED, reference="llama"),
)
HYBRIDS = [c for c in CELLS if c.plan.runtime == "fsdp2"]
TENSORS = [c for c in CELLS if c.plan.runtime == "torch-tp"]
REFERENCES = (
    {"name": "gpt2", "file": str(EXAMPLES / "gpt2.py"), "args": GPT2_ARGS.format(steps=3).split()},
    {"name": "llama", "file": str(HERE / "references.py"), "args": ["llama", str(EXAMPLES / "llama3_8b.py"), "2"]},
    {"name": "tiny", "file": str(HERE / "references.py"), "args": ["functions", str(HERE / "tiny_transformer.py"), "8", "1"]},
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    folder: Path = tmp_path_factory.mktemp("four")
    cells = [dict(c, alone=True) for c in REFERENCES] + [generated(cell, folder) for cell in (*CELLS, *AUTO)]
    return run_cells(cells, folder, num_procs=4, imports=DEEPSPEED_IMPORTS)


@pytest.mark.parametrize("cell", (*CELLS, *AUTO), ids=lambda c: c.name)
def test_reproduces_the_losses_of_one_process(cell: Cell, results: dict[str, list[dict]]) -> None:
    ranks, (alone,) = results[cell.name], results[cell.reference]
    assert [rank["code"] for rank in ranks] == [0] * 4, "\n".join(rank["output"][-3000:] for rank in ranks)
    assert losses(ranks[0]["output"]) == pytest.approx(losses(alone["output"]), rel=cell.tolerance)


@pytest.mark.parametrize("cell", HYBRIDS, ids=lambda c: c.name)
def test_replicas_of_shards(cell: Cell, results: dict[str, list[dict]]) -> None:
    for rank in results[cell.name]:
        held = rank["steps"][-1]
        assert (held["world_size"], held["meshes"], held["num_plain_tensors"]) == (4, ["(2, 2)"], 0)
        assert held["placements"] == ["(Replicate(), Shard(dim=0))"]
        assert held["num_local"] == pytest.approx(held["num_params"] / 2, rel=0.01)


@pytest.mark.parametrize("cell", TENSORS, ids=lambda c: c.name)
def test_layers_are_split_over_tensor_and_data_ranks(cell: Cell, results: dict[str, list[dict]]) -> None:
    whole = results[cell.reference][0]["steps"][-1]["num_params"]
    for rank in results[cell.name]:
        held = rank["steps"][-1]
        assert held["num_plain_tensors"] == 0
        assert held["num_params"] == whole
        split = [p for p in held["placements"] if "Shard" in p.rsplit(",", 1)[-1]]
        assert split, held["placements"]
        assert held["num_local"] < 0.85 * whole / (2 if cell.plan.zero_stage else 1)


def test_tensor_groups_read_the_same_data_and_data_ranks_don_t(results: dict[str, list[dict]]) -> None:
    ranks = results["llama-tensor-zero2"]
    assert [len(rank["steps"]) for rank in ranks] == [3] * 4
    assert losses(ranks[0]["output"]) == pytest.approx(losses(results["llama"][0]["output"]), rel=1e-4)


@pytest.mark.parametrize("cell", AUTO, ids=lambda c: c.name)
def test_deepspeed_splits_layers_and_partitions_the_rest(cell: Cell, results: dict[str, list[dict]]) -> None:
    whole = results[cell.reference][0]["steps"][-1]["num_params"]
    for rank in results[cell.name]:
        held = rank["steps"][-1]
        assert held["world_size"] == 4
        assert held["num_params"] < 0.5 * whole  # half of what a rank of a tensor group holds, which is less than all
        assert held["num_state"] == pytest.approx(2 * held["num_params"], rel=0.01)
