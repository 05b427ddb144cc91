"""Where a row's shape comes from, and that the built-in shapes are those of the models they name."""

import pandas as pd
import pytest

from advisor.errors import AdvisorError
from advisor.measure.predict import predict_runs
from advisor.measure.run_shapes import find_shape, known_shapes, plain_name
from advisor.measure.runs import read_runs
from cost_models.types import PRICING_KINDS

ROW = {"model_name": "llama3-8B", "seq_len": 2048, "gpu": "A100", "gpu_mem_gb": 80, "n_gpus": 8, "dp": 8, "tp": 1, "pp": 1, "micro_batch": 1,
       "global_batch": 8, "precision": "bf16"}  # fmt: skip
SHAPES = {plain_name(row["model_name"]): row for row in known_shapes().to_dict("records")}


def workload(**change):
    return read_runs(pd.DataFrame([{**ROW, **change}])).workloads[0]


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [("meta-llama/Llama-2-7b-hf", "llama2-7B"), ("litgpt-Llama-3.1-8B", "llama3.1-8B"), ("litgpt-phi-2", "phi-2"),
     ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7B"), ("google/gemma-2-9b-it", "gemma-2-9B"), ("Meta-Llama-3-8B", "llama3-8B"),
     ("Phi-3-mini-128k-instruct", "phi-3-mini"), ("GPT2", "gpt2"), ("llama3-70B-LoRA", "llama3-70B"), ("GPT OSS 120B", "gpt-oss-120B"),
     ("Llama 3.1 405B", "llama3.1-405B"), ("DeepSeek V3", "deepseek-v3")],
)  # fmt: skip
def test_names_are_found_however_they_are_spelled(spelled, meant):
    assert find_shape(spelled, SHAPES)["model_name"] == meant


@pytest.mark.parametrize("unknown", ["", "-", "gpt2-7.5B", "bs-gpt2-52B", "llama", "7B", "base", "resnet50"])
def test_a_name_is_never_taken_for_another_model(unknown):
    assert find_shape(unknown, SHAPES) == {}


#: Parameters in billions, as the models' authors state them.
STATED = {
    "llama2-7B": 6.74, "llama3-70B": 70.55, "llama3.2-1B": 1.24, "mistral-7B": 7.24, "gemma-2B": 2.51, "gemma-7B": 8.54, "gemma-2-9B": 9.24,
    "gemma-2-27B": 27.2, "qwen2.5-7B": 7.62, "qwen3-4B": 4.02, "qwen3-30B-A3B": 30.5, "mixtral-8x7B": 46.7, "gpt-oss-120B": 117.0,
    "phi-2": 2.78, "phi-3-mini": 3.82, "tiny-llama": 1.1, "pythia-6.9B": 6.86, "bloom-176B": 176.2, "gpt-neox-20B": 20.6, "dbrx": 132.0,
    "llama4-scout": 108.0, "llama4-maverick": 401.0, "deepseek-v2-lite": 15.7, "qwen2-57B-A14B": 57.4, "glm-4.5-air": 106.8, "grok-1": 314.0,
    "olmoe-1B-7B": 6.92, "gemma-3-27B": 27.0, "starcoder2-15B": 15.96, "mistral-large-123B": 122.6, "nemotron-3-nano-30B-A3B": 31.6,
    "qwen3-next-80B-A3B": 80.0, "deepseek-v3": 671.0, "deepseek-v2": 236.0, "kimi-k2": 1026.0, "moonlight-16B-A3B": 16.0,
}  # fmt: skip


@pytest.mark.parametrize("name", STATED)
def test_built_in_shapes_have_the_parameters_their_authors_state(name):
    assert workload(model_name=name).num_params / 1e9 == pytest.approx(STATED[name], rel=0.02)


def test_built_in_shapes_are_named_once():
    names = [plain_name(name) for name in known_shapes()["model_name"]]
    assert len(names) == len(set(names))


def test_what_the_row_says_of_its_model_wins():
    plain, own = workload(), workload(gated_mlp=0, tied_embeddings=1, moe="8 experts topk 2")
    assert own.tied_params > plain.tied_params == 0
    assert (own.num_experts, own.num_active_experts) == (8, 2)
    assert own.num_params > 3.5 * plain.num_params  # an expert is a whole MLP where its width isn't said
    assert workload(dropout=1).groups[1].saved_sequence_bytes > plain.groups[1].saved_sequence_bytes


def test_junk_in_a_table_of_shapes_leaves_the_built_in_one(tmp_path):
    (tmp_path / "arch.csv").write_text("model_name,n_layers,hidden,vocab\nllama3-8B,many,4096,1000\n")
    runs = read_runs(pd.DataFrame([ROW]), tmp_path / "arch.csv")
    assert runs.workloads[0].groups[1].num_repeats == 32
    assert runs.workloads[0].vocab_size == 1000
    (tmp_path / "arch.csv").write_text("name,n_layers\nllama3-8B,2\n")
    with pytest.raises(AdvisorError, match="model_name"):
        read_runs(pd.DataFrame([ROW]), tmp_path / "arch.csv")


def test_a_layout_that_needs_more_gpus_than_there_are_is_skipped():
    assert "needs 64 GPUs" in predict_runs(pd.DataFrame([{**ROW, "pp": 8}])).skipped_reason[0]


def test_adapters_leave_most_of_the_memory_untrained():
    stated = {**ROW, "zero_stage": 0, "activation_ckpt": "none"}
    full, adapters = (predict_runs(pd.DataFrame([{**stated, "notes": notes}])).iloc[0] for notes in ("full; epochs 1", "lora; epochs 1"))
    assert adapters.predicted_peak_mem_gib < 0.5 * full.predicted_peak_mem_gib


def test_adapters_are_known_by_the_notes_or_the_name():
    full, noted, named = (workload(**change) for change in ({}, {"notes": "LoRA"}, {"model_name": "llama3-8B-lora"}))
    assert noted.num_trainable_params == named.num_trainable_params < 0.1 * full.num_trainable_params
    assert 0.6 * full.model_flops < named.model_flops < 0.8 * full.model_flops  # frozen weights get no gradient


@pytest.mark.parametrize(("name", "active"), [("deepseek-v3", 37.0), ("deepseek-v2", 21.0), ("kimi-k2", 32.0), ("qwen3-235B-A22B", 22.0)])
def test_a_token_meets_as_many_weights_as_the_authors_state(name, active):
    token = workload(model_name=name, seq_len=1)
    assert token.model_flops / 6e9 == pytest.approx(active, rel=0.05)


def test_half_of_the_layers_may_see_a_window_only():
    windowed, whole = (
        workload(model_name="gpt-oss-20B", seq_len=8192, moe=f"32 experts topk 4 moe_ffn 2880{end}") for end in (" window 128", "")
    )
    work = [
        sum(float((g.ops.m * g.ops.n)[g.ops.kind == PRICING_KINDS.index("attention")].sum()) for g in w.groups) for w in (windowed, whole)
    ]
    assert work[0] / work[1] == pytest.approx(0.5, rel=0.05)


def test_routing_limited_to_groups_comes_from_the_shape():
    assert workload(model_name="deepseek-v3").routed_share == 0.5
    assert workload(model_name="qwen3-30B-A3B").routed_share == 1.0


def test_a_gpt_of_known_size_gets_a_presumed_shape_that_is_named():
    runs = read_runs(pd.DataFrame([{**ROW, "model_name": "own-gpt", "params_b": 175.0}]))
    assert runs.workloads[0].groups[1].num_repeats == 96
    assert runs.workloads[0].hidden_size == 12288
    assert {"n_layers", "hidden"} <= set(runs.assumed[0])


@pytest.mark.parametrize(
    ("name", "billions", "active"), [("acme-13B-chat", 13, 13), ("acme-120B-A12B", 120, 12), ("acme-1T-A32B", 1000, 32)]
)
def test_a_decoder_whose_name_says_its_size_gets_a_shape_of_that_size(name, billions, active):
    runs = read_runs(pd.DataFrame([{**ROW, "model_name": name}]))
    assert runs.workloads[0].num_params / 1e9 == pytest.approx(billions, rel=0.15)
    assert runs.workloads[0].model_flops / 6 / 2048 / 1e9 == pytest.approx(active, rel=0.25)
    assert "shape (a decoder of its size)" in runs.assumed[0]


def test_recurrent_layers_stand_as_attention_and_are_named():
    runs = read_runs(pd.DataFrame([{**ROW, "model_name": "nemotronh-56B"}]))
    assert runs.workloads[0].num_params / 1e9 == pytest.approx(56.3, rel=0.02)
    assert "attention in place of recurrent layers" in runs.assumed[0]


def test_an_unknown_network_of_known_size_is_not_presumed_to_be_a_gpt():
    assert "net" in predict_runs(pd.DataFrame([{**ROW, "model_name": "net", "params_b": 3.0}])).skipped_reason[0]


def test_a_row_that_contradicts_itself_is_skipped_with_the_reason():
    reason = predict_runs(pd.DataFrame([{**ROW, "seq_len": 0}, ROW])).skipped_reason
    assert "must be positive" in reason[0]
    assert reason[1] == ""


def test_bigscience_runs_with_unsharded_gradients_take_more_memory_and_the_same_time():
    row = {**ROW, "source_repo_or_doc": "bigscience-workshop/bigscience", "model_family": "GPT", "model_name": "bs", "n_layers": 70,
           "hidden": 14336, "n_heads": 112, "vocab": 250000, "n_gpus": 384, "dp": 8, "tp": 4, "pp": 12, "zero_stage": 1, "global_batch": 2048,
           "activation_ckpt": "full"}  # fmt: skip
    before, after = predict_runs(pd.DataFrame([{**row, "notes": f"run date 02-{day};"} for day in (20, 28)])).itertuples()
    assert after.predicted_peak_mem_gib > before.predicted_peak_mem_gib + 1
    assert after.predicted_step_time_s == before.predicted_step_time_s
