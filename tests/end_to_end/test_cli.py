"""The command line: what it prints, what it writes, and one sentence for each way to get it wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
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
        (("--gpu", "v100-sxm-16gb", "--precision", "bf16"), "bf16"),
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
