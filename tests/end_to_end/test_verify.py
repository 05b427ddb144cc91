"""`advise verify` from the command line: a plan that holds, one broken on purpose, bad input, an interrupt."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from advisor.errors import AdvisorError
from advisor.verify import verify

SMALL = ("--layers", "2", "--width", "64", "--heads", "4", "--seq", "32", "--batch", "4", "--vocab", "211")
MODEL = Path(__file__).parents[1] / "engines" / "models" / "gpt2.py"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An advice for eight GPUs with the files of one plan for one engine."""
    import advisor

    out = tmp_path_factory.mktemp("verified") / "advice"
    advisor.advise(MODEL, capture="traced", gpu="h100", gpus_per_node=8, nodes=1, global_batch=32, engine=["ddp"], plans=1, out=out)
    return out


@pytest.fixture
def advice(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "advice"))


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the seconds that measuring the machine takes."""

    def refuse(*_: object, **__: object) -> None:
        raise AdvisorError("not measured")

    monkeypatch.setattr(verify, "measured_here", refuse)


def checks(verdict: dict, engine: int = 0) -> dict[str, dict]:
    return {check["name"]: check for check in verdict["engines"][engine]["checks"]}


def test_a_plan_that_holds(advice: Path, advise) -> None:
    code, out, err = advise("verify", advice, "--json")
    assert code == 0, out + err
    (verdict,) = json.loads(out)["plans"]
    found = checks(verdict)
    assert (verdict["label"], verdict["num_processes"], verdict["backend"]) == ("DDP 8", 2, "gloo")
    assert "replicas 8 -> 2" in verdict["changes"]
    assert "layers 4 -> 2" in verdict["changes"]
    passed = ["files", "runs", "losses", "gradient norms", "final parameters", "world size", "sharding", "collectives", "resume"]
    assert {name: found[name]["status"] for name in passed} == dict.fromkeys(passed, "passed")
    for name, unit in (("step time", "s"), ("peak memory", "bytes")):
        assert found[name]["status"] == "measured"
        assert found[name]["figures"][f"measured_{unit}"] > 0
        assert found[name]["figures"][f"predicted_{unit}"] > 0
    assert "running ddp" in err
    assert json.loads((advice / "plan-1" / "verify.json").read_text()) == verdict


def test_a_verified_advice_may_be_replaced(advice: Path, advise, unmeasured, small_gpt2_folder: Path) -> None:
    (advice / "plan-1" / "train.py").write_text("def broken(:\n")
    code, out, _ = advise("verify", advice)
    assert code == 1
    assert "failed" in out
    assert "train.py line 1" in " ".join(out.split())
    assert (advice / "plan-1" / "verify.json").is_file()
    (advice / "plan-1" / "train.py").unlink()
    code, _, err = advise("plan", small_gpt2_folder, "--gpu", "h100", "--out", advice)
    assert code == 0, err


def test_the_folder_of_a_plan_is_as_good_as_its_rank(advice: Path, advise, unmeasured) -> None:
    (advice / "plan-1" / "train.py").write_text("def broken(:\n")
    code, out, _ = advise("verify", advice / "plan-1", "--json")
    assert code == 1
    assert [verdict["folder"] for verdict in json.loads(out)["plans"]] == [str(advice / "plan-1")]
    code, _, err = advise("verify", advice / "plan-1", "--plan", 2)
    assert code == 2
    assert f"is the folder of plan 1, not of plan 2. Run `advise verify {advice} --plan 2`" in " ".join(err.split())


def test_gradients_that_are_not_averaged_fail(advice: Path, advise, unmeasured) -> None:
    file = advice / "plan-1" / "parallelize.py"
    text = file.read_text()
    assert "def parallelize(model: nn.Module" in text
    file.write_text(text + "\n\ndef parallelize(model):\n    return model\n")
    code, out, _ = advise("verify", advice, "--json")
    found = checks(json.loads(out)["plans"][0])
    assert code == 1
    assert "your changes of parallelize.py are run too" in found["files"]["detail"]
    assert found["gradient norms"]["status"] == found["final parameters"]["status"] == "failed"
    assert found["collectives"]["status"] == "failed"


def test_an_unmodified_script_with_arguments_of_its_own(small_gpt2_folder: Path, tmp_path: Path, advise, unmeasured) -> None:
    out = tmp_path / "advice"
    engines = ("--engine", "ddp", "--engine", "fsdp1")
    assert advise("plan", small_gpt2_folder, "--gpu", "h100", "--gpus-per-node", 8, *engines, "--plans", 1, "--out", out)[0] == 0
    code, shown, _ = advise("verify", out, "--json", "--", *SMALL, "--steps", 8)
    (verdict,) = json.loads(shown)["plans"]
    assert code == 0, shown
    names = ("losses", "gradient norms", "final parameters", "world size", "sharding")
    for engine in range(2):
        found = checks(verdict, engine)
        assert {name: found[name]["status"] for name in names} == dict.fromkeys(names, "passed")
    assert checks(verdict)["collectives"]["status"] == "passed"
    assert not any("layers" in change for change in verdict["changes"])


def scripts_checks(advise, out: Path, *arguments: object) -> tuple[int, dict[str, dict]]:
    code, shown, _ = advise("verify", out, "--json", "--", *SMALL, *arguments)
    return code, checks(json.loads(shown)["plans"][0])


def test_a_script_that_takes_few_steps_or_none(small_gpt2_folder: Path, tmp_path: Path, advise, unmeasured) -> None:
    out = tmp_path / "advice"
    assert advise("plan", small_gpt2_folder, "--gpu", "h100", "--gpus-per-node", 8, "--engine", "ddp", "--plans", 1, "--out", out)[0] == 0
    code, found = scripts_checks(advise, out, "--steps", 3)
    assert code == 0
    assert found["runs"]["detail"] == "2 processes; the script takes 3 steps, of which 2 can be compared"
    names = ("losses", "gradient norms", "final parameters", "sharding", "collectives")
    assert {name: found[name]["status"] for name in names} == dict.fromkeys(names, "passed")
    code, found = scripts_checks(advise, out, "--steps", 1)
    assert (code, set(found)) == (3, {"files", "runs"})
    assert found["runs"]["status"] == "not runnable here"
    assert found["runs"]["detail"].endswith("such as -- --steps 8")
    code, found = scripts_checks(advise, out, "--heads", 3)
    assert (code, found["runs"]["status"]) == (3, "not runnable here")
    assert "RuntimeError: shape" in found["runs"]["detail"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "nowhere is not a folder."),
        ((".",), ". holds no plans."),
        (("{advice}", "--plan", 7), "has no files for plan 7; it has them for 1."),
        (("{advice}", "--engine", "fsdp2"), "PyTorch FSDP2 has no files for DDP 8: there is nothing to shard."),
        (("{advice}", "--steps", 1), "--steps must be at least 4, not 1"),
        (("{advice}", "--nproc", 0), "--nproc must be at least 1, not 0."),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple, said: str, advice: Path, advise, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    code, _, err = advise("verify", *(str(a).format(advice=advice) for a in arguments))
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_a_damaged_plan_is_said(advice: Path, advise) -> None:
    (advice / "plan-1" / "plan.json").write_text("{}")
    code, _, err = advise("verify", advice)
    assert code == 2
    assert "no plan that this version reads" in err


def processes_of(folder: Path) -> list[str]:
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder).encode() in environ.read_bytes():
                found.append((environ.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_and_no_folder(number: int, advice: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = os.environ | {"TMPDIR": str(scratch), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "advisor.cli", "verify", str(advice)]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in child.stderr:
        if "running ddp" in line:
            break
    assert len(processes_of(scratch)) > 2
    child.send_signal(number)
    assert child.wait(timeout=60) == 130
    deadline = time.monotonic() + 30
    while processes_of(scratch) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(scratch) == []
    assert list(scratch.iterdir()) == []
