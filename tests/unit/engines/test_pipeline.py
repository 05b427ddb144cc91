"""What the pipeline engine writes and refuses, that its validator catches mistakes, and how stages run their parts of a model."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from engine_plans import REPOSITORY, gpt2, llama
from torch import nn
from torch.nn import functional as F

from advisor.engines import EngineInput, engines_for, launch_line, why_no_files
from advisor.engines import pipeline as engine
from advisor.profiling.schema import ProfileMeta, load_profile
from advisor.workload import model_summary, shape
from advisor.workload.stages import stage_modules
from cost_models.types import Plan

PROFILES, MODELS = REPOSITORY / "tests" / "profiles", REPOSITORY / "tests" / "engines" / "models"
GOLDEN_FILES = ("parallelize.py", "stages.py", "run_stages.py", "split_layers.py", "train.py")


def pipe(pp_degree: int, schedule: str = "1f1b", **more) -> Plan:
    return Plan(pp_degree=pp_degree, schedule=schedule, runtime="torch-tp", **more)


@cache
def summary(name: str, plan: Plan) -> dict:
    """The model of a saved profile, with the stages of a plan."""
    profile = load_profile(PROFILES / name)
    workload = shape(profile)
    return {**model_summary(profile, workload), "stages": stage_modules(profile, workload, plan)}


FOUR_STAGES = pipe(4, dp_shard_degree=4, zero_stage=3, num_microbatches=16, recompute="full")
INTERLEAVED = pipe(2, "interleaved", virtual_stages=3, dp_replicate_degree=4, micro_batch=2, num_microbatches=8)
THREE = pipe(4, tp_degree=4, dp_shard_degree=2, zero_stage=1, num_microbatches=8, sequence_parallel=True, recompute="selective")
SMALL = pipe(2, dp_replicate_degree=2, micro_batch=2, num_microbatches=4)
META = ProfileMeta(script="tests/engines/models/llama_gqa.py", form="functions", num_params=54_560, num_trainable_params=54_560, optimizer="adamw",
                   batch_size=4, param_dtype="fp32")  # fmt: skip
SMALL_MODEL = {
    "block_paths": [f"model.layers.{i}" for i in range(4)], "can_pipeline": True,
    "stages": [["model.embed_tokens", "model.layers.0", "model.layers.1"], ["model.layers.2", "model.layers.3", "model.norm", "lm_head"]],
}  # fmt: skip
CASES = {
    "pipeline": dataclasses.replace(llama(FOUR_STAGES), model=summary("llama3_8b", FOUR_STAGES)),
    "pipeline-interleaved": dataclasses.replace(gpt2(INTERLEAVED, precision="bf16"), model=summary("gpt2", INTERLEAVED)),
    "pipeline-three-ways": dataclasses.replace(llama(THREE), model=summary("llama3_8b", THREE)),
    "pipeline-functions": EngineInput(plan=SMALL, script=META.script, form="functions", meta=META, model=SMALL_MODEL, gpus_per_node=4,
                                      folder="advice/plan-1"),
}  # fmt: skip
ALL = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def files(inp: EngineInput) -> dict[str, str]:
    return engine.files(inp, f"../../{inp.script}")


@ALL
def test_files_are_as_committed(case: str, check_golden) -> None:
    texts = {name: text for name, text in files(CASES[case]).items() if name in GOLDEN_FILES}
    for name, text in texts.items():
        check_golden(f"engines/{case}/{name}", text)
    assert {p.name for p in (REPOSITORY / "tests/golden/engines" / case).iterdir()} == set(texts)


@ALL
def test_python_is_clean(case: str, tmp_path: Path) -> None:
    for name, text in files(CASES[case]).items():
        (tmp_path / name).write_text(text)
    settings = ["--config", str(REPOSITORY / "pyproject.toml")]
    names = [name for name in GOLDEN_FILES if (tmp_path / name).is_file()]
    check = [sys.executable, "-m", "ruff", "check", *settings, "--ignore", "D,S,T20", *names]
    for command in (check, [sys.executable, "-m", "ruff", "format", "--diff", *settings, *names]):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@ALL
def test_files_pass_their_own_check(case: str) -> None:
    assert engine.supports(CASES[case].plan, CASES[case].model) == ""
    assert engine.validate(files(CASES[case]), CASES[case]) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("NUM_MICROBATCHES = 8", "NUM_MICROBATCHES = 4", "NUM_MICROBATCHES is 4, the plan says 8"),
        ("NUM_MICROBATCHES = 8", 'NUM_MICROBATCHES = "8"', "the plan says 8"),
        ("NUM_MICROBATCHES = 8", "NUM_MICROBATCHS = 8", "NUM_MICROBATCHES is missing"),
        ("range(4, 9)", "range(4, 8)", "STAGES is not"),
        ('"norm", "head"', '"norm"', "STAGES is not"),
        ('"tokens.weight"', '"token.weight"', "TIED is not"),
        ("(2, 4)", "(4, 2)", "the mesh is not"),
        ("mesh_dim_names", "mesh_dim_name", "the mesh is not"),
        ('"pipeline", "replicate"', '"pipeline", "shard"', "the mesh is not"),
        ("ScheduleInterleaved1F1B(", "ScheduleGPipe(", "the schedule is not ScheduleInterleaved1F1B"),
        ("def parallelize(", "def parallelize", "line"),
    ],
)
def test_validator_catches(old: str, new: str, complaint: str) -> None:
    inp = CASES["pipeline-interleaved"]
    texts = files(inp)
    assert old in texts["parallelize.py"]
    texts["parallelize.py"] = texts["parallelize.py"].replace(old, new)
    assert complaint in "; ".join(engine.validate(texts, inp))


BLOCKS = {"block_paths": [f"layers.{i}" for i in range(4)], "can_pipeline": True}
PAIRS = {"tp_pairs": [{"column": ["q", "k"], "row": ["o"]}]}


@pytest.mark.parametrize(
    ("plan", "model", "reason"),
    [
        (Plan(dp_replicate_degree=2), BLOCKS, "nothing to cut"),
        (pipe(2), {**BLOCKS, "can_pipeline": False, "pp_reason": "recurrent layers wait for each time step"}, "recurrent layers wait"),
        (pipe(2), {**BLOCKS, "can_pipeline": False}, "no chain of layers"),
        (pipe(8), BLOCKS, "4 repeated layers can't fill 8 stages"),
        (pipe(2, "interleaved", virtual_stages=4), BLOCKS, "can't fill 8 stages"),
        (pipe(2), {}, "0 repeated layers"),
        (pipe(2), {**BLOCKS, "tied": [["layers.0.bias", "layers.1.bias"]]}, "only the first and the last stage can share one"),
        (pipe(2), {**BLOCKS, "tied": [["a.weight", "b.weight", "c.weight"]]}, "a.weight, b.weight and 1 more are one weight"),
        (pipe(2, cp_degree=2), BLOCKS, "context and expert parallelism"),
        (pipe(2, offload=True), BLOCKS, "on the host"),
        (pipe(2, tp_degree=2), BLOCKS, "no column and row weights"),
        (pipe(2, tp_degree=2), {**BLOCKS, **PAIRS, "num_heads": 3}, "3 heads can't be shared out"),
        (pipe(2, "interleaved", virtual_stages=2), {**BLOCKS, "loose_parameters": ["cls"], "stages": [["cls", "layers.0"]]}, "cls lies in no module"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_has_a_reason(plan: Plan, model: dict, reason: str) -> None:
    assert reason in engine.supports(plan, model)


@pytest.mark.parametrize("name", ["resnet50", "ddpm_unet", "lstm_lm", "clip_dual_encoder", "gnn_molecules", "shared_block"])
def test_models_that_are_no_chain_are_refused_as_the_report_says(name: str) -> None:
    profile = load_profile(PROFILES / name)
    model = model_summary(profile, shape(profile))
    assert engine.supports(pipe(2), model) == model["pp_reason"] != ""


def test_a_script_that_has_no_loss_function_gets_no_train_file_but_the_rest() -> None:
    inp = CASES["pipeline"]
    assert set(files(inp)) == {"parallelize.py", "stages.py", "run_stages.py"}
    assert launch_line(inp) == ""
    assert "the stages call the loss by themselves" in why_no_files(dataclasses.replace(inp, engines=("pipeline",)))
    assert "PyTorch pipelines" in {s.engine for s in engines_for(inp.plan, inp.model) if s.supported}


def test_fp16_scales_the_loss_alike_on_all_stages() -> None:
    texts = files(dataclasses.replace(CASES["pipeline-functions"], precision="fp16"))
    assert "loss_fn=scaled" in texts["parallelize.py"]
    assert "scaler = ShardedGradScaler(device.type)" in texts["train.py"]
    assert "scaler" not in "".join(files(CASES["pipeline-functions"]).values())


def test_stages_must_be_as_many_as_the_plans() -> None:
    with pytest.raises(ValueError, match="cut into 2 stages, the plan has 4 x 1"):
        files(dataclasses.replace(CASES["pipeline-functions"], plan=pipe(4)))


def test_a_loss_over_the_routers_of_all_stages_is_refused_when_it_runs() -> None:
    inp = CASES["pipeline-functions"]
    assert "output_router_logits" not in files(inp)["parallelize.py"]
    text = files(dataclasses.replace(inp, model={**SMALL_MODEL, "num_experts": 8}))["parallelize.py"]
    assert 'raise ValueError("output_router_logits adds a loss over the routers of all stages' in text


def test_fewer_micro_batches_than_stages_take_gpipe() -> None:
    texts = files(dataclasses.replace(CASES["pipeline-functions"], plan=dataclasses.replace(SMALL, num_microbatches=1)))
    assert "ScheduleGPipe(" in texts["parallelize.py"]


@pytest.fixture(scope="module")
def stages() -> ModuleType:
    """The generated stages.py, imported."""
    text = engine.files(CASES["pipeline-functions"], "x.py")["stages.py"]
    spec = importlib.util.spec_from_loader("stages", loader=None)
    module = importlib.util.module_from_spec(spec)
    exec(compile(text, "stages.py", "exec"), module.__dict__)
    return module


class Block(nn.Module):
    def __init__(self, returns: str = "tensor"):
        super().__init__()
        self.up, self.down, self.returns = nn.Linear(8, 16), nn.Linear(16, 8), returns

    def forward(self, x, scale=1.0):
        y = x + scale * self.down(F.gelu(self.up(x)))
        return {"tensor": y, "tuple": (y, None, y.mean()), "list": [y]}[self.returns]


class Model(nn.Module):
    """A chain with a parameter outside of any module, which reads its layers' settings; `leak` takes more across a cut."""

    def __init__(self, returns: str = "tensor", leak: str = ""):
        super().__init__()
        self.embed, self.position = nn.Embedding(11, 8), nn.Parameter(torch.randn(8))
        self.layers = nn.ModuleList(Block(returns) for _ in range(4))
        self.head, self.leak = nn.Linear(8, 11), leak

    def forward(self, tokens):
        x = first = self.embed(tokens).to(self.embed.weight.dtype)
        x = x + self.position
        extra = 0.0
        for layer in self.layers:
            y = layer(x, scale=0.5) if layer.returns == "tensor" else layer(x)
            x = y if isinstance(y, torch.Tensor) else y[0]
            extra = extra + y[2] if self.leak == "each layer" else extra
        return self.head(x + first if self.leak == "skip" else x) + extra


CUT = [["position", "embed", "layers.0"], ["layers.1"], ["layers.2", "layers.3"], ["head"]]


def loss_fn(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def run_in_turn(stages: ModuleType, model: nn.Module, cut: list[list[str]], batch: torch.Tensor, *, ranks: int = 0) -> tuple[float, dict]:
    """Loss and gradients by way of all stages; `ranks` deals them out in turn, 0 gives each a rank of its own."""
    held: dict[int, tuple[nn.Module, dict]] = {}
    outputs, inputs, received = [], [], []
    for index in range(len(cut)):
        rank = index % (ranks or len(cut))
        if rank not in held:
            part = copy.deepcopy(model)
            held[rank] = part, stages.keep_stages(part, cut, list(range(rank, len(cut), ranks or len(cut))), torch.device("cpu"))
        outputs.append(stages.Stage(held[rank][0], loss_fn, cut, index, held[rank][1])(*received, batch=batch))
        inputs.append(received)
        received = [outputs[-1].detach().requires_grad_()]
    gradient = None
    for output, given in zip(reversed(outputs), reversed(inputs), strict=True):
        output.backward(gradient)
        gradient = given[0].grad if given else None
    return outputs[-1].item(), {name: p.grad for part, _ in held.values() for name, p in part.named_parameters()}


@pytest.mark.parametrize("returns", ["tensor", "tuple", "list"])
@pytest.mark.parametrize("ranks", [0, 2])
def test_stages_together_compute_what_the_model_computes(stages: ModuleType, returns: str, ranks: int) -> None:
    torch.manual_seed(0)
    model, batch = Model(returns), torch.randint(11, (2, 5))
    cut = CUT if not ranks else [["embed", "layers.0"], *CUT[1:]]
    if ranks:
        del model.position
        model.position = torch.zeros(8)
    loss, gradients = run_in_turn(stages, model, cut, batch, ranks=ranks)
    expected = loss_fn(model, batch)
    expected.backward()
    assert loss == pytest.approx(expected.item())
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad)


@pytest.mark.parametrize("leak", ["skip", "each layer"])
def test_what_else_crosses_a_cut_makes_the_loss_nan(stages: ModuleType, leak: str) -> None:
    model = Model("tuple" if leak == "each layer" else "tensor", leak)
    loss, _ = run_in_turn(stages, model, CUT, torch.randint(11, (2, 5)))
    assert torch.tensor(loss).isnan()


def test_a_rank_keeps_nothing_of_the_others(stages: ModuleType) -> None:
    model = Model()
    stages.keep_stages(model, CUT, [1], torch.device("cpu"))
    assert [name for name, _ in model.named_parameters()] == [f"layers.1.{name}" for name, _ in Block().named_parameters()]
    assert not model.get_submodule("head").original
    assert model.get_submodule("layers.0").original[0].up.weight.numel() == 128  # until it has run once


def test_a_parameter_in_no_stage_is_an_error(stages: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"in no stage: head.weight, head.bias"):
        stages.keep_stages(Model(), [*CUT[:2], CUT[2]], [0], torch.device("cpu"))


def test_micro_batches_of_another_shape_are_an_error(stages: ModuleType) -> None:
    model = Model()
    stage = stages.Stage(model, loss_fn, CUT, 0, stages.keep_stages(model, CUT, [0], torch.device("cpu")))
    stage(batch=torch.randint(11, (2, 5)))
    with pytest.raises(ValueError, match="pad micro-batches to one shape"):
        stage(batch=torch.randint(11, (2, 6)))
