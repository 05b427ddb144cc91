"""torchtitan's configuration and flags: what they say for each kind of plan, and that no mistake in them goes unseen."""

from __future__ import annotations

import dataclasses
import importlib.util
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_plans import REPOSITORY, llama
from framework_cases import GPT2_SMALL, LLAMA_8B, another, python_problems, tool, with_model, written

from advisor.engines import torchtitan as engine
from advisor.engines.schema import table
from cost_models.types import Plan

HAS_TORCHTITAN = importlib.util.find_spec("torchtitan") is not None and importlib.util.find_spec("tyro") is not None
CASES = {
    "hsdp": with_model(llama(Plan(dp_replicate_degree=2, dp_shard_degree=4, micro_batch=2, num_microbatches=2, zero_stage=3, offload=True,
                                  recompute="full")), LLAMA_8B),
    "three-dimensions": with_model(
        llama(Plan(tp_degree=2, pp_degree=2, dp_shard_degree=4, zero_stage=2, num_microbatches=8, schedule="interleaved", virtual_stages=2,
                   sequence_parallel=True, recompute="selective")), LLAMA_8B),
    "ddp-tied": with_model(llama(Plan(dp_replicate_degree=4)), LLAMA_8B | {"tied": [["a", "b"]], "outer_parameters": {
        "model.embed_tokens.weight": [128256, 4096], "model.norm.weight": [4096]}}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize("case", CASES)
def test_files_are_as_committed(case: str, check_golden, tmp_path: Path) -> None:
    inp = CASES[case]
    texts = written(engine, inp)
    for name, text in texts.items():
        check_golden(f"engines/torchtitan-{case}/{name}", text)
    assert engine.supports(inp.plan, inp.model) == ""
    assert engine.validate(texts, inp) == []
    assert python_problems(texts, tmp_path) == ""
    script = tmp_path / "launch.sh"
    script.write_text(texts["launch.sh"])
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True)


def mistakes() -> list[tuple[str, str, str, str]]:
    """Each flag misspelt, with another value and with another type, as a change of the text."""
    found = []
    for case, inp in CASES.items():
        for key, value in engine.flags(inp).items():
            section, name = key.split(".")
            if isinstance(value, bool):
                changes = [f"--{key}x", f"--{section}.no_{name}", f"--{key} 7"]
            else:
                changes = [f"--{key}x {value}", f"--{key} {another(value)}", f"--{key} such", f"--{key}"]
            right = f"--{key}" if isinstance(value, bool) else f"--{key} {value}"
            found += [(case, f"  {right} \\", f"  {changed} \\", name) for changed in changes]
    return found


@pytest.mark.parametrize(("case", "right", "wrong", "key"), mistakes())
def test_no_mistake_goes_unseen(case: str, right: str, wrong: str, key: str) -> None:
    files = written(engine, CASES[case])
    assert right in files["launch.sh"]
    problems = engine.validate(files | {"launch.sh": files["launch.sh"].replace(right, wrong)}, CASES[case])
    assert key in "; ".join(problems)


@pytest.mark.parametrize("name", ["LAYERS", "WIDTH", "INNER", "HEADS", "KV_HEADS", "VOCAB", "SEQ_LEN"])
def test_sizes_must_be_the_models(name: str) -> None:
    files = written(engine, CASES["hsdp"])
    for changed in (f"{name}X", "OTHER"):
        text = files["titan_config.py"].replace(name, changed)
        assert f"{name} is missing" in "; ".join(engine.validate(files | {"titan_config.py": text}, CASES["hsdp"]))


def test_other_faults_are_said() -> None:
    files = written(engine, CASES["hsdp"])
    assert engine.validate({}, CASES["hsdp"]) == ["titan_config.py is missing", "launch.sh is missing"]
    assert "titan_config.py line 1" in engine.validate(files | {"titan_config.py": "def train(:"}, CASES["hsdp"])[0]


@pytest.mark.parametrize(
    ("plan", "model", "reason"),
    [
        (Plan(), GPT2_SMALL, "its Llama has gated layers"),
        (Plan(), {}, "no equal layers"),
        (Plan(), LLAMA_8B | {"num_heads": 0}, "num_heads isn't known"),
        (Plan(dp_shard_degree=2, zero_stage=1), LLAMA_8B, "shards gradients with the optimizer states"),
        (Plan(tp_degree=16), LLAMA_8B, "can't be shared out over 16 ranks"),
        (Plan(pp_degree=3, num_microbatches=3, schedule="1f1b"), LLAMA_8B, "no 3 equal stages"),
        (Plan(ep_degree=2, dp_shard_degree=2), LLAMA_8B, "no experts"),
        (Plan(zero_stage=2, dp_shard_degree=2, offload=True), LLAMA_8B, "it offloads"),
        (Plan(cp_degree=3), LLAMA_8B, "positions can't be shared out"),
        (Plan(pp_degree=2, num_microbatches=2, schedule="1f1b"), LLAMA_8B | {"tied": [["a", "b"]]}, "tied head"),
    ],
)
def test_what_it_cannot_express_has_a_reason(plan: Plan, model: dict, reason: str) -> None:
    assert reason in engine.supports(plan, {"block_paths": [f"layers.{i}" for i in range(32)], **model})


def test_unclipped_scripts_stay_unclipped() -> None:
    inp = CASES["hsdp"]
    assert "training.max_norm" not in engine.flags(inp)
    calm = dataclasses.replace(inp, meta=dataclasses.replace(inp.meta, clips_gradients=False))
    assert engine.flags(calm)["training.max_norm"] == 1e9


def test_it_does_not_start_the_users_own_training() -> None:
    assert engine.start_line(CASES["hsdp"], "plan/torchtitan") == ""


@pytest.mark.skipif(not HAS_TORCHTITAN, reason="torchtitan is not installed")
def test_table_is_that_of_the_installed_version() -> None:
    assert table("torchtitan") == tool("record_torchtitan").recorded()


@pytest.mark.skipif(not HAS_TORCHTITAN, reason="torchtitan is not installed")
@pytest.mark.parametrize("case", CASES)
def test_torchtitan_reads_the_files(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.config import ConfigManager

    texts = written(engine, CASES[case])
    (tmp_path / "titan_config.py").write_text(texts["titan_config.py"])
    words = shlex.split(texts["launch.sh"].replace("\\\n", " "), comments=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "titan_config", raising=False)  # another case's
    made = ConfigManager().parse_args(words[words.index("--module") : -1])
    with torch.device("meta"):
        num_params = sum(p.numel() for p in made.model_spec.model.build().parameters())
    assert num_params == 8_030_261_248 - (128256 * 4096 if case == "ddp-tied" else 0)
    assert made.parallelism.data_parallel_shard_degree == engine.flags(CASES[case])["parallelism.data_parallel_shard_degree"]
