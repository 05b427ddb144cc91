"""What tensor and pipeline parallelism may divide, and the reasons where they may not."""

import pytest

from advisor.workload import model_summary, shape, split_notes
from cost_models.types import OP_CLASSES, PHASES, PRICING_KINDS, TP_SPLITS


def splits(group, phase, kind="gemm"):
    ops = group.ops
    chosen = (ops.phase == PHASES.index(phase)) & (ops.kind == PRICING_KINDS.index(kind))
    return [TP_SPLITS[i] for i in ops.tp_split[chosen]]


def test_weights_alternate_columns_and_rows_by_shared_input(make_decoder):
    profile = make_decoder()
    pairs = model_summary(profile, shape(profile))["tp_pairs"]
    assert [(p["column"], p["row"]) for p in pairs] == [
        (["attn.q", "attn.k", "attn.v"], ["attn.o"]),
        (["mlp.gate", "mlp.up"], ["mlp.down"]),
    ]
    assert {p["group"] for p in pairs} == {"layers.*"}


def test_forward_products_are_cut_at_outputs_of_columns_and_inputs_of_rows(make_decoder):
    group = shape(make_decoder()).groups[1]
    assert splits(group, "forward") == ["n", "n", "n", "k", "n", "n", "k"]  # q k v o gate up down


def test_gradients_are_cut_at_the_same_side_of_the_weight(make_decoder):
    group = shape(make_decoder(width=16, ffn=40)).groups[1]
    weight_then_input = splits(group, "backward")
    # down, up, gate, o, v, k, q: weight gradient (out x in), then input gradient (tokens x in)
    assert weight_then_input == ["n", "n", "m", "k", "m", "k", "n", "n", "m", "k", "m", "k", "m", "k"]


def test_attention_is_cut_by_heads_and_activations_by_where_they_lie(make_decoder):
    group = shape(make_decoder()).groups[1]
    assert splits(group, "forward", "attention") == ["batch"]
    assert splits(group, "forward", "memory") == ["sequence", "sequence", "inner", "inner", "sequence"]  # norm add silu mul add
    assert set(splits(group, "backward", "memory")) == {"inner", "sequence"}


def test_divided_parameters_are_all_but_the_norms(make_decoder):
    groups = shape(make_decoder(width=16, vocab=2048)).groups
    assert [g.num_params - g.num_tp_params for g in groups] == [0, 16, 16]
    assert [g.num_tp_collectives for g in groups] == [1, 2, 0]


def test_small_tables_and_heads_stay_whole(make_decoder):
    groups = shape(make_decoder(vocab=64)).groups
    assert groups[0].num_tp_params == groups[2].num_tp_params == 0


def test_the_head_is_cut_by_vocabulary_and_logits_with_it(make_decoder):
    group = shape(make_decoder()).groups[2]
    assert splits(group, "forward") == ["n"]
    reductions = group.ops.op_class == OP_CLASSES.index("reduction")
    assert {TP_SPLITS[i] for i in group.ops.tp_split[reductions]} == {"inner"}


def test_selective_keeps_products_and_attention_only(make_decoder):
    group = shape(make_decoder(batch=2, seq=8, width=16, heads=4, kv_heads=2, ffn=40)).groups[1]
    tokens, kv = 8, 8
    inner = 4 * tokens * (16 + 2 * kv + 16 + 2 * 40)  # q, k, v, attention, gate, up
    sequence = 4 * tokens * (16 + 16 + 16)  # o, down, and the block's input
    assert group.selective_inner_bytes + group.selective_sequence_bytes == min(
        inner + sequence, group.saved_inner_bytes + group.saved_sequence_bytes
    )


def test_blocks_of_convolutions_are_not_divided_and_say_why(make_conv_net):
    profile = make_conv_net()
    workload = shape(profile)
    assert not workload.can_tensor_parallel
    assert all(g.num_tp_params == 0 and set(g.ops.tp_split) <= {0} for g in workload.groups)
    assert "convolutions do" in split_notes(profile)[0]


def test_equal_blocks_may_be_cut_and_only_they(make_decoder):
    workload = shape(make_decoder())
    assert workload.can_pipeline
    assert [g.can_cut for g in workload.groups] == [False, True, False]
    assert workload.groups[1].boundary_bytes == 8 * 16 * 4


def block(d, path, *, weight="", calls=1, classes="Linear"):
    """A residual MLP block of two linear layers on (2, 4, 8)."""
    d.module(path, "Block", calls=calls, x=(2, 4, 8), y=(2, 4, 8))
    for _ in range(calls):
        first = "up" not in d.modules.get(f"{path}.up", {"module": ""})["module"]
        for name, n_in, n_out in (("up", 8, 32), ("down", 32, 8)):
            if first:
                d.linear(f"{path}.{name}", n_in, n_out, 4)
                d.modules[f"{path}.{name}"]["class_name"] = classes
            else:
                rows = 8
                d.op(f"{path}.{name}", "mm", [[rows, n_in], [n_in, n_out]], [[rows, n_out]], weight=f"{path}.{name}.weight", flops=2 * rows * n_in * n_out)  # fmt: skip


def test_a_shared_block_counts_its_work_each_time_and_its_parameters_once(draft):
    d = draft()
    d.module("", "Shared", y=(2, 4, 8))
    block(d, "block", calls=3)
    profile = d.profile()
    workload = shape(profile)
    summary = model_summary(profile, workload)
    assert [(g["name"], g["num_repeats"], g["num_calls"]) for g in summary["layer_groups"]] == [("block", 1, 3)]
    assert workload.num_params == 2 * 8 * 32
    assert workload.model_flops * 2 == 3 * 2 * (2 * 8 * 8 * 32)
    assert workload.groups[0].boundary_bytes == 3 * 4 * 8 * 4
    assert not workload.can_tensor_parallel
    assert not workload.can_pipeline
    assert "3 times with the same weights" in summary["tp_reason"]


def test_a_weight_used_by_hand_blocks_tensor_parallelism(draft):
    d = draft()
    d.module("", "Custom", y=(2, 4, 8))
    for i in range(3):
        block(d, f"blocks.{i}")
        for name in ("up", "down"):
            d.op(f"blocks.{i}.{name}", "abs", [[32, 8]], [[32, 8]], weight=f"blocks.{i}.{name}.weight")
    profile = d.profile()
    assert not shape(profile).can_tensor_parallel
    assert "blocks.0.up.weight is not used as a plain linear layer's weight" in split_notes(profile)[0]


@pytest.mark.parametrize("between", ["second table", "nothing"])
def test_two_stacks_are_no_chain_unless_they_follow_each_other(draft, between):
    d = draft()
    d.module("", "Towers")
    for i in range(2):
        block(d, f"image.{i}")
    if between == "second table":
        d.module("words", "Embedding", layout="embedding", x=(2, 4), y=(2, 4, 8))
        d.param("words.weight", (50, 8))
        d.op("words", "embedding", [[50, 8], [2, 4]], [[2, 4, 8]], weight="words.weight")
    for i in range(2):
        block(d, f"text.{i}")
    profile = d.profile()
    assert [g.name for g in shape(profile).groups if g.num_repeats == 2] == ["image.*", "text.*"]
    assert shape(profile).can_pipeline is (between == "nothing")


def test_experts_are_not_taken_for_layers(draft):
    d = draft()
    d.module("", "Mixture")
    for i in range(2):
        d.module(f"layers.{i}", "MoELayer", x=(2, 4, 8), y=(2, 4, 8))
        d.module(f"layers.{i}.experts", "ModuleList", calls=0)
        d.linear(f"layers.{i}.router", 8, 4, 4)
        d.op(f"layers.{i}", "topk", [[8, 4]], [[8, 2], [8, 2]], op_class="reduction")
        for e in range(4):
            block(d, f"layers.{i}.experts.{e}")
    workload = shape(d.profile())
    assert [(g.name, g.num_repeats) for g in workload.groups] == [("layers.*", 2)]
    assert (workload.num_experts, workload.num_active_experts) == (4, 2)
    assert workload.groups[0].num_expert_params == 4 * 2 * 8 * 32


def test_a_repeating_pattern_of_two_blocks_is_one_repeat_of_two_layers(draft):
    d = draft()
    d.module("", "Hybrid")
    for i in range(6):
        block(d, f"layers.{i}")
        d.modules[f"layers.{i}"]["class_name"] = "Attention" if i % 2 else "Recurrence"
    profile = d.profile()
    group = shape(profile).groups[0]
    assert (group.num_repeats, group.num_layers) == (3, 2)
    assert model_summary(profile, shape(profile))["block_paths"] == [f"layers.{i}" for i in range(6)]
