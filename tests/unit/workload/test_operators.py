"""Operators become priced shapes at one sample: products, convolutions, attention, recurrent layers, experts."""

import numpy as np
import pytest

from advisor.workload import shape, split_notes
from advisor.workload.layout import find_layout
from cost_models.types import OP_CLASSES, PHASES, PRICING_KINDS


def rows(workload, *, kind=None, op_class=None, phase="forward"):
    """(m, n, k, batch, work_share) of the chosen operators of all groups."""
    found = []
    for g in workload.groups:
        o = g.ops
        chosen = o.phase == PHASES.index(phase)
        chosen &= (o.kind == PRICING_KINDS.index(kind)) if kind else True
        chosen &= (o.op_class == OP_CLASSES.index(op_class)) if op_class else True
        found += [
            tuple(float(x) for x in row)
            for row in zip(o.m[chosen], o.n[chosen], o.k[chosen], o.batch[chosen], o.work_share[chosen], strict=True)
        ]
    return found


def conv(draft, x, weight, y, *, flops):
    """A model of one convolution, forward and backward."""
    d = draft(batch=x[0])
    d.module("", "Net")
    d.module("conv", "Conv2d", x=x, y=y, layout="convolution")
    d.param("conv.weight", weight)
    d.op("conv", "convolution", [x, weight], [y], weight="conv.weight", flops=flops)
    d.op("conv", "convolution_backward", [y, x, weight], [x, weight], phase="backward", flops=2 * flops)
    return shape(d.profile())


def test_a_strided_convolution_meets_its_input_positions_backward(draft):
    flops = 2 * 4 * 16 * 8 * 3 * 9
    workload = conv(draft, [4, 3, 8, 8], [8, 3, 3, 3], [4, 8, 4, 4], flops=flops)
    assert rows(workload, kind="convolution") == [(16, 8, 27, 1, 1)]
    gradient, weight = rows(workload, kind="convolution", phase="backward")
    assert gradient == (64, 3, 8 * 9 * 16 / 64, 1, 1)
    assert weight == (8, 27, 16, 1, 1)
    assert 2 * np.prod(gradient) * 4 == 2 * np.prod(weight) * 4 == flops


def test_a_depthwise_convolution_is_one_product_per_channel(draft):
    workload = conv(draft, [2, 6, 4, 4], [6, 1, 3, 3], [2, 6, 4, 4], flops=2 * 2 * 16 * 6 * 9)
    assert rows(workload, kind="convolution") == [(16, 1, 9, 6, 1)]


def test_a_transposed_convolution_works_at_its_inputs(draft):
    flops = 2 * 2 * 16 * 8 * 5 * 4  # each input position meets the whole kernel
    workload = conv(draft, [2, 8, 4, 4], [8, 5, 2, 2], [2, 5, 8, 8], flops=flops)
    assert rows(workload, kind="convolution") == [(16, 5, 32, 1, 1)]


def test_a_frozen_convolution_has_no_weight_gradient(draft):
    d = draft(batch=2)
    x, w, y = [2, 3, 4, 4], [8, 3, 3, 3], [2, 8, 4, 4]
    d.module("conv", "Conv2d", x=x, y=y)
    d.param("conv.weight", w, trainable=False)
    d.op("conv", "convolution_backward", [y, x, w], [x], phase="backward", flops=2 * 2 * 16 * 8 * 27)
    workload = shape(d.profile())
    assert len(rows(workload, kind="convolution", phase="backward")) == 1
    assert workload.num_trainable_params == 0


def attention(draft, inputs, *, causal=0, name="_scaled_dot_product_flash_attention_for_cpu", model_class="Net", saved=0):
    d = draft(batch=2)
    query = next(s for s in inputs if s[-2] != s[-1])
    d.module("", model_class)
    d.module("mix", "Attention", x=query, y=query)
    d.param("mix.scale", (1,))
    flops = 4 * query[0] * query[1] * query[2] * inputs[-1][2] * query[3]
    d.op("mix", name, inputs, [query, query[:3]], op_class="attention", flops=flops, causal=causal, saved=saved)
    return d.profile(model_class=model_class)


def test_attention_has_queries_keys_head_size_and_heads(draft):
    profile = attention(draft, [[2, 4, 6, 16], [2, 4, 10, 16], [2, 4, 10, 16]])
    assert rows(shape(profile), kind="attention") == [(6, 10, 16, 4, 1)]


def test_causal_attention_does_half_of_the_square(draft):
    profile = attention(draft, [[2, 4, 6, 16]] + [[2, 2, 6, 16]] * 2, causal=1)
    workload = shape(profile)
    assert rows(workload, kind="attention") == [(6, 6, 16, 4, 0.5)]
    assert workload.model_flops == 4 * 6 * 6 * 16 * 4


@pytest.mark.parametrize(("model_class", "share"), [("TinyForCausalLM", 0.5), ("TinyEncoder", 1.0)])
def test_a_square_mask_hides_the_future_only_in_a_decoder(draft, model_class, share):
    profile = attention(draft, [[2, 1, 6, 6]] + [[2, 4, 6, 16]] * 3, model_class=model_class)
    assert rows(shape(profile), kind="attention") == [(6, 6, 16, 4, share)]


def test_unfused_scores_of_a_cpu_trace_are_not_kept_on_a_gpu(draft):
    query = [2, 4, 6, 16]
    profile = attention(draft, [query] * 3, name="_scaled_dot_product_attention_math", saved=10**6)
    group = shape(profile).groups[0]
    assert group.saved_other_bytes * 2 == 4 * (4 * 2 * 4 * 6 * 16 + 2 * 4 * 6)  # q, k, v, output in fp32 and the row sums


def test_a_recurrent_layer_waits_at_each_time_step(draft):
    d = draft(batch=3)
    d.module("", "Model")
    d.module("rnn", "LSTM", x=(7, 3, 8), y=(7, 3, 16))
    d.param("rnn.weight_ih_l0", (64, 8))
    d.param("rnn.weight_hh_l0", (64, 16))
    flops = 2 * 7 * 3 * (64 * 8 + 64 * 16)
    inputs = [[7, 3, 8], [64, 8], [64, 16]]
    d.op("rnn", "lstm", inputs, [[7, 3, 16]], op_class="recurrent", flops=flops, weight="rnn.weight_ih_l0")
    d.op("rnn", "lstm_backward", [[7, 3, 16], *inputs], [[7, 3, 8]], op_class="recurrent", flops=2 * flops, phase="backward")
    profile = d.profile()
    workload = shape(profile)
    assert rows(workload, kind="gemm") == [(7, 64, 8, 1, 1), (1, 64, 16, 7, 1)]
    assert workload.model_flops * 3 == 3 * flops
    assert not workload.can_tensor_parallel
    assert not workload.can_pipeline
    assert [note.split(": ")[1] for note in split_notes(profile)] == [
        "recurrent layers would need an all-reduce at every time step",
        "recurrent layers wait for each time step",
    ]


def test_an_unknown_operator_with_flops_is_priced_by_them(draft):
    d = draft(batch=2)
    d.module("odd", "Odd")
    d.param("odd.weight", (4, 4))
    d.op("odd", "my_kernel", [[2, 5, 4]], [[2, 5, 8]], flops=1600, op_class="other")
    workload = shape(d.profile())
    assert workload.model_flops == 800
    assert rows(workload, kind="gemm") == [(5, 8, 10, 1, 1)]


def test_dropout_of_a_cpu_trace_is_one_kernel_with_a_byte_per_element(draft):
    d = draft(batch=2)
    d.module("", "Model")
    d.module("drop", "Dropout")
    d.param("bias", (4,))
    x = [2, 5, 4]
    for name, saved in (("bernoulli_", 0), ("div_", 0), ("mul", 160)):
        d.op("drop", name, [x, x] if name == "mul" else [x], [x], saved=saved)
    group = shape(d.profile()).groups[0]
    assert group.ops.num_kernels.sum() == 1
    assert group.saved_other_bytes == 20
    assert group.ops.bytes_per_sample.sum() == 20 * (4 + 4 + 1)


def test_equal_products_of_experts_are_one_bank(draft):
    d = draft(batch=2)
    d.module("", "Mixture")
    for i in range(2):
        d.module(f"layers.{i}", "MoELayer", x=(2, 4, 8), y=(2, 4, 8))
        d.module(f"layers.{i}.experts", "ModuleList", calls=0)
        for e in range(4):
            path, tokens = f"layers.{i}.experts.{e}", 2 + e
            d.module(path, "Expert")
            d.module(f"{path}.up", "Linear", layout="out_in")
            d.param(f"{path}.up.weight", (32, 8))
            d.op(f"{path}.up", "mm", [[tokens, 8], [8, 32]], [[tokens, 32]], weight=f"{path}.up.weight", flops=2 * tokens * 8 * 32)
    workload = shape(d.profile())
    assert rows(workload, kind="gemm") == [(3.5 / 2, 32, 8, 4, 1)]
    assert workload.model_flops * 2 == 2 * 2 * (2 + 3 + 4 + 5) * 8 * 32


def test_stacked_experts_are_divided_like_a_gated_mlp(draft):
    d = draft(batch=2)
    d.module("", "Mixture")
    for i in range(2):
        path = f"layers.{i}"
        d.module(path, "MoELayer", x=(2, 4, 8), y=(2, 4, 8))
        d.module(f"{path}.experts", "Experts")
        for name, n_in, n_out in (("gate_up", 8, 64), ("down", 32, 8)):
            d.param(f"{path}.experts.{name}", (4, n_out, n_in))
            d.op(f"{path}.experts", "_grouped_mm", [[16, n_in], [4, n_in, n_out], [4]], [[16, n_out]], weight=f"{path}.experts.{name}",
                 flops=2 * 16 * n_in * n_out, op_class="matmul")  # fmt: skip
    workload = shape(d.profile())
    assert workload.can_tensor_parallel
    assert workload.num_experts == 4
    assert rows(workload, kind="gemm") == [(2, 64, 8, 4, 1), (2, 8, 32, 4, 1)]
    assert workload.groups[0].num_tp_params == workload.groups[0].num_expert_params == 4 * (64 * 8 + 32 * 8)


def test_heads_spelt_out_one_by_one_feed_one_row_weight(draft):
    d = draft(batch=2)
    d.module("", "Lecture")
    for i in range(2):
        path = f"blocks.{i}"
        d.module(path, "Block", x=(2, 4, 8), y=(2, 4, 8))
        for h in range(2):
            for name in ("q", "k", "v"):
                d.linear(f"{path}.heads.{h}.{name}", 8, 4, 4)
            d.op(f"{path}.heads.{h}", "bmm", [[2, 4, 4], [2, 4, 4]], [[2, 4, 4]], flops=256)
        d.linear(f"{path}.proj", 8, 8, 4)
    split = find_layout(d.profile()).splits[0]
    assert [(len(p.columns), p.rows) for p in split.pairs] == [(6, ("0:proj.weight",))]


def test_skip_connections_forbid_a_pipeline(draft):
    d = draft(batch=2)
    d.module("", "UNet")
    for i in range(4):
        x = (2, 16 if i > 1 else 8, 4, 4)
        d.module(f"up.{i}", "ResBlock", x=x, y=(2, 8, 4, 4))
        for name in ("a", "b"):
            d.module(f"up.{i}.{name}", "Conv2d")
            d.param(f"up.{i}.{name}.weight", (8, x[1], 3, 3))
            d.op(f"up.{i}.{name}", "convolution", [list(x), [8, x[1], 3, 3]], [[2, 8, 4, 4]], weight=f"up.{i}.{name}.weight", flops=2 * 2 * 16 * 8 * x[1] * 9)  # fmt: skip
        d.op("", "cat", [[2, 8, 4, 4], [2, 8, 4, 4]], [[2, 16, 4, 4]], op_class="copy-same-device")
    profile = d.profile()
    assert not shape(profile).can_pipeline
    assert any("skip connections" in note for note in split_notes(profile))


def test_a_shared_table_belongs_to_the_first_part_that_uses_it(draft):
    d = draft(batch=2)
    d.module("", "EncoderDecoder")
    d.module("shared", "Embedding", calls=0, layout="embedding")
    d.param("shared.weight", (2048, 8), aliases=("encoder.embed.weight", "head.weight"))
    d.module("encoder", "Encoder")
    d.module("encoder.embed", "Embedding", layout="embedding")
    d.op("encoder.embed", "embedding", [[2048, 8], [2, 4]], [[2, 4, 8]], weight="shared.weight")
    for i in range(3):
        d.module(f"encoder.layers.{i}", "Layer", x=(2, 4, 8), y=(2, 4, 8))
        d.linear(f"encoder.layers.{i}.up", 8, 32, 4)
        d.linear(f"encoder.layers.{i}.down", 32, 8, 4)
    d.module("head", "Linear", layout="out_in")
    d.op("head", "mm", [[8, 8], [8, 2048]], [[8, 2048]], weight="shared.weight", flops=2 * 8 * 8 * 2048)
    workload = shape(d.profile())
    assert [(g.name, g.num_params) for g in workload.groups] == [("encoder.embed", 2048 * 8), ("encoder.layers.*", 512), ("head", 0)]
    assert workload.tied_params == 2048 * 8


def test_a_profile_read_from_a_trace_is_one_group_that_can_not_be_split(draft):
    d = draft(batch=1)
    d.op("", "ampere_sgemm", [], [], op_class="matmul")
    profile = d.profile(source="imported", form="trace")
    assert [g.name for g in shape(profile).groups] == ["(model)"]
    assert all("read from a trace" in note for note in split_notes(profile))


def test_a_lookup_reads_its_rows_and_not_the_table(make_decoder):
    group = shape(make_decoder(batch=2, seq=8, width=16, vocab=2048)).groups[0]
    lookup = group.ops.phase == PHASES.index("forward")
    assert list(group.ops.bytes_per_sample[lookup]) == [2 * 8 * 16 * 4]
    assert list(group.ops.bytes_fixed[lookup]) == [0]
    assert group.ops.bytes_fixed[~lookup].sum() == 2048 * 16 * 4  # the gradient of the whole table is written
