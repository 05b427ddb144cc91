"""The command line: what it prints, what it writes, and one sentence for each way to get it wrong."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def test_a_saved_profile_is_planned_without_torch(small_gpt2_folder, tmp_path):
    code = (
        "import sys; from advisor.cli import main\n"
        f"sys.argv = ['advise', 'plan', {str(small_gpt2_folder)!r}, '--gpu', 'h100', '--out', {str(tmp_path / 'advice')!r}]\n"
        "main(); assert 'torch' not in sys.modules, 'planning imported torch'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "USE THIS" in done.stdout
    assert (tmp_path / "advice" / "report.json").is_file()


def test_help_is_light():
    code = "import sys; sys.argv = ['advise', '--help']; from advisor.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'pandas', 'numpy', 'sklearn', 'plotly', 'jinja2'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


def test_the_readme_names_every_command_and_option():
    from advisor.cli import cli

    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf8")
    known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", readme))
    for name, command in cli.commands.items():
        assert name == "run" or re.search(rf"advise `?{name}|`{name}`", readme), name
        for parameter in command.params:
            spellings = {s for s in parameter.opts if s.startswith("-")}
            assert not spellings or spellings & known, f"{name} {parameter.opts}"
            assert not spellings or parameter.help, f"{name} {parameter.opts} has no help"


def test_a_narrow_or_old_terminal_is_served(small_gpt2_folder, tmp_path):
    plan = ["-m", "advisor.cli", "plan", str(small_gpt2_folder), "--gpu", "t4", "--plans", "1", "--engine", "ddp"]
    trace = ["-m", "advisor.cli", "trace", str(Path(__file__).parents[1] / "traces" / "cuda_ddp_conv.json")]
    for arguments in (plan, trace):
        environment = {**os.environ, "COLUMNS": "50", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "NO_COLOR": "1"}
        done = subprocess.run([sys.executable, *arguments], capture_output=True, check=False, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        text = done.stdout.decode("ascii")
        assert "\x1b" not in text
        assert max(map(len, text.splitlines())) <= 50


def test_advice_is_written_replaced_as_a_whole_and_printed(advise, small_gpt2_folder, tmp_path):
    out = tmp_path / "advice"
    code, text, _ = advise("plan", small_gpt2_folder, "--gpu", "a100", "--out", out)
    assert code == 0
    for block in ("USE THIS", "THE OTHERS, AND WHY NOT", "WHERE THE TIME GOES", "WHERE THE MEMORY GOES", "HOW IT SCALES"):
        assert block in text
    stale = sorted(p.name for p in out.iterdir() if p.name.startswith("plan-"))
    assert len(stale) == 3
    code, text, _ = advise("plan", small_gpt2_folder, "--gpu", "h100", "--plans", "1", "--json", "--out", out)
    report = json.loads(text)
    assert code == 0
    assert report == json.loads((out / "report.json").read_text())
    assert sorted(p.name for p in out.iterdir() if p.name.startswith("plan-")) == ["plan-1"]
    assert {name.split("/")[0] for name in report["files"]} >= {"plan-1", "report.html", "report.json"}
    assert all((out / name).is_file() for name in report["files"])


def test_other_peoples_folders_are_never_touched(advise, small_gpt2_folder, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    code, _, err = advise("plan", small_gpt2_folder, "--gpu", "a100", "--out", tmp_path)
    assert code == 2
    assert "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpu", "h1000"), "h100"),
        (("--gpu", "a100", "--gpus-per-node", "0"), "gpus-per-node"),
        (("--gpu", "a100", "--nodes", "-3"), "nodes"),
        (("--gpu", "a100", "--inter", "string-and-cans", "--nodes", "2"), "string-and-cans"),
        (("--gpu", "a100", "--global-batch", "0"), "global-batch"),
        (("--gpu", "a100", "--max-memory-share", "7"), "max-memory-share"),
        (("--gpu", "v100-sxm-16gb", "--precision", "fp8"), "fp8"),
        (("--gpu", "a100", "--optimizer", "magic"), "magic"),
        (("--cluster", "nowhere.toml"), "nowhere.toml"),
        (("--gpu", "a100", "--calibration", "nowhere.toml"), "nowhere.toml"),
        (("--objective", "fame"), "fame"),
    ],
)
def test_impossible_wishes_are_one_sentence(advise, small_gpt2_folder, tmp_path, arguments, says):
    code, out, err = advise("plan", small_gpt2_folder, "--out", tmp_path / "advice", *arguments)
    assert code == 2
    assert says in err
    assert "Traceback" not in err + out
    assert not (tmp_path / "advice").exists()


def test_the_first_plan_is_one_that_the_engines_asked_for_write(advise, small_gpt2_folder, tmp_path):
    plan = ("plan", small_gpt2_folder, "--gpu", "a100", "--out", tmp_path / "advice", "--json", "--engine")
    for engine in ("tensor_parallel", "fsdp2"):
        report = json.loads(advise(*plan, engine)[1])
        first = report["plans"][0]
        assert first["folder"] == "plan-1"
        assert not first["no_files"]
        assert "plan-1/parallelize.py" in report["files"]
        others = [p for p in report["plans"] if p["no_files"]]
        assert others
        assert all("no engine asked for writes it" in p["reasons"][0] and not p["folder"] for p in others)


@pytest.mark.parametrize("gpu", ["v100-sxm-16gb", "t4", "rtx-2080-ti"])
def test_emulated_bf16_is_priced_and_warned_of(advise, small_gpt2_folder, tmp_path, gpu):
    def planned(precision):
        code, out, _ = advise("plan", small_gpt2_folder, "--gpu", gpu, "--precision", precision, "--out", tmp_path / "advice", "--json")
        assert code == 0
        return json.loads(out)

    half, emulated = planned("fp16"), planned("bf16")
    assert emulated["hotspots"][0]["time_s"] > 0
    assert emulated["plans"][0]["estimate"]["step_time_s"] >= half["plans"][0]["estimate"]["step_time_s"]
    warned = next(w for w in emulated["warnings"] if "has no bf16 units" in w)
    assert "emulates bf16" in warned
    assert "--precision fp16" in warned
    assert not any("emulates" in w for w in half["warnings"])


def test_a_precision_that_the_gpu_lacks_is_refused_before_the_script_runs(advise, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('the script ran')\n")
    code, _, err = advise(script, "--gpu", "a100", "--precision", "fp8")
    assert code == 2
    assert "a100-sxm-80gb has no fp8 arithmetic" in err


def test_a_folder_that_is_no_profile_is_refused(advise, tmp_path):
    assert advise("plan", tmp_path)[0] == 2
    assert advise("plan", tmp_path / "missing")[0] == 2


def test_rules_explain_themselves(advise):
    code, listing, _ = advise("explain")
    assert code == 0
    rule = listing.split()[0]
    assert rule in advise("explain", rule)[1]
    code, _, err = advise("explain", rule[:-1])
    assert code == 2
    assert rule in err


def test_the_catalogue_lists_and_describes(advise):
    assert "h100-sxm-80gb" in advise("gpus")[1].split()
    described = json.loads(advise("gpus", "h100-sxm-80gb", "--json")[1])
    assert "source" in json.dumps(described)
    assert advise("gpus", "h1000")[0] == 2


def test_a_recorded_trace_says_where_its_time_went(advise):
    recorded = Path(__file__).parents[1] / "traces" / "cuda_ddp_conv.json"
    code, out, _ = advise("trace", recorded, "--json")
    summary = json.loads(out)
    assert code == 0
    assert {"convolution", "collective"} <= {spot["op_class"] for spot in summary["hotspots"]}
    assert sum(spot["time_share"] for spot in summary["hotspots"]) == pytest.approx(1)
    code, out, _ = advise("trace", recorded)
    assert code == 0
    assert "the step is bound by" in out
    assert advise("trace", __file__)[0] == 2


def test_the_fewest_gpus_can_be_asked_for(advise, small_gpt2_folder, tmp_path):
    code, out, _ = advise("plan", small_gpt2_folder, "--gpu", "a100", "--objective", "gpus", "--out", tmp_path / "advice", "--json")
    assert code == 0
    assert json.loads(out)["plans"][0]["plan"]["world_size"] == 1


def test_plans_for_this_machines_cpu_use_its_measured_rates(advise, small_gpt2_folder, tmp_path):
    code, out, _ = advise("plan", small_gpt2_folder, "--gpu", "cpu", "--gpus-per-node", "2", "--out", tmp_path / "advice", "--json")
    figures = json.loads(out)["cluster"]
    assert code == 0
    assert figures["peak_fp32_flops_per_s"]["source"] == "measured"


@pytest.mark.parametrize(
    ("arguments", "says", "tries"),
    [
        (("train.py", "--gppu", "h100"), "There is no option --gppu.", "Did you mean --gpu?"),
        (("train.py", "--learning-rate", "1"), "There is no option --learning-rate.", "go after --"),
        (("gpus", "--jsn"), "There is no option --jsn.", "Did you mean --json?"),
        (("train.py", "--precision", "bf17"), "--precision is one of fp32, tf32, fp16, bf16, fp8, not 'bf17'.", "Did you mean bf16?"),
        (("train.py", "--nodes", "two"), "--nodes must be a whole number, not 'two'.", "advise run --help"),
        (("train.py", "--max-memory-share", "most"), "--max-memory-share must be a number, not 'most'.", "advise run --help"),
        (("train.py", "--plans"), "--plans is given without its value.", "--help"),
        (("evaluate", "--json=3", "runs.csv"), "--json takes no value.", "--help"),
        (("plan",), "PROFILE is missing.", "Write `advise plan [OPTIONS] PROFILE`"),
        (("predict", "runs.csv"), "--out is missing.", "RUNS.csv"),
        (("--gpu", "h100"), "SCRIPT is missing.", "advise run"),
        (("gpus", "a100", "b200"), "There is an argument too many: b200.", "advise gpus"),
        (("explian", "rule"), "There is no command or file explian.", "Did you mean `advise explain`?"),
        (("--verison",), "There is no option --verison.", "Did you mean `advise --version`?"),
    ],
)
def test_a_command_line_that_is_wrong_is_one_sentence_too(advise, tmp_path, monkeypatch, arguments, says, tries):
    monkeypatch.chdir(tmp_path)
    code, out, err = advise(*arguments)
    assert (code, out) == (2, "")
    message, hint = err.rstrip("\n").split("\n")
    assert message == f"advise: {says}"
    assert tries in hint


def test_without_arguments_there_is_help_and_no_success(advise):
    code, out, err = advise()
    assert (code, out) == (2, "")
    assert err.startswith("Usage: advise")


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_leaves_nothing_behind(tmp_path, sent, status):
    script, scratch = tmp_path / "slow.py", tmp_path / "scratch"
    scratch.mkdir()
    script.write_text("import time\ntime.sleep(600)\n")
    arguments = [sys.executable, "-m", "advisor.cli", str(script), "--gpu", "a100", "--out", str(tmp_path / "advice")]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    heeds = functools.partial(signal.signal, sent, signal.SIG_DFL)  # tests that a shell runs in the background inherit an ignored SIGINT
    running = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=heeds)
    deadline = time.monotonic() + 120
    while not list(scratch.iterdir()) and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    running.send_signal(sent)
    out, err = running.communicate(timeout=60)
    assert running.returncode == status
    assert (out, "Traceback" in err) == ("", False)
    assert not list(scratch.iterdir())
    assert not (tmp_path / "advice").exists()
