"""Which engines can't be run here, why, and how verdicts are shown."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from advisor.engines import ENGINES, EngineInput
from advisor.profiling.schema import ProfileMeta
from advisor.verify import Check, EngineVerdict, PlanVerdict, starts
from advisor.verify.table import print_verdicts
from advisor.verify.verdicts import FAILED, MEASURED, NOT_HERE, PASSED
from cost_models.types import Plan

DDP = Plan(dp_replicate_degree=2, runtime="torch-ddp")
FSDP = Plan(dp_shard_degree=2, zero_stage=3, runtime="fsdp2")


def why(name: str, plan: Plan, *, on_gpu: bool = False, form: str = "functions") -> str:
    meta = ProfileMeta(script="model.py", form=form)
    inp = EngineInput(plan=plan, script="model.py", form=form, meta=meta, gpus_per_node=plan.world_size)
    return starts.why_not_here(next(engine for engine in ENGINES if name == engine.NAME), inp, on_gpu=on_gpu)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp1", "tensor_parallel", "pipeline"])
def test_pytorch_s_own_engines_run_anywhere(name: str) -> None:
    assert why(name, FSDP) == ""


@pytest.mark.parametrize("name", ["megatron", "torchtitan", "colossalai"])
def test_engines_with_a_launcher_of_their_own_are_not_run(name: str) -> None:
    assert "launcher of its own" in why(name, DDP)


def test_accelerate_would_go_on_unsharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts.importlib.util, "find_spec", lambda _: object())
    assert "on GPUs alone" in why("accelerate", FSDP)
    assert why("accelerate", FSDP, on_gpu=True) == why("accelerate", DDP) == ""


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts.importlib.util, "find_spec", lambda _: None)
    assert why("deepspeed", FSDP) == "deepspeed is not installed"


def test_loops_that_need_functions_say_so_for_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts.importlib.util, "find_spec", lambda _: object())
    assert "declares build_model" in why("accelerate", DDP, form="script")


def verdict(*statuses: str) -> PlanVerdict:
    checks = tuple(Check(name=f"check {i}", status=status, detail=f"[{i}] seen") for i, status in enumerate(statuses))
    engine = EngineVerdict(engine="ddp", title="PyTorch DDP", checks=checks)
    return PlanVerdict(folder="advice/plan-1", label="DDP 8", shrunk_label="DDP 2", num_processes=2, backend="gloo", num_steps=4,
                       changes=("replicas 8 -> 2",), engines=(engine,))  # fmt: skip


def test_a_row_for_each_check_and_a_line_of_summary() -> None:
    out = io.StringIO()
    print_verdicts([verdict(PASSED, FAILED, NOT_HERE, MEASURED)], Console(file=out, width=120))
    text = out.getvalue()
    assert "run as DDP 2 on 2 processes over gloo, 4 steps (replicas 8 -> 2)" in text
    assert "[1] seen" in text
    assert "1 passed, 1 failed, 1 not runnable here, 1 measured" in text


def test_a_plan_without_files_says_why_in_one_line() -> None:
    out = io.StringIO()
    empty = PlanVerdict(folder="advice/plan-2", label="CP 8", shrunk_label="", num_processes=0, backend="gloo", num_steps=4, changes=(),
                        engines=(), reason="No files, as no engine here can express this plan.")  # fmt: skip
    print_verdicts([empty], Console(file=out, width=120))
    assert out.getvalue().splitlines()[1:] == [
        "advice/plan-2: CP 8",
        "No files, as no engine here can express this plan.",
        "nothing to verify",
    ]


@pytest.mark.parametrize(
    ("message", "hinted"), [("No such file or directory: 'data/train.bin'", True), ("No such file or directory: '/x'", False)]
)
def test_a_file_that_is_sought_where_the_user_stands_is_said(message: str, hinted: bool) -> None:
    said = starts.with_hint(f"FileNotFoundError: [Errno 2] {message}.")
    assert ("run `advise verify` from the folder in which the script itself is started" in said) == hinted
    assert ("data/train.bin is looked for in " in said) == hinted


def test_only_a_failure_fails() -> None:
    assert verdict(PASSED, FAILED).failed
    assert not verdict(PASSED, NOT_HERE, MEASURED).failed
    assert json.loads(json.dumps(verdict(FAILED).to_json()))["failed"] is True
