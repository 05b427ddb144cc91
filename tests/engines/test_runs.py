"""Generated files run for real under gloo, two processes, and compute what one process computes; nothing is compiled for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_cells import EXAMPLES, GPT2_ARGS, HERE, RESNET_ENV, Cell, generated, losses, run_cells

from cost_models.types import Plan


def ddp(**more) -> Plan:
    return Plan(dp_replicate_degree=2, runtime="ddp", **more)


def sharded(stage: int, **more) -> Plan:
    return Plan(dp_shard_degree=2, zero_stage=stage, runtime={3: "fsdp2"}.get(stage, "deepspeed"), **more)


DEEPSPEED = "train_deepspeed.py"
CELLS = (
    Cell(name="gpt2-ddp", script="gpt2", plan=ddp(micro_batch=2), reference="gpt2"),
    Cell(name="gpt2-ddp-accumulate-recompute", script="gpt2", plan=ddp(micro_batch=1, num_microbatches=2, recompute="full"), reference="gpt2"),
    Cell(name="gpt2-zero1", script="gpt2", plan=sharded(1, micro_batch=1, num_microbatches=2), reference="gpt2"),
    Cell(name="gpt2-zero2-selective", script="gpt2", plan=sharded(2, micro_batch=2, recompute="selective"), reference="gpt2"),
    Cell(name="gpt2-zero3", script="gpt2", plan=sharded(3, micro_batch=2), reference="gpt2"),
    Cell(name="gpt2-zero3-accumulate", script="gpt2", plan=sharded(3, micro_batch=1, num_microbatches=2, recompute="full"), reference="gpt2"),
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
)  # fmt: skip
REFERENCES = (
    {"name": "gpt2", "file": str(EXAMPLES / "gpt2.py"), "args": GPT2_ARGS.format(steps=3).split()},
    {"name": "llama", "file": str(HERE / "references.py"), "args": ["llama", str(EXAMPLES / "llama3_8b.py"), "2"]},
    {"name": "resnet", "file": str(HERE / "references.py"), "args": ["functions", str(EXAMPLES / "resnet50.py"), "8", "4"], "env": RESNET_ENV},
    {"name": "tiny", "file": str(HERE / "references.py"), "args": ["functions", str(HERE / "tiny_transformer.py"), "4", "1"]},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[dict]]:
    cells = [dict(c, alone=True) for c in REFERENCES] + [generated(cell, folder) for cell in CELLS]
    return run_cells(cells, folder, num_procs=2, imports=("deepspeed", "transformers.models.llama.modeling_llama"))


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: c.name)
def test_reproduces_the_losses_of_one_process(cell: Cell, results: dict[str, list[dict]]) -> None:
    ranks, (alone,) = results[cell.name], results[cell.reference]
    assert alone["code"] == 0, alone["output"]
    assert [rank["code"] for rank in ranks] == [0, 0], "\n".join(rank["output"][-3000:] for rank in ranks)
    expected = losses(alone["output"])
    assert len(expected) == 3
    assert losses(ranks[0]["output"]) == pytest.approx(expected, rel=cell.tolerance)
