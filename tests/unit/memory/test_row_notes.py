"""Fields that published tables state in free text."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from advisor.measure.row_notes import with_notes
from advisor.measure.runs import read_runs

CI = {"source_repo_or_doc": "NVIDIA/Megatron-LM CI", "model_name": "ci-gpt-L12-h512", "tp": 2.0, "vocab": math.nan,
      "notes": "test gpt3_mcore_te_tp2; attention-backend unfused; --swiglu; experts 8; topk 2"}  # fmt: skip
TUNING = {"source_repo_or_doc": "bigscience-workshop/bigscience", "model_family": "BLOOM-tuning GPT", "model_name": "bs-200B-h14400-L?",
          "params_b": 200.0, "hidden": 14400.0, "vocab": 250000.0, "tp": 8.0, "n_layers": math.nan}  # fmt: skip


def test_a_megatron_test_states_its_attention_experts_and_defaults_in_the_notes():
    got = with_notes(CI)
    assert got["flash_attention"] == 0.0
    assert got["moe"] == "8 experts topk 2"
    assert (got["gated_mlp"], got["dropout"], got["tied_embeddings"]) == (1.0, 1.0, 1.0)
    assert got["vocab"] == 50432.0  # 50257 to a multiple of 256


def test_fused_attention_by_the_name_of_the_test():
    assert with_notes({**CI, "notes": "test gpt3_mcore_te_tp2;"})["flash_attention"] == 1.0
    assert with_notes({**CI, "notes": "test gpt3_mcore_tp2;"})["flash_attention"] == 0.0


def test_layers_come_from_the_parameter_count_where_only_that_is_stated():
    got = with_notes(TUNING)
    assert got["n_layers"] == 79.0
    assert got["layers_from_params"] == 1.0


def test_what_a_row_states_stays():
    assert with_notes({**TUNING, "n_layers": 70.0})["n_layers"] == 70.0
    assert with_notes({**CI, "vp": 2.0})["vp"] == 2.0
    assert with_notes(CI)["vp"] == 1.0


def test_experts_divided_among_other_ranks_than_the_dense_layers():
    assert with_notes({**CI, "ep": 4.0, "notes": "test gpt3_mcore_te_tp2_pp1_te_8experts_etp1_ep4;"})["ep"] == 2.0
    assert with_notes({**CI, "ep": 4.0, "notes": "test gpt3_mcore_te_tp2_pp1_te_8experts_ep4;"})["ep"] == 4.0


def test_a_t5_has_an_encoder_and_a_decoder():
    got = with_notes({**CI, "model_name": "ci-t5-L12-h768", "n_layers": 12.0})
    assert got["n_layers"] == 24.0
    assert got["vocab"] == 30720.0  # WordPiece's 30522 to a multiple of 256
    assert with_notes({**CI, "n_layers": 12.0})["n_layers"] == 12.0


@pytest.mark.parametrize(
    ("row", "found"),
    [({"notes": "qlora; epochs 4"}, {"trainable_share": 0.003, "quantized": 1.0}), ({"notes": "recipe lora_finetune_distributed"}, {"trainable_share": 0.003}),
     ({"notes": "full; optimizer PagedAdamW8bit"}, {"optimizer_name": "paged_adamw8bit"}), ({"optimizer": "AdamW 8-bit"}, {"optimizer_name": "adamw8bit"}),
     ({"optimizer": "AdamW fused"}, {}), ({"notes": "exploration of floral data"}, {}), ({"notes": "offload opt=Y par=N"}, {"offload": 1.0})],
)  # fmt: skip
def test_ways_of_tuning_by_their_usual_names(row, found):
    base = {"source_repo_or_doc": "own", "model_name": "m", "notes": ""}
    got = with_notes(base | row)
    assert {k: got[k] for k in got.keys() - (base | row).keys()} == found


def test_torchtitan_compiles_the_loss_since_2025():
    row = {"source_repo_or_doc": "pytorch/torchtitan", "model_name": "llama3-8B", "compile": 1.0}
    assert with_notes({**row, "source_path_or_table": "benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"})["fused_loss"] == 1.0
    assert "fused_loss" not in with_notes({**row, "source_path_or_table": "benchmarks/llama3_h100_202412_torchtitan.md Table 1"})


def test_other_sources_are_left_alone():
    row = {"source_repo_or_doc": "own", "model_name": "m", "notes": "experts 8", "n_layers": math.nan, "hidden": 512.0}
    assert with_notes(row).keys() == row.keys()


def test_several_instances_of_the_distributed_optimizer_shard_among_fewer_ranks():
    notes = "test gpt3_mcore_te_tp2_pp1_resume_torch_dist_multi_dist_optimizer_instances;"
    row = {**CI, "notes": notes, "n_layers": 12, "hidden": 512, "seq_len": 1024, "gpu": "H100", "n_gpus": 8, "dp": 4, "tp": 2, "pp": 1, "micro_batch": 4,
           "global_batch": 32, "sharding": "distributed optimizer", "framework": "Megatron-Core dev"}  # fmt: skip
    plans = read_runs(pd.DataFrame([row, {**row, "notes": "test gpt3_mcore_te_tp2_pp1;"}])).plans
    assert list(zip(plans.dp_replicate_degree, plans.dp_shard_degree, strict=True)) == [(2, 2), (1, 4)]


@pytest.mark.parametrize(
    ("notes", "n_gpus", "zero"), [("full; epochs 1", 4, 3.0), ("full; epochs 1", 1, None), ("lora; epochs 1", 4, None)]
)
def test_litgpt_tunes_in_full_on_several_gpus_with_fsdp(notes, n_gpus, zero):
    row = {"source_repo_or_doc": "Lightning-AI/litgpt", "model_name": "litgpt-phi-2", "notes": notes, "n_gpus": n_gpus}
    got = with_notes(row)
    assert (got.get("zero_stage"), got.get("activation_ckpt")) == (zero, "full" if zero else None)
    assert got["tied_embeddings"] == 0.0
