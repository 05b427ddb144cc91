"""A profile becomes layer groups whose parts sum to the whole."""

import subprocess
import sys

import numpy as np
import pytest

from advisor.errors import AdvisorError
from advisor.workload import shape, split_notes
from cost_models.types import OP_CLASSES, PHASES, PRICING_KINDS


def table_flops(group):
    """Flops of one sample and repeat as the cost models count them, by phase."""
    ops = group.ops
    factor = np.select(
        [ops.kind == PRICING_KINDS.index("memory"), ops.kind == PRICING_KINDS.index("attention")],
        [0.0, np.where(ops.phase == PHASES.index("backward"), 10.0, 4.0)],
        2.0,
    )
    return factor * ops.m * ops.n * ops.k * ops.batch * ops.work_share


def profile_flops(profile, *, causal_share=1.0):
    ops = profile.operators
    share = np.where((ops.op_class == "attention") & (ops.causal == 1), causal_share, 1.0)
    return float((ops.flops * share)[ops.phase.isin(["forward", "backward"])].sum())


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"frozen_input": True}, {"layers": 1}, {"batch": 1}, {"batch": 3, "seq": 5}])
def test_parameters_and_flops_of_all_groups_sum_to_the_profile(make_decoder, options):
    profile = make_decoder(**options)
    workload = shape(profile)
    assert workload.num_params == profile.parameters.num_elements.sum()
    assert sum(g.num_params * g.num_repeats for g in workload.groups) == workload.num_params
    flops = sum(table_flops(g).sum() * g.num_repeats for g in workload.groups) * profile.meta.batch_size
    assert flops == pytest.approx(profile_flops(profile, causal_share=0.5), rel=1e-9)


def test_saved_bytes_of_all_groups_and_the_logits_sum_to_the_profile(make_decoder):
    profile = make_decoder()
    saved = sum((g.saved_inner_bytes + g.saved_sequence_bytes + g.saved_other_bytes) * g.num_repeats for g in shape(profile).groups)
    forward = profile.operators[profile.operators.phase == "forward"]
    of_logits = forward.saved_bytes[forward.operator == "aten._log_softmax"].sum()
    assert saved * profile.meta.batch_size == pytest.approx(forward.saved_bytes.sum() - of_logits)


def test_convolutions_keep_their_flops_forward_and_for_each_gradient(make_conv_net):
    profile = make_conv_net()
    flops = sum(table_flops(g).sum() * g.num_repeats for g in shape(profile).groups) * profile.meta.batch_size
    assert flops == pytest.approx(profile_flops(profile))


def test_a_decoder_is_table_blocks_and_head(make_decoder):
    groups = shape(make_decoder(layers=4)).groups
    assert [(g.name, g.num_repeats) for g in groups] == [("embed", 1), ("layers.*", 4), ("norm + head", 1)]
    assert [g.can_recompute for g in groups] == [False, True, False]


def test_a_tied_head_stays_beside_its_norm_and_its_weight_counts_once(make_decoder):
    workload = shape(make_decoder(tied=True, vocab=2048, width=16))
    assert [g.name for g in workload.groups] == ["embed", "layers.*", "norm + head"]
    assert workload.groups[0].num_params == workload.tied_params == 2048 * 16
    assert workload.groups[2].num_params == 16


def test_unequal_first_block_is_a_group_of_its_own(make_conv_net):
    groups = shape(make_conv_net()).groups
    assert [(g.name, g.num_repeats) for g in groups] == [("stem", 1), ("blocks.0", 1), ("blocks.1-2", 2), ("fc", 1)]


def test_a_gradient_that_the_first_block_lacks_counts_with_its_share(make_decoder):
    whole, frozen = (shape(make_decoder(layers=4, frozen_input=f)).groups[1] for f in (False, True))
    assert frozen.num_repeats == 4
    shares = frozen.ops.work_share[frozen.ops.kind == PRICING_KINDS.index("gemm")]
    assert sorted(set(shares)) == [0.75, 1.0]
    assert table_flops(frozen).sum() < table_flops(whole).sum()


def test_sizes_are_those_of_one_sample(make_decoder):
    one, three = (shape(make_decoder(batch=b)) for b in (1, 3))
    for a, b in zip(one.groups, three.groups, strict=True):
        assert table_flops(a).sum() == pytest.approx(table_flops(b).sum())
        assert a.saved_inner_bytes == pytest.approx(b.saved_inner_bytes)
        assert a.boundary_bytes == b.boundary_bytes
    assert one.model_flops == pytest.approx(three.model_flops)
    assert one.input_bytes == three.input_bytes


def test_batch_dimension_is_rows_forward_and_the_inner_side_of_weight_gradients(make_decoder):
    group = shape(make_decoder(batch=2, seq=8, width=16, ffn=40)).groups[1]
    gemm = group.ops.kind == PRICING_KINDS.index("gemm")
    forward = gemm & (group.ops.phase == PHASES.index("forward"))
    assert set(group.ops.m[forward]) == {8.0}
    backward = gemm & ~forward
    assert set(zip(group.ops.batch_dim[backward], np.minimum(group.ops.m, group.ops.k)[backward] == 8.0, strict=True)) == {
        (1, True),
        (3, True),
    }


def test_model_flops_leave_out_the_causal_discount(make_decoder):
    profile = make_decoder()
    attention = profile.operators[profile.operators.op_class == "attention"]
    rest = profile_flops(profile) - attention.flops.sum()
    expected = rest + attention.flops[attention.phase == "forward"].sum() * 3
    assert shape(profile).model_flops * profile.meta.batch_size == pytest.approx(expected)


def test_weights_are_fixed_bytes_and_activations_grow_with_the_batch(make_decoder):
    ops = shape(make_decoder(batch=2, seq=8, width=16)).groups[1].ops
    norm = (ops.op_class == OP_CLASSES.index("normalization")) & (ops.phase == PHASES.index("forward"))
    assert ops.bytes_fixed[norm] == pytest.approx([16 * 4])
    assert ops.bytes_per_sample[norm] == pytest.approx([2 * 8 * 16 * 4])


def test_logits_hold_twelve_bytes_each(make_decoder):
    assert shape(make_decoder(batch=2, seq=8, vocab=2048)).logits_bytes == 8 * 2048 * 12


def test_a_planned_precision_rescales_activations_but_not_parameters(make_decoder):
    profile = make_decoder()
    as_traced, half = shape(profile), shape(profile, precision="bf16")
    assert half.groups[1].saved_inner_bytes == as_traced.groups[1].saved_inner_bytes / 2
    assert half.groups[1].boundary_bytes == as_traced.groups[1].boundary_bytes / 2
    assert (half.compute_dtype, half.param_bytes, half.grad_bytes, half.optimizer.state_bytes_per_param) == ("bf16", 4.0, 4.0, 8.0)
    assert half.num_params == as_traced.num_params


@pytest.mark.parametrize("option", [{"precision": "fp12"}, {"optimizer": "adamm"}])
def test_unknown_options_are_refused_with_the_choices(make_decoder, option):
    with pytest.raises(AdvisorError, match="Unknown") as caught:
        shape(make_decoder(), **option)
    assert "Choose one of" in caught.value.hint


def test_a_model_without_parameters_or_operators_is_one_group(draft):
    d = draft()
    d.module("", "Nothing")
    d.module("only", "Linear", layout="out_in")
    d.param("only.weight", (3, 3))
    workload = shape(d.profile())
    assert len(workload.groups) == 1
    assert workload.num_params == 9
    assert not workload.can_pipeline
    assert len(split_notes(d.profile())) == 2


def test_shaping_needs_no_torch():
    code = "import sys, advisor.workload; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
