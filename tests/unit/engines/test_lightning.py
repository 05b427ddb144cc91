"""strategy.py for Lightning: what it says for each kind of plan, that Lightning builds it, and that no mistake in it goes unseen."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from engine_plans import REPOSITORY, gpt2, llama, resnet
from framework_cases import BOTTLENECKS, GPT2_SMALL, LLAMA_8B, another, python_problems, tool, with_model, written

from advisor.engines import lightning as engine
from advisor.engines.schema import table
from cost_models.types import Plan

HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None
OWN = {"strategy.py", "train_lightning.py"}  # parallelize.py is another engine's
CASES = {
    "ddp": with_model(resnet(Plan(dp_replicate_degree=8, micro_batch=32, num_microbatches=2, runtime="torch-ddp"), precision="bf16"),
                      BOTTLENECKS | {"unused_parameters": ["classifier.bias"]}),
    "fsdp": with_model(resnet(Plan(dp_shard_degree=16, micro_batch=8, zero_stage=3, recompute="full", runtime="fsdp2"), precision="bf16"),
                       BOTTLENECKS),
    "deepspeed": with_model(
        resnet(Plan(dp_shard_degree=8, micro_batch=8, zero_stage=2, offload=True, recompute="full", runtime="deepspeed-zero"),
               precision="tf32"), BOTTLENECKS),
    "tensor": with_model(llama(Plan(tp_degree=4, dp_shard_degree=4, zero_stage=3, sequence_parallel=True, runtime="torch-tp")), LLAMA_8B),
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize("case", CASES)
def test_files_are_as_committed(case: str, check_golden, tmp_path: Path) -> None:
    inp = CASES[case]
    texts = written(engine, inp)
    for name, text in texts.items():
        if name in OWN:
            check_golden(f"engines/lightning-{case}/{name}", text)
    assert set(texts) & OWN == {p.name for p in (REPOSITORY / f"tests/golden/engines/lightning-{case}").iterdir()}
    assert engine.supports(inp.plan, inp.model) == ""
    assert engine.validate(texts, inp) == []
    assert python_problems(texts, tmp_path) == ""


def mistakes() -> list[tuple[str, str, str, str]]:
    """Each argument misspelt, with another value and with another type, as a change of the text."""
    found = []
    for case, inp in CASES.items():
        for key, value in engine.strategy(inp).items():
            found += [(case, f"{key}={value}", changed, key) for changed in (f"{key}x={value}", f"{key}={another(value)}", f"{key}=[1, 2]")]
        for key, value in engine.trainer(inp).items():
            shown = f'"{value}"' if isinstance(value, str) else str(value)
            changes = (f'"{key}x": {shown}', f'"{key}": {another(value)!r}', f'"{key}": {{1: 2}}')
            found += [(case, f'"{key}": {shown}', changed, key) for changed in changes]
    return found


@pytest.mark.parametrize(("case", "right", "wrong", "key"), mistakes())
def test_no_mistake_goes_unseen(case: str, right: str, wrong: str, key: str) -> None:
    files = written(engine, CASES[case])
    assert right in files["strategy.py"]
    problems = engine.validate(files | {"strategy.py": files["strategy.py"].replace(right, wrong)}, CASES[case])
    assert key in "; ".join(problems)


def test_other_faults_are_said() -> None:
    files, inp = written(engine, CASES["ddp"]), CASES["ddp"]
    assert engine.validate({k: v for k, v in files.items() if k != "strategy.py"}, inp) == ["strategy.py is missing"]
    assert "calls no DDPStrategy" in engine.validate(files | {"strategy.py": "x = 1\n"}, inp)[0]
    assert "strategy.py line 1" in engine.validate(files | {"strategy.py": "def strategy(:\n"}, inp)[0]


@pytest.mark.skipif(not HAS_LIGHTNING, reason="lightning is not installed")
def test_table_is_that_of_the_installed_version() -> None:
    recorded, installed = table("lightning"), tool("record_lightning").recorded()
    if recorded["version"] == installed["version"]:
        assert recorded["calls"] == installed["calls"]
    else:  # another version than the recorded one must still take every argument that is written
        for inp in CASES.values():
            assert set(engine.strategy(inp)) <= set(installed["calls"][engine.strategy_name(inp.plan)])
            assert set(engine.trainer(inp)) <= set(installed["calls"]["Trainer"])


@pytest.mark.skipif(not HAS_LIGHTNING, reason="lightning is not installed")
@pytest.mark.parametrize("case", [case for case in CASES if case != "deepspeed"])  # which asks for CUDA when built
def test_lightning_builds_the_strategy(case: str) -> None:
    made: dict = {}
    exec(written(engine, CASES[case])["strategy.py"], made)
    assert type(made["strategy"]()).__name__ == engine.strategy_name(CASES[case].plan)


@pytest.mark.parametrize(
    ("plan", "model", "reason"),
    [
        (Plan(pp_degree=2, num_microbatches=2, schedule="1f1b"), LLAMA_8B, "no pipeline"),
        (Plan(cp_degree=2), LLAMA_8B, "neither sequences nor experts"),
        (Plan(tp_degree=2), GPT2_SMALL, "no column and row weights"),
        (Plan(dp_replicate_degree=2, dp_shard_degree=2, zero_stage=1), LLAMA_8B, "over all data ranks"),
        (Plan(dp_replicate_degree=2, recompute="full"), {}, "no repeated layers"),
        (Plan(dp_shard_degree=2, zero_stage=3, recompute="full"), {}, "no repeated layers"),
    ],
)
def test_what_it_cannot_express_has_a_reason(plan: Plan, model: dict, reason: str) -> None:
    assert reason in engine.supports(plan, model)


def test_starts_by_torchrun_where_there_is_a_train_file() -> None:
    assert engine.start_line(CASES["ddp"], "lightning") == "torchrun --standalone --nproc-per-node 8 lightning/train_lightning.py"
    assert engine.start_line(with_model(gpt2(Plan()), GPT2_SMALL), "lightning") == ""
