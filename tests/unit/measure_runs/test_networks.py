"""Rows that name a network instead of a transformer's sizes, and rows that state no batch."""

import numpy as np
import pandas as pd
import pytest

from advisor.errors import AdvisorError
from advisor.measure.calibrate import calibrate_runs
from advisor.measure.evaluate import evaluate_runs
from advisor.measure.predict import predict_runs
from advisor.measure.run_batch import PRESUMED_TOKENS
from advisor.measure.runs import read_runs

NET = {"model_name": "ResNet-18", "gpu": "A100", "gpu_mem_gb": 80, "n_gpus": 8, "gpus_per_node": 8, "precision": "amp (fp16)",
       "micro_batch": 64, "global_batch": 512}  # fmt: skip
DECODER = {"model_name": "llama3-8B", "seq_len": 4096, "gpu": "H100", "gpu_mem_gb": 80, "n_gpus": 16, "tp": 2, "pp": 1, "precision": "bf16"}


def read(*rows):
    return read_runs(pd.DataFrame(rows))


def test_networks_are_priced_by_their_name():
    out = predict_runs(pd.DataFrame([NET, {**NET, "model_name": "secret-net"}, {**NET, "model_name": "resnet50 v1.5"}]))
    assert out.skipped_reason[1] == 'the shape of "secret-net" is neither stated nor known'
    assert out.predicted_samples_per_s[0] > 1.5 * out.predicted_samples_per_s[2] > 1000
    assert out.predicted_samples_per_s[0] == pytest.approx(512 / out.predicted_step_time_s[0])
    assert "batch" not in out.assumed[0]


def test_a_network_without_a_batch_gets_the_largest_that_fits():
    open_batch = {**NET, "micro_batch": None, "global_batch": None}
    large, small = read(open_batch, {**open_batch, "gpu": "T4", "gpu_mem_gb": 16, "model_name": "resnet50"}).plans.micro_batch
    assert large == 256
    assert small < 256
    runs = read(open_batch, {**NET, "micro_batch": None, "global_batch": 80})
    assert {"micro_batch = 256", "global_batch = 2048"} <= set(runs.assumed[0])
    assert runs.states_batch.tolist() == [False, True]
    assert runs.plans.micro_batch[1] == 10
    assert "global_batch = 80" not in runs.assumed[1]


def test_a_decoder_without_a_batch_takes_two_million_tokens_one_sequence_at_a_time():
    runs = read(DECODER)
    plan = runs.plans.plan(0)
    assert plan.micro_batch == 1
    assert plan.global_batch * DECODER["seq_len"] == PRESUMED_TOKENS
    assert np.isfinite(predict_runs(pd.DataFrame([DECODER])).predicted_mfu[0])


def test_throughputs_are_compared_where_the_batch_is_a_default():
    row = {**NET, "micro_batch": None, "global_batch": None, "samples_per_s_total": 4096.0}
    assert read(row).step_time_s[0] == 0.5
    assert read({**DECODER, "tokens_per_s_per_gpu": 4096.0}).step_time_s[0] == PRESUMED_TOKENS / (16 * 4096)
    predicted = predict_runs(pd.DataFrame([row])).predicted_samples_per_s[0]
    right = evaluate_runs(pd.DataFrame([{**row, "samples_per_s_total": predicted}]))
    assert right.overall["median_error_share"] == pytest.approx(0, abs=1e-9)


def test_defaults_are_no_runs_to_fit_constants_on():
    row = {**NET, "micro_batch": None, "global_batch": None, "samples_per_s_total": 4096.0}
    with pytest.raises(AdvisorError, match="No run"):
        calibrate_runs(pd.DataFrame([row]))


def test_tokens_of_a_network_that_reads_text_are_those_of_the_row():
    row = {**NET, "model_name": "mT5-170M", "precision": "bf16", "seq_len": 512, "tokens_per_s_per_gpu": 1e5}
    runs = read(row, {**row, "tp": 2, "pp": 2, "global_batch": 1024})
    assert runs.step_time_s[0] == pytest.approx(512 * 512 / 8e5)
    assert {"vocab", "decoder_seq_len"} <= set(runs.assumed[0])
    prices = predict_runs(runs.frame)
    assert prices.predicted_peak_mem_gib[1] < prices.predicted_peak_mem_gib[0]
