"""Fields that published tables state in free text."""

from __future__ import annotations

import math

from advisor.measure.row_notes import with_notes

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


def test_other_sources_are_left_alone():
    row = {"source_repo_or_doc": "own", "model_name": "m", "notes": "experts 8", "n_layers": math.nan, "hidden": 512.0}
    assert with_notes(row).keys() == row.keys()
