"""Generated pipelines run for real under gloo, on two and on four processes, and compute what one process computes."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_cells import HERE, LLAMA_IMPORTS, losses, run_cells
from pipeline_cells import MODELS, model_facts

from advisor.engines import EngineInput, write_plan
from advisor.profiling.schema import ProfileMeta
from cost_models.types import Plan


def pipe(pp_degree: int = 2, schedule: str = "1f1b", **more) -> Plan:
    return Plan(pp_degree=pp_degree, schedule=schedule, runtime="torch-tp", **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeCell:
    """A plan for one of the small models."""

    name: str
    model: str
    plan: Plan
    last_layers: tuple[int, ...] = (1,)  # numbers of the layers that stages end with
    precision: str = "fp32"
    tolerance: float = 1e-4


FOUR, EIGHT = {"micro_batch": 2, "num_microbatches": 4}, {"micro_batch": 1, "num_microbatches": 4}
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}
OF_TWO = (
    PipeCell(name="gpt2-1f1b", model="gpt2", plan=pipe(**FOUR)),
    PipeCell(name="gpt2-gpipe-recompute", model="gpt2", plan=pipe(schedule="gpipe", recompute="full", **FOUR)),
    PipeCell(name="gpt2-interleaved", model="gpt2", plan=pipe(**INTERLEAVED, **FOUR), last_layers=(0, 1, 2)),
    PipeCell(name="gpt2-fp16", model="gpt2", plan=pipe(**FOUR), precision="fp16", tolerance=2e-2),
    PipeCell(name="gpt2-bf16", model="gpt2", plan=pipe(**FOUR), precision="bf16", tolerance=2e-2),
    PipeCell(name="llama-interleaved-selective", model="llama_gqa", plan=pipe(recompute="selective", **INTERLEAVED, **FOUR), last_layers=(0, 1, 3)),
    PipeCell(name="bert-1f1b", model="bert", plan=pipe(**FOUR), last_layers=(0,)),
    PipeCell(name="moe-gpipe", model="moe", plan=pipe(schedule="gpipe", **FOUR), last_layers=(0,)),
    PipeCell(name="moe-few", model="moe", plan=pipe(micro_batch=8), last_layers=(0,)),
)  # fmt: skip
OVERFLOW = PipeCell(name="gpt2-overflow", model="overflow", plan=pipe(**FOUR), precision="fp16")
ZERO_BUBBLE = PipeCell(name="gpt2-zero-bubble", model="gpt2", plan=pipe(**INTERLEAVED, **FOUR), last_layers=(0, 1, 2))
SHARD, SHARDED = {"dp_shard_degree": 2}, {"dp_shard_degree": 2, "zero_stage": 3}
OF_FOUR = (
    PipeCell(name="llama-four-stages", model="llama_gqa", plan=pipe(4, **FOUR), last_layers=(0, 2, 3)),
    PipeCell(name="gpt2-replicas", model="gpt2", plan=pipe(dp_replicate_degree=2, **EIGHT)),
    PipeCell(name="gpt2-zero1", model="gpt2", plan=pipe(zero_stage=1, **SHARD, **EIGHT)),
    PipeCell(name="gpt2-zero3", model="gpt2", plan=pipe(recompute="full", **SHARDED, **EIGHT)),
    PipeCell(name="bert-zero2", model="bert", plan=pipe(schedule="gpipe", zero_stage=2, **SHARD, **EIGHT), last_layers=(0,)),
    PipeCell(name="llama-zero1-interleaved", model="llama_gqa", plan=pipe(zero_stage=1, **SHARD, **INTERLEAVED, **EIGHT), last_layers=(0, 1, 2)),
    PipeCell(name="llama-zero3-interleaved", model="llama_gqa", plan=pipe(**SHARDED, **INTERLEAVED, **EIGHT), last_layers=(0, 1, 2)),
    PipeCell(name="llama-zero3-bf16", model="llama_gqa", plan=pipe(**SHARDED, **EIGHT), precision="bf16", tolerance=2e-2),
    PipeCell(name="llama-zero3-fp16", model="llama_gqa", plan=pipe(**SHARDED, **EIGHT), precision="fp16", tolerance=2e-2),
    PipeCell(name="llama-tensor", model="llama_gqa", plan=pipe(tp_degree=2, **FOUR)),
    PipeCell(name="llama-tensor-sequence", model="llama_gqa", plan=pipe(tp_degree=2, sequence_parallel=True, recompute="selective", **INTERLEAVED, **FOUR),
             last_layers=(0, 1, 2)),
)  # fmt: skip
#: Plans of eight ranks on four: their last shard dimension is left with one rank.
NARROWED = (
    PipeCell(
        name="llama-three-ways", model="llama_gqa", plan=pipe(tp_degree=2, sequence_parallel=True, recompute="full", **SHARDED, **FOUR)
    ),
    PipeCell(name="gpt2-hybrid", model="gpt2", plan=pipe(dp_replicate_degree=2, **SHARDED, **EIGHT)),
)
BATCH, STEPS = 8, 3


def pipe_input(cell: PipeCell) -> EngineInput:
    meta = ProfileMeta(script=f"{cell.model}.py", form="functions", num_params=30_000, num_trainable_params=30_000, param_dtype="fp32", optimizer="adamw",
                       batch_size=4)  # fmt: skip
    return EngineInput(
        plan=cell.plan, script=str(MODELS / f"{cell.model}.py"), form="functions", meta=meta, gpus_per_node=cell.plan.world_size,
        model=model_facts(cell.model, list(cell.last_layers)), precision=cell.precision, engines=("pipeline",),
    )  # fmt: skip


def written(cell: PipeCell, folder: Path, *options: str) -> dict:
    """Write the cell's plan and say how to run it."""
    names = write_plan(pipe_input(cell), folder / cell.name)
    assert "train.py" in names
    train = str(folder / cell.name / "train.py")
    return {"name": cell.name, "file": str(HERE / "pipeline_cells.py"), "args": [train, "--steps", str(STEPS), *options]}


def narrowed(cell: PipeCell, folder: Path) -> dict:
    """The same with one rank along "shard"."""
    made = written(cell, folder)
    for name in ("parallelize.py", "train.py"):
        file = folder / cell.name / name
        text = re.sub(r"\(2, 2, 2\)", "(2, 1, 2)" if cell.plan.tp_degree > 1 else "(2, 2, 1)", file.read_text())
        file.write_text(text.replace("WORLD_SIZE, MICRO_BATCH, NUM_MICROBATCHES = 8", "WORLD_SIZE, MICRO_BATCH, NUM_MICROBATCHES = 4"))
    return made


def alone(*models: str) -> list[dict]:
    """The same trainings on one process."""
    return [
        {"name": m, "file": str(HERE / "references.py"), "args": ["functions", str(MODELS / f"{m}.py"), str(BATCH), "1"], "alone": True}
        for m in models
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, list[dict]]:
    cells = alone("gpt2", "llama_gqa", "bert", "moe") + [written(cell, folder) for cell in OF_TWO]
    bubble = written(ZERO_BUBBLE, folder)
    file = folder / ZERO_BUBBLE.name / "parallelize.py"
    file.write_text(re.sub(r"\bScheduleInterleaved1F1B\b", "ScheduleInterleavedZeroBubble", file.read_text()))
    first = written(OF_TWO[0], folder) | {"name": "begun"}
    kept = ["--checkpoint", str(folder / "kept"), "--metrics", str(folder / "metrics.jsonl"), "--eval-every", "1", "--eval-batches", "2"]
    begun = first | {"args": [first["args"][0], "--steps", "2", *kept]}
    resumed = first | {"name": "resumed", "args": [*first["args"], *kept]}
    return run_cells([*cells, bubble, written(OVERFLOW, folder), begun, resumed], folder, num_procs=2, imports=LLAMA_IMPORTS)


@pytest.fixture(scope="module")
def four(folder: Path) -> dict[str, list[dict]]:
    cells = alone("gpt2", "llama_gqa", "bert") + [written(cell, folder) for cell in OF_FOUR] + [narrowed(cell, folder) for cell in NARROWED]
    return run_cells(cells, folder, num_procs=4, imports=LLAMA_IMPORTS)


@pytest.fixture
def results(cell: PipeCell, request: pytest.FixtureRequest) -> dict[str, list[dict]]:
    return request.getfixturevalue({2: "two", 4: "four"}[cell.plan.world_size])  # type: ignore[no-any-return]


ALL = pytest.mark.parametrize("cell", (*OF_TWO, ZERO_BUBBLE, *OF_FOUR), ids=lambda c: c.name)


@ALL
def test_reproduces_the_losses_of_one_process(cell: PipeCell, results: dict[str, list[dict]]) -> None:
    ranks, (reference,) = results[cell.name], results[cell.model]
    assert reference["code"] == 0, reference["output"]
    assert [rank["code"] for rank in ranks] == [0] * cell.plan.world_size, "\n".join(rank["output"][-3000:] for rank in ranks)
    expected = losses(reference["output"])
    assert len(expected) == STEPS
    assert losses(ranks[0]["output"]) == pytest.approx(expected, rel=cell.tolerance)


@ALL
def test_each_rank_holds_only_its_stages(cell: PipeCell, results: dict[str, list[dict]]) -> None:
    whole = results[cell.model][0]["steps"][-1]["num_params"] + (TIED_PARAMS if cell.model == "gpt2" else 0)
    held = [rank["steps"][-1] for rank in results[cell.name]]
    apart = cell.plan.world_size // cell.plan.pp_degree
    assert sum(rank["num_params"] for rank in held[::apart]) == whole  # each once over a pipeline, but for the tied weight's two copies
    assert all(0 < rank["num_params"] < whole for rank in held)
    if cell.plan.zero_stage:
        assert all(rank["num_local"] == pytest.approx(rank["num_params"] / 2, rel=0.02) for rank in held)
    assert all(rank["num_state"] == 2 * rank["num_local"] for rank in held)


TIED_PARAMS = 96 * 32
HIDDEN = 16 * 32  # elements of a sample's hidden state


@ALL
def test_each_micro_batch_crosses_each_cut_once_each_way(cell: PipeCell, results: dict[str, list[dict]]) -> None:
    plan, ranks = cell.plan, results[cell.name]
    size = HIDDEN * plan.micro_batch // (plan.tp_degree if plan.sequence_parallel else 1)
    num_stages, apart = plan.pp_degree * plan.virtual_stages, plan.world_size // plan.pp_degree
    for number, rank in enumerate(ranks):
        mine = range(number // apart, num_stages, plan.pp_degree)
        sends = sum((stage + 1 < num_stages) + (stage > 0) for stage in mine)
        sent = ast.literal_eval(re.findall(r"^sent (.*)$", rank["output"], flags=re.MULTILINE)[-1])
        assert sent == {size: sends * plan.num_microbatches * STEPS}


@pytest.mark.parametrize("cell", NARROWED, ids=lambda c: c.name)
def test_three_ways_together(cell: PipeCell, four: dict[str, list[dict]]) -> None:
    ranks = four[cell.name]
    assert [rank["code"] for rank in ranks] == [0] * 4, "\n".join(rank["output"][-3000:] for rank in ranks)
    assert losses(ranks[0]["output"]) == pytest.approx(losses(four[cell.model][0]["output"]), rel=cell.tolerance)


def test_all_stages_skip_the_step_of_a_gradient_that_overflows_on_one(two: dict[str, list[dict]]) -> None:
    ranks = two[OVERFLOW.name]
    assert [rank["code"] for rank in ranks] == [0, 0], ranks[0]["output"]
    assert [len(rank["steps"]) for rank in ranks] == [STEPS - 1] * 2


def test_resumes_from_a_checkpoint_of_all_stages(two: dict[str, list[dict]]) -> None:
    expected = losses(two["gpt2"][0]["output"])
    assert [two[name][0]["code"] for name in ("begun", "resumed")] == [0, 0], two["begun"][0]["output"] + two["resumed"][0]["output"]
    printed = re.findall(r"step (\d) loss (\S+)", two["begun"][0]["output"]) + re.findall(
        r"step (\d) loss (\S+)", two["resumed"][0]["output"]
    )
    assert [int(step) for step, _ in printed] == [0, 1, 2]
    assert [float(loss) for _, loss in printed] == pytest.approx(expected, rel=1e-4)


def test_evaluates_between_steps_and_measures_the_norm_over_all_stages(two: dict[str, list[dict]], folder: Path) -> None:
    evaluations = re.findall(r"evaluation (\S+)", two["begun"][0]["output"])
    assert len(evaluations) == 2
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[0]["gradient_norm"] == pytest.approx(gradient_norm("gpt2"), rel=1e-4)


def gradient_norm(model: str) -> float:
    """Of the first step, on one process."""
    import torch
    from references import load

    torch.manual_seed(0)
    user = load(MODELS / f"{model}.py")
    module = user.build_model()
    user.loss_fn(module, user.make_batch(BATCH)).backward()
    return torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]).item()
