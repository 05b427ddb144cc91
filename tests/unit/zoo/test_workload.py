"""Networks of the zoo as workloads: traced in this process, which stays as it was."""

import pytest
import torch

from advisor.zoo.workload import zoo_workload
from cost_models import estimate
from cost_models.catalogue import default_links, find_gpu
from cost_models.convnet import resnet50_workload
from cost_models.types import OP_CLASSES, Cluster, Plan, PlanTable

NORM = OP_CLASSES.index("normalization")


def prices(workload, *plans):
    device = find_gpu("A100", memory_gb=80)
    intra, inter = default_links(device.name)
    cluster = Cluster(device=device, gpus_per_node=8, num_nodes=1, intra=intra, inter=inter)
    return estimate(workload, cluster, PlanTable.from_plans(plans))


def seconds_by_class(workload):
    return {OP_CLASSES[c] for g in workload.groups for c in g.ops.op_class}


def test_a_traced_resnet_is_the_one_by_arithmetic():
    traced, by_hand = zoo_workload("resnet50", "tf32"), resnet50_workload(precision="tf32")
    assert traced.num_params == by_hand.num_params
    assert traced.model_flops == pytest.approx(by_hand.model_flops, rel=0.02)
    kept = [sum(g.num_repeats * g.saved_other_bytes for g in w.groups) for w in (traced, by_hand)]
    assert kept[0] == pytest.approx(kept[1], rel=0.05)
    plans = [Plan(micro_batch=n) for n in (64, 256)]
    ratio = prices(traced, *plans).step_time_s / prices(by_hand, *plans).step_time_s
    assert all(abs(ratio - 1) < 0.05)
    norms = [sum(g.num_repeats * g.ops.bytes_per_sample[g.ops.op_class == NORM].sum() for g in w.groups) for w in (traced, by_hand)]
    assert norms[0] == pytest.approx(norms[1], rel=0.01)  # both passes over the maps are counted


@pytest.mark.parametrize(
    ("precision", "dtype", "weight_bytes", "master_bytes", "state_bytes"),
    [("fp32", "fp32", 4, 0, 4), ("amp16", "fp16", 4, 0, 4), ("amp", "bf16", 4, 0, 4), ("fp16", "fp16", 2, 4, 4), ("fp8", "fp8", 2, 4, 4)],
)
def test_precisions_set_the_bytes_of_weights_and_their_copies(precision, dtype, weight_bytes, master_bytes, state_bytes):
    got = zoo_workload("resnet18", precision)
    assert (got.compute_dtype, got.param_bytes, got.master_bytes) == (dtype, weight_bytes, master_bytes)
    assert got.optimizer.state_bytes_per_param == state_bytes  # one moment of SGD with momentum, in fp32
    assert got.sample_unit == "images"


def test_unknown_precisions_are_named():
    with pytest.raises(ValueError, match="int4"):
        zoo_workload("resnet18", "int4")


def test_sequences_beyond_all_memory_are_refused():
    with pytest.raises(ValueError, match="4000000000 tokens"):
        zoo_workload("mt5-170m", "bf16", 4_000_000_000)
    assert zoo_workload("resnet18", "fp16").num_params == 11_689_512  # the process is as it was


def test_encoder_and_decoder_are_repeated_blocks_that_every_layout_can_divide():
    got = zoo_workload("mt5-170m", "bf16")
    assert [g.num_repeats for g in got.groups if g.can_cut] == [8, 8]
    assert (got.tokens_per_sample, got.sample_unit) == (512, "tokens")
    assert got.tied_params > 128e6
    whole, split, piped = (
        Plan(micro_batch=8, num_microbatches=8), Plan(micro_batch=8, num_microbatches=8, tp_degree=2),
        Plan(micro_batch=8, num_microbatches=8, pp_degree=2, schedule="1f1b"),
    )  # fmt: skip
    price = prices(got, whole, split, piped)
    assert price.step_time_s[0] > price.step_time_s[2]
    assert price.peak_memory_bytes[0] > max(price.peak_memory_bytes[1:])


def test_sequence_lengths_count_only_for_networks_that_read_text():
    assert zoo_workload("gnmt", "fp16").tokens_per_sample == zoo_workload("gnmt", "fp16", 57).tokens_per_sample == 56
    assert zoo_workload("mt5-170m", "bf16", 256).tokens_per_sample == 256
    assert zoo_workload("resnet18", "fp16", 256) is zoo_workload("resnet18", "fp16")


def test_recurrent_layers_are_priced_as_such_and_torch_keeps_its_own():
    before = dict(vars(torch._VF))
    assert "recurrent" in seconds_by_class(zoo_workload("gnmt", "fp16"))
    assert dict(vars(torch._VF)) == before
    assert torch.nn.LSTM(2, 2)(torch.ones(1, 1, 2))[0].shape == (1, 1, 2)


def test_models_of_the_caller_are_no_part_of_a_network():
    own = torch.nn.Linear(4000, 4000)
    got = zoo_workload("ncf", "fp16")
    assert got.resident_bytes == got.buffer_bytes == 0
    assert own.weight.grad is None
    assert not own._forward_hooks


def test_a_workload_is_made_once():
    assert zoo_workload("resnet18", "fp16") is zoo_workload("resnet18", "fp16")
