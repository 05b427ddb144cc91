"""DeepSpeed's pipeline runs for real under gloo, unpatched, on two and on four processes, and computes what one process computes.

The matrix runs it beside the other engines; here are four stages, sharded states in bf16, frozen weights read from a data set, clipping,
evaluation, and a run that loses a rank and goes on from its checkpoint.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine_cells import HERE
from pipeline_cells import MODELS, model_facts
from references import load

from advisor.engines import EngineInput, deepspeed, write_plan
from advisor.profiling.schema import ProfileMeta
from advisor.verify import compare, starts
from advisor.verify.cells import run_cells
from advisor.verify.engine_run import Run, engine_cells, numbers, reference_cell, run_cell
from advisor.verify.facts import Facts
from advisor.verify.verdicts import NOT_HERE, PASSED, Check
from cost_models.types import Plan

NUM_STEPS, LIMIT_S, BATCH, CLIP_NORM, EVAL_SEED = 2, 90.0, 8, 0.3, 1_000_000
ADAPTERS = {
    "block_paths": ["layers.0", "layers.1"], "can_pipeline": True, "tied": [["embed.weight", "head.weight"]],
    "stages": [["embed", "layers.0"], ["layers.1", "norm", "head"]],
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeCell:
    """A plan with stages for a script."""

    name: str
    script: Path
    plan: Plan
    model: dict
    precision: str = "fp32"

    @property
    def inp(self) -> EngineInput:
        meta = ProfileMeta(script=self.script.name, form="functions", num_params=30_000, num_trainable_params=30_000, param_dtype="fp32",
                           optimizer="adamw", batch_size=4)  # fmt: skip
        return EngineInput(plan=self.plan, script=str(self.script), form="functions", meta=meta, gpus_per_node=self.plan.world_size,
                           model=self.model, precision=self.precision, engines=("deepspeed",))  # fmt: skip


def pipe(pp_degree: int = 2, **more) -> Plan:
    return Plan(pp_degree=pp_degree, runtime="torch-tp", **{"schedule": "1f1b", "micro_batch": 2, "num_microbatches": 4, **more})


SHARDED = {"dp_shard_degree": 2, "zero_stage": 1, "num_microbatches": 2}
ZERO1 = PipeCell(name="zero1", script=MODELS / "gpt2.py", plan=pipe(**SHARDED), model=model_facts("gpt2", [1]))
OF_FOUR = (
    ZERO1,
    PipeCell(name="zero1-bf16", script=MODELS / "gpt2.py", plan=pipe(**SHARDED, recompute="full"), model=model_facts("gpt2", [1]), precision="bf16"),
    PipeCell(name="four-stages", script=MODELS / "gpt2.py", plan=pipe(4, recompute="selective"), model=model_facts("gpt2", [0, 1, 2])),
)  # fmt: skip
FROZEN = PipeCell(name="frozen", script=HERE / "adapters.py", plan=pipe(), model=ADAPTERS)


def run_of(cell: PipeCell, folder: Path) -> Run:
    """A folder for each script, and so one single process for all its plans, which take equal batches."""
    home = folder / cell.script.stem
    home.mkdir(exist_ok=True)
    facts = Facts(inp=cell.inp, workload=None)  # type: ignore[arg-type]  nothing is priced here
    return Run(facts=facts, removed_blocks=(), folder=home, num_steps=NUM_STEPS, limit_s=LIMIT_S, on_gpu=False)


def alone(cell: PipeCell, folder: Path) -> dict:
    """The single process."""
    return {**reference_cell(run_of(cell, folder)), "name": reference(cell), "after": ""}


def reference(cell: PipeCell) -> str:
    return f"{cell.script.stem} alone"


def job(cell: PipeCell, folder: Path) -> dict:
    """The engine."""
    run, target = run_of(cell, folder), folder / cell.name
    write_plan(cell.inp, target)
    return {**run_cell(run, cell.name), **starts.start(deepspeed, cell.inp, target, NUM_STEPS), "after": reference(cell)}


def losing_and_resumed(cell: PipeCell, folder: Path) -> list[dict]:
    """The engine again, losing a rank, and a run that goes on from its checkpoint."""
    run = run_of(cell, folder)
    write_plan(cell.inp, run.folder / "deepspeed")
    return [{**made, "after": reference(cell)} for made in engine_cells(deepspeed, run)[1:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def four(folder: Path) -> dict[str, list[dict]]:
    cells = [alone(ZERO1, folder), *(job(cell, folder) for cell in OF_FOUR), *losing_and_resumed(ZERO1, folder)]
    return run_cells(cells, folder, num_processes=4, imports=starts.heavy_imports(["deepspeed"]))


@pytest.fixture(scope="module")
def clipped_script(folder: Path) -> Path:
    """GPT-2 trained by SGD, whose steps show how far gradients were clipped."""
    text = (MODELS / "gpt2.py").read_text()
    script = folder / "gpt2_sgd.py"
    script.write_text(text.replace("AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)", "SGD(model.parameters(), lr=1.0)"))
    return script


@pytest.fixture(scope="module")
def two(folder: Path, clipped_script: Path) -> dict[str, list[dict]]:
    clipped = PipeCell(name="clipped", script=clipped_script, plan=pipe(), model=model_facts("gpt2", [1]))
    options = ["--clip-norm", str(CLIP_NORM), "--eval-every", "1", "--eval-batches", "2", "--metrics", str(folder / "metrics.jsonl")]
    made = job(clipped, folder)
    cells = [alone(FROZEN, folder), job(FROZEN, folder), {**made, "args": [*made["args"], *options], "after": ""}]
    return run_cells(cells, folder, num_processes=2, imports=starts.heavy_imports(["deepspeed"]))


@pytest.fixture
def results(cell: PipeCell, request: pytest.FixtureRequest) -> dict[str, list[dict]]:
    return request.getfixturevalue({2: "two", 4: "four"}[cell.plan.world_size])  # type: ignore[no-any-return]


ALL = pytest.mark.parametrize("cell", (FROZEN, *OF_FOUR), ids=lambda c: c.name)


def words(ranks: list[dict]) -> str:
    return "\n".join(rank["output"][-2500:] for rank in ranks)


@ALL
def test_computes_what_one_process_computes(cell: PipeCell, results: dict[str, list[dict]], folder: Path) -> None:
    ranks, (single,) = results[cell.name], results[reference(cell)]
    ran = compare.check_runs(ranks, NUM_STEPS)
    assert ran.status == PASSED, f"{ran.detail}\n{words(ranks)}"
    checks = [*numbers(run_of(cell, folder), ranks, single), compare.check_world(ranks, cell.plan, "gloo")]
    assert [c for c in checks if c.status != PASSED and not is_hidden(c, cell)] == []


def is_hidden(check: Check, cell: PipeCell) -> bool:
    """ZeRO-1 lays the two copies of a shared weight's gradient into flat tensors with others: their norm can't be taken apart."""
    return check.name == "gradient norms" and check.status == NOT_HERE and cell.plan.zero_stage == 1


@ALL
def test_each_rank_holds_the_states_of_its_stage_or_of_its_share_of_it(cell: PipeCell, results: dict[str, list[dict]]) -> None:
    whole = results[reference(cell)][0]["holdings"]["num_states"]
    states = [rank["holdings"]["num_states"] for rank in results[cell.name]]
    if cell.script.name == "gpt2.py":
        whole += 2 * 96 * 32  # the shared weight's second copy
    assert sum(states) == pytest.approx(whole, abs=16)  # padding
    assert max(states) < 0.6 * whole / cell.plan.dp_degree


def test_goes_on_from_its_checkpoint_when_a_rank_is_lost(four: dict[str, list[dict]]) -> None:
    ranks = four["deepspeed resumed"]
    assert any(rank["code"] for rank in four["deepspeed losing a rank"])
    assert [rank["code"] for rank in ranks] == [0] * 4, words(ranks)
    expected = compare.step_losses(four[reference(ZERO1)])
    resumed = compare.step_losses(ranks, per_rank=ZERO1.plan.num_microbatches)
    assert 0 < len(resumed) < len(expected)
    assert resumed == pytest.approx(expected[-len(resumed) :], rel=1e-4)


def test_clips_by_the_norm_of_all_stages_and_evaluates(two: dict[str, list[dict]], clipped_script: Path, folder: Path) -> None:
    output = two["clipped"][0]["output"]
    losses, evaluations = clipped_alone(clipped_script)
    assert found(r"^step \d loss (\S+)", output) == pytest.approx(losses, abs=2e-6), output
    assert found(r"evaluation (\S+)", output) == pytest.approx(evaluations, abs=2e-6)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[0]["missing"]["gradient_norm"]  # it keeps none without ZeRO


def found(pattern: str, output: str) -> list[float]:
    return [float(text) for text in re.findall(pattern, output, re.MULTILINE)]


def clipped_alone(script: Path) -> tuple[list[float], list[float]]:
    """Losses of one process that clips, and of two other batches after each step."""
    torch.manual_seed(0)
    user = load(script)
    model = user.build_model()
    optimizer = user.build_optimizer(model)
    losses, evaluations = [], []
    for _ in range(NUM_STEPS + 1):
        loss = user.loss_fn(model, user.make_batch(BATCH))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(EVAL_SEED)
            evaluations.append(sum(user.loss_fn(model, user.make_batch(BATCH)).item() for _ in range(2)) / 2)
    return losses, evaluations
