"""What a run's GPU, model and framework say of the software where the row itself doesn't."""

import pandas as pd
import pytest

from advisor.measure.run_fields import runtime_of
from advisor.measure.runs import read_runs
from cost_models.types import PRICING_KINDS

ROW = {"model_name": "gpt3-6.7B", "gpu": "H100", "n_gpus": 8, "dp": 8, "tp": 1, "pp": 1, "micro_batch": 1, "global_batch": 64,
       "precision": "bf16", "framework": "Megatron-LM"}  # fmt: skip


def read(**changed):
    runs = read_runs(pd.DataFrame([ROW | changed]))
    fused = bool((runs.workloads[0].groups[1].ops.kind == PRICING_KINDS.index("attention")).any())
    return runs.plans.plan(0).runtime, fused, "; ".join(runs.assumed[0])


@pytest.mark.parametrize(
    ("gpu", "expected"), [("H100", "megatron-core"), ("B200", "megatron-bridge"), ("MI300X", "megatron-core"), ("MI355X", "megatron-core")]
)
def test_megatron_on_recent_gpus_is_megatron_core(gpu, expected):
    runtime, fused, assumed = read(gpu=gpu)
    assert (runtime, fused) == (expected, True)
    assert f"runtime = {expected}" in assumed


def test_megatron_core_on_blackwell_is_that_of_2025():
    assert [read(framework="NeMo", gpu=gpu)[0] for gpu in ("H100", "B200")] == ["megatron-core", "megatron-bridge"]


@pytest.mark.parametrize("gpu", ["A100", "V100"])
def test_megatron_on_older_gpus_stays_what_it_was(gpu):
    runtime, fused, assumed = read(gpu=gpu)
    assert (runtime, fused) == ("megatron", False)
    assert "runtime" not in assumed


def test_a_runtime_that_is_stated_stays_whatever_the_gpu():
    assert read(gpu="B200", runtime="megatron")[0] == "megatron"
    assert read(gpu="GB200", source_repo_or_doc="NVIDIA/Megatron-LM CI (dev)", notes="test gpt3_te; experts 0")[0] == "megatron-core"


def test_attention_is_fused_on_recent_gpus_and_in_models_of_2023_and_later():
    gpu, model, neither = (
        read(framework="DeepSpeed", **changed) for changed in ({}, {"gpu": "A100", "model_name": "llama2-7B"}, {"gpu": "A100"})
    )
    assert [fused for _, fused, _ in (gpu, model, neither)] == [True, True, False]
    assert "flash_attention = 1 (a GPU of 2023 or later)" in gpu[2]
    assert "flash_attention = 1 (a model of 2023 or later)" in model[2]


def test_what_the_row_says_of_its_attention_wins():
    _, fused, assumed = read(framework="DeepSpeed", flash_attention=0)
    assert not fused
    assert "flash" not in assumed


def test_frozen_code_is_as_old_on_any_gpu():
    assert not read(framework="NVIDIA DeepLearningExamples PyTorch DDP", model_name="bert-large")[1]


@pytest.mark.parametrize(
    ("framework", "runtime"),
    [("Megatron-Bridge", "megatron-bridge"), ("NeMo", "megatron-core"), ("NeMo Automodel", "automodel"), ("Primus (Megatron)", "megatron-core"),
     ("PyTorch FSDP", "fsdp2"), ("fms-fsdp", "fms-fsdp"), ("torchtune", "torchtune"), ("TorchTitan", "torchtitan"), ("PyTorch", "ddp"),
     ("something else", "torch")],
)  # fmt: skip
def test_frameworks_are_known_by_how_their_names_begin(framework, runtime):
    assert runtime_of("somebody/else", framework).name == runtime
