"""Every engine x every small model x every kind of plan: what runs and computes what one process computes, and what is refused, why.

    python -m tests.engines.matrix [ENGINE ...]     runs all cells (about ten minutes on two cores), prints the README's table

The tests run the cells that differ in mechanism, and hold the README's table against what the engines say.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import advisor
from advisor.engines import ENGINES, EngineInput, write_plan
from advisor.engines.types import Engine
from advisor.profiling import StepProfile
from advisor.verify import compare, starts
from advisor.verify.cells import run_cells
from advisor.verify.engine_run import Run, numbers, priced_plan, reference_cell, run_cell, tied_share
from advisor.verify.facts import Facts, facts_of
from advisor.verify.verdicts import FAILED, NOT_HERE, PASSED, Check
from cost_models.types import Plan

HERE = Path(__file__).parent
MODELS = {
    "gpt2": "GPT-2",
    "llama_gqa": "Llama (GQA)",
    "resnet50": "ResNet",
    "bert": "BERT",
    "unet": "U-Net",
    "lstm_tied": "tied LSTM",
    "moe": "MoE",
}
NUM_STEPS, _LIMIT_S = 2, 90.0
BEGIN, END = "<!-- matrix -->", "<!-- /matrix -->"
_TENSOR = {"tp_degree": 2, "micro_batch": 2, "runtime": "torch-tp"}
_STAGES = {"pp_degree": 2, "micro_batch": 2, "schedule": "1f1b", "runtime": "torch-tp"}
_SHARDS = {"dp_shard_degree": 2, "micro_batch": 2}
#: Plans of the same global batch, four micro-batches of two samples, so that one reference serves them all.
PLANS = {
    "DDP": Plan(dp_replicate_degree=2, micro_batch=2, num_microbatches=2, runtime="torch-ddp"),
    "ZeRO-1": Plan(zero_stage=1, num_microbatches=2, runtime="torch-ddp", **_SHARDS),
    "ZeRO-2": Plan(zero_stage=2, num_microbatches=2, runtime="fsdp2", **_SHARDS),
    "FSDP": Plan(zero_stage=3, num_microbatches=2, runtime="fsdp2", **_SHARDS),
    "TP": Plan(num_microbatches=4, **_TENSOR),
    "TP + SP": Plan(num_microbatches=4, sequence_parallel=True, **_TENSOR),
    "PP 1F1B": Plan(num_microbatches=4, **_STAGES),
    "PP interleaved": Plan(num_microbatches=4, **_STAGES | {"schedule": "interleaved", "virtual_stages": 2}),
    "HSDP": Plan(zero_stage=3, num_microbatches=1, dp_replicate_degree=2, runtime="fsdp2", **_SHARDS),
    "TP x DDP": Plan(num_microbatches=2, dp_replicate_degree=2, **_TENSOR),
    "TP x ZeRO-1": Plan(zero_stage=1, num_microbatches=2, dp_shard_degree=2, **_TENSOR),
    "TP x FSDP": Plan(zero_stage=3, num_microbatches=2, dp_shard_degree=2, **_TENSOR),
    "PP x DDP": Plan(num_microbatches=2, dp_replicate_degree=2, **_STAGES),
    "PP x FSDP": Plan(zero_stage=3, num_microbatches=2, dp_shard_degree=2, **_STAGES),
    "PP x TP": Plan(num_microbatches=4, tp_degree=2, **_STAGES),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """An engine, a model and a plan."""

    engine: str
    model: str
    plan: str

    @property
    def name(self) -> str:
        return f"{self.engine} {self.model} {self.plan}".replace(" ", "-").replace("+", "and")


@functools.cache
def profiles() -> dict[str, StepProfile]:
    """A step of each model, taken once."""
    with ThreadPoolExecutor(2) as pool:
        return dict(
            zip(MODELS, pool.map(lambda name: advisor.profile(script_of(name), capture="traced", batch_size=2), MODELS), strict=True)
        )


def script_of(model: str) -> Path:
    return HERE / "models" / f"{model}.py"


@functools.cache
def facts(model: str, plan: Plan) -> Facts:
    """What the pipeline knows of a model under a plan."""
    step = profiles()[model]
    plain = EngineInput(plan=Plan(), script=str(script_of(model)), form="functions", meta=step.meta)
    return facts_of(step, plain, plan)


def engine_of(cell: Cell | Mutation) -> Engine:
    return next(engine for engine in ENGINES if cell.engine == engine.NAME)


def all_cells() -> list[Cell]:
    return [Cell(engine.NAME, model, plan) for engine in ENGINES for plan in PLANS for model in MODELS]


def refusal(cell: Cell) -> str:
    """Why a cell can't be had; "" where it must run."""
    inp = _input(cell)
    return engine_of(cell).supports(inp.plan, inp.model)


def not_here(cell: Cell) -> str:
    """Why a cell that the engine supports can't be run on this machine."""
    return starts.why_not_here(engine_of(cell), _input(cell), on_gpu=False)


def _input(cell: Cell | Mutation) -> EngineInput:
    plan = priced_plan(engine_of(cell), PLANS[cell.plan])
    return dataclasses.replace(facts(cell.model, plan).inp, engines=(cell.engine,))


def different_in_mechanism(cells: Sequence[Cell]) -> list[Cell]:
    """For each engine: every plan on the first model that has it, and every model with its last plan (the most divided one)."""
    chosen: dict[Cell, None] = {}
    for engine in dict.fromkeys(cell.engine for cell in cells):
        mine = [cell for cell in cells if cell.engine == engine]
        for plan in dict.fromkeys(cell.plan for cell in mine):
            chosen[next(cell for cell in mine if cell.plan == plan)] = None
        for model in dict.fromkeys(cell.model for cell in mine):
            two = [cell for cell in mine if cell.model == model and PLANS[cell.plan].world_size == 2]
            chosen[(two or [cell for cell in mine if cell.model == model])[-1]] = None
    return list(chosen)


@dataclass(frozen=True, slots=True)
class Mutation:
    """A cell with a file made wrong on purpose, and the check that must say so."""

    fault: str
    cell: Cell
    file: str
    old: str
    new: str
    caught_by: str

    @property
    def name(self) -> str:
        return f"{self.cell.name}-{self.fault}".replace(" ", "-")

    @property
    def engine(self) -> str:
        return self.cell.engine

    @property
    def model(self) -> str:
        return self.cell.model

    @property
    def plan(self) -> str:
        return self.cell.plan


def run(cells: Sequence[Cell | Mutation], folder: Path) -> dict[Cell | Mutation, list[Check]]:
    """Checks of all cells: one torchrun per world size, and one reference per model."""
    found: dict[Cell | Mutation, list[Check]] = {}
    jobs: dict[Cell | Mutation, dict] = {}
    for cell in cells:
        try:
            jobs[cell] = _job(cell, folder)
        except ValueError as error:
            found[cell] = [Check(name="files", status=FAILED, detail=str(error))]
    references: dict[str, list[dict]] = {}
    for num_processes in sorted({PLANS[cell.plan].world_size for cell in jobs}):
        mine = [cell for cell in jobs if PLANS[cell.plan].world_size == num_processes]
        fresh = {cell.model: cell for cell in mine if cell.model not in references}
        alone = [{**reference_cell(_run(cell, folder)), "name": model, "after": ""} for model, cell in fresh.items()]
        imports = [*starts.heavy_imports([cell.engine for cell in mine]), "transformers.models.llama.modeling_llama"]
        records = run_cells([*alone, *(jobs[cell] for cell in mine)], folder, num_processes=num_processes, imports=imports)
        references |= {model: records[model] for model in fresh}
        found |= {cell: _checks(_run(cell, folder), records[cell.name], references[cell.model]) for cell in mine}
    return found


def _run(cell: Cell | Mutation, folder: Path) -> Run:
    home = folder / cell.model
    home.mkdir(exist_ok=True)
    known = facts(cell.model, PLANS[cell.plan])
    return Run(
        facts=Facts(inp=_input(cell), workload=known.workload),
        removed_blocks=(),
        folder=home,
        num_steps=NUM_STEPS,
        limit_s=_LIMIT_S,
        on_gpu=False,
    )


def _job(cell: Cell | Mutation, folder: Path) -> dict:
    target = folder / cell.name
    write_plan(_input(cell), target)
    if isinstance(cell, Mutation):
        file = target / cell.file
        text = file.read_text(encoding="utf8")
        assert cell.old in text, f"{cell.old} is not in {file}"
        file.write_text(text.replace(cell.old, cell.new, 1), encoding="utf8")
    started = starts.start(engine_of(cell), _input(cell), target, NUM_STEPS)
    return {**run_cell(_run(cell, folder), cell.name), **started, "after": cell.model}


def _checks(run_: Run, ranks: list[dict], reference: list[dict]) -> list[Check]:
    """Those of `advise verify` that say whether the cell computes the right thing; each failed rank's words with them."""
    ran = compare.check_runs(ranks, NUM_STEPS)
    if ran.status != PASSED:
        return [dataclasses.replace(ran, detail=ran.detail + "\n" + "\n".join(rank["output"][-2500:] for rank in ranks))]
    plan = run_.inp.plan
    return [
        ran,
        *numbers(run_, ranks, reference[0]),
        compare.check_world(ranks, plan, "gloo"),
        compare.check_sharding(ranks, reference[0], plan, tied_share=tied_share(run_.facts)),
    ]


def table() -> str:
    """The README's table, of what the engines say now: a row per engine and plans that are alike, a column per model."""
    notes: dict[str, int] = {}
    rows: dict[tuple[str, ...], list[str]] = {}
    refused: list[tuple[str, str, list[str]]] = []
    for engine in ENGINES:
        for plan in PLANS:
            reasons = [_reason(Cell(engine.NAME, model, plan)) for model in MODELS]
            if all(reasons):
                refused.append((engine.TITLE, plan, list(dict.fromkeys(reasons))))
                continue
            why = not_here(Cell(engine.NAME, list(MODELS)[reasons.index("")], plan))
            word = f"written [{notes.setdefault(why, len(notes) + 1)}]" if why else "runs"
            shown = [f"refused [{notes.setdefault(reason, len(notes) + 1)}]" if reason else word for reason in reasons]
            rows.setdefault((engine.TITLE, *shown), []).append(plan)
    head = [f"| engine | plans | {' | '.join(MODELS.values())} |", "| --- " * (2 + len(MODELS)) + "|"]
    body = [f"| {title} | {', '.join(plans)} | {' | '.join(shown)} |" for (title, *shown), plans in rows.items()]
    footnotes = "\n".join(f"[{number}] {reason}.<br>" for reason, number in notes.items())
    return "\n".join([*head, *body, "", footnotes, "", *_refused(refused)])


def _reason(cell: Cell) -> str:
    """A refusal without the name of the model's class, so that equal ones share a footnote."""
    name = str(_input(cell).model["class"])
    return re.sub(rf"\b{re.escape(name)}\b", "this model", refusal(cell))


def _refused(refused: list[tuple[str, str, list[str]]]) -> list[str]:
    """One line per engine of the plans that it has for no model."""
    lines = ["Refused for all of them:", ""]
    for title in dict.fromkeys(row[0] for row in refused):
        by_reason: dict[str, list[str]] = {}
        for _, plan, reasons in (row for row in refused if row[0] == title):
            by_reason.setdefault("; ".join(reasons), []).append(plan)
        lines.append(f"- {title}: " + "; ".join(f"{', '.join(plans)} ({reason})" for reason, plans in by_reason.items()))
    return lines


def main(engines: list[str]) -> int:
    """Run everything and print."""
    wanted = [cell for cell in all_cells() if not engines or cell.engine in engines]
    runnable = [cell for cell in wanted if not refusal(cell) and not not_here(cell)]
    with tempfile.TemporaryDirectory() as folder:
        results = run(runnable, Path(folder))
    for cell, checks in results.items():
        for check in checks:
            if check.status != PASSED:
                print(f"{cell.name}: {check.name} {check.status}: {check.detail}", file=sys.stderr)
    failed = sum(any(map(is_failure, checks)) for checks in results.values())
    print(f"{len(results)} cells run on {datetime.date.today():%d %b %Y}, {failed} failed", file=sys.stderr)
    print(table())
    return int(failed > 0)


def is_failure(check: Check) -> bool:
    """Whether a check is not as it must be; norms of gradients that an engine can't show are said, and no failure."""
    return check.status != PASSED and not (check.name == "gradient norms" and check.status == NOT_HERE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
