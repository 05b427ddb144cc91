"""Networks of published tables: their usual batches, what their tables count, and prices that grow with the batch."""

import numpy as np
import pandas as pd
import pytest

from advisor.measure.known_networks import known_network
from advisor.measure.predict import predict_runs
from advisor.measure.runs import read_runs
from advisor.zoo.workload import zoo_workload
from cost_models.types import PRICING_KINDS

ROW = {
    "gpu": "A100",
    "gpu_mem_gb": 80,
    "n_gpus": 1,
    "gpus_per_node": 8,
    "intra_link": "NVLink",
    "precision": "amp (fp16)",
    "framework": "PyTorch",
}


def rows(*changes):
    return pd.DataFrame([{**ROW, **change} for change in changes])


@pytest.mark.parametrize("name", ["DLRM", "VAE-CF", "FastPitch", "V-Net", "NCF"])
def test_larger_batches_are_faster_a_sample(name):
    out = predict_runs(rows(*({"model_name": name, "micro_batch": n, "global_batch": n} for n in (8, 32, 128))))
    assert not out.skipped_reason.any()
    assert (np.diff(out.predicted_step_time_s) > 0).all()
    assert (np.diff(out.predicted_samples_per_s) > 0).all()


def test_recipes_batches_are_presumed_where_they_fit():
    small = {"gpu": "T4", "gpu_mem_gb": 16}
    plans = read_runs(
        rows(
            {"model_name": "HiFi-GAN"}, {"model_name": "HiFi-GAN", "n_gpus": 8}, {"model_name": "SSD300"}, {"model_name": "SSD300", **small}
        )
    ).plans
    assert plans.micro_batch[:3].tolist() == [16, 16, 128]
    assert plans.micro_batch[3] in (16, 32, 64)
    assert (plans.num_microbatches == 1).all()


def test_recommenders_share_their_batch_among_the_gpus():
    runs = read_runs(rows({"model_name": "DLRM"}, {"model_name": "DLRM", "n_gpus": 8}))
    assert runs.plans.micro_batch.tolist() == [65536, 8192]
    assert "global_batch = 65536" in runs.assumed[1]


def test_tables_of_embeddings_that_are_updated_in_place_have_no_gradient():
    got = zoo_workload("dlrm", "fp32")
    assert got.buffer_bytes == pytest.approx(15.6 * 2**30, rel=0.01)
    assert got.num_params < 3e6
    moved = sum(g.ops.bytes_fixed.sum() for g in got.groups)
    assert moved < 1e9  # rows, never whole tables


def test_throughput_is_counted_in_the_unit_of_the_notes():
    frames, sentences = "training; unit mels/s; x", "training; unit sequences/s"
    table = rows({"model_name": "FastPitch", "notes": frames}, {"model_name": "FastPitch", "notes": sentences})
    out = predict_runs(table)
    assert out.predicted_samples_per_s[0] / out.predicted_samples_per_s[1] == pytest.approx(566)
    table["samples_per_s_total"] = out.predicted_samples_per_s
    assert read_runs(table).step_time_s == pytest.approx(out.predicted_step_time_s, rel=1e-6)
    assert known_network("WaveGlow", "fp32").units_per_sample("unit samples/s") == 8000
    assert known_network("ResNet-18", "fp32").units_per_sample("unit img/s") == 1


def test_every_step_of_a_recurrent_decoder_is_priced_and_its_weights_count_once():
    got = zoo_workload("tacotron-2", "fp32")
    first, further = (g for g in got.groups if g.name.startswith("decoder"))
    assert further.num_repeats == 99
    assert further.num_params == 0
    assert sum(g.num_params * g.num_repeats for g in got.groups) == got.num_params == 28_193_153
    assert first.ops is further.ops


def test_autocast_makes_softmax_write_fp32_as_on_cuda():
    def moved(precision):
        groups = zoo_workload("fastpitch", precision).groups
        return sum(g.num_repeats * g.ops.bytes_per_sample[g.ops.kind == PRICING_KINDS.index("memory")].sum() for g in groups)

    assert moved("amp16") > 1.2 * moved("fp16")


@pytest.mark.parametrize(
    ("name", "tokens"), [("BERT-large phase 1", 128), ("BERT-large phase 2", 512), ("BERT-base SQuAD", 384), ("roberta-base", 512)]
)
def test_encoders_are_found_by_how_they_were_trained(name, tokens):
    runs = read_runs(rows({"model_name": name}))
    assert not runs.skipped
    assert runs.workloads[0].seq_len == tokens
    assert runs.plans.micro_batch[0] > 8  # as many sequences as fit
    assert "seq_len" in runs.assumed[0]


@pytest.mark.parametrize("name", ["tft", "wide-and-deep", "unet-industrial", "t5-small"])
def test_networks_without_a_check_of_their_own_are_priced_whole(name):
    got = zoo_workload(name, "fp32")
    assert sum(g.num_params * g.num_repeats for g in got.groups) == pytest.approx(got.num_params, rel=0.01)
    assert got.model_flops > 2 * got.num_params or name == "wide-and-deep"  # most of whose weights are tables
