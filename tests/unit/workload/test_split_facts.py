"""What engines are told about the weights to cut: products side by side, layouts, heads, tables, and what stands in the way."""

from pathlib import Path

import pytest

from advisor.profiling.schema import load_profile
from advisor.workload import model_summary, shape
from cost_models.collectives import charged
from cost_models.types import Plan

PROFILES = Path(__file__).parents[2] / "profiles"
BATCH, SEQ, WIDTH, HEADS = 2, 4, 16, 4
HIDDEN = [BATCH, SEQ, WIDTH]


def summary(profile):
    return model_summary(profile, shape(profile))


def attention_block(d, path, columns, *, kv_heads=HEADS, between=(), classes="Linear", layout="out_in"):
    """Column weights (name -> outputs), an attention, a row weight; `between` are norms on the queries."""
    head = WIDTH // HEADS
    d.module(path, "Block", x=HIDDEN, y=HIDDEN)
    d.module(f"{path}.attn", "Attention", x=HIDDEN, y=HIDDEN)
    for name, outputs in columns.items():
        d.linear(f"{path}.attn.{name}", WIDTH, outputs, SEQ, group=1)
    for name in between:
        d.module(f"{path}.attn.{name}", "RMSNorm", x=HIDDEN, y=HIDDEN)
        d.param(f"{path}.attn.{name}.weight", (head,))
        d.op(f"{path}.attn.{name}", "native_layer_norm", [HIDDEN, [head]], [HIDDEN], weight=f"{path}.attn.{name}.weight")
    q, k = [BATCH, HEADS, SEQ, head], [BATCH, kv_heads, SEQ, head]
    d.op(
        f"{path}.attn",
        "_scaled_dot_product_flash_attention",
        [q, k, k],
        [q],
        op_class="attention",
        flops=4 * BATCH * HEADS * SEQ * SEQ * head,
    )
    d.linear(f"{path}.attn.o", WIDTH, WIDTH, SEQ)
    for name in (*columns, "o"):
        d.modules[f"{path}.attn.{name}"].update(class_name=classes, weight_layout=layout)


def attention_pair(draft, columns, **more):
    d = draft()
    d.module("", "Model")
    for i in range(3):
        attention_block(d, f"h.{i}", columns, **more)
    return summary(d.profile(num_heads=HEADS, num_kv_heads=more.get("kv_heads", HEADS)))["tp_pairs"][0]


@pytest.mark.parametrize(
    ("columns", "kv_heads", "parts"),
    [
        ({"q": 16, "k": 16, "v": 16}, 4, [[1], [1], [1]]),
        ({"qkv": 48}, 4, [[1, 1, 1]]),
        ({"qkv": 24}, 1, [[4, 1, 1]]),
        ({"query_key_value": 48}, 4, [[1]]),
        ({"q": 16, "kv": 8}, 1, [[1], [1, 1]]),
        ({"q": 16, "kv": 16}, 2, [[1], [1, 1]]),
        ({"wide": 80}, 4, [[]]),
    ],
    ids=[
        "apart",
        "fused",
        "fused with shared keys",
        "fused by head",
        "keys with values",
        "keys with values, as wide as the queries",
        "unknown",
    ],
)
def test_products_side_by_side_in_a_weight(draft, columns, kv_heads, parts):
    assert attention_pair(draft, columns, kv_heads=kv_heads)["parts"] == parts


def test_attention_and_layout_are_told_apart(draft):
    conv1d = attention_pair(draft, {"c_attn": 48}, classes="Conv1D", layout="in_out")
    assert (conv1d["attention"], conv1d["layout"], conv1d["linear"]) == (True, "in_out", False)
    linear = attention_pair(draft, {"c_attn": 48})
    assert (linear["layout"], linear["linear"], linear["inner"]) == ("out_in", True, [])


def test_a_gate_fused_with_what_it_gates(draft):
    d = draft()
    d.module("", "Model")
    for i in range(3):
        d.module(f"h.{i}", "Block", x=HIDDEN, y=HIDDEN)
        d.linear(f"h.{i}.gate_up", WIDTH, 80, SEQ)
        d.linear(f"h.{i}.down", 40, WIDTH, SEQ)
    (pair,) = summary(d.profile())["tp_pairs"]
    assert (pair["column"], pair["parts"], pair["attention"]) == (["gate_up"], [[1, 1]], False)


def test_weights_between_columns_and_rows_are_named(draft):
    assert attention_pair(draft, {"q": 16, "k": 16, "v": 16}, between=("q_norm",))["inner"] == ["attn.q_norm"]


def test_parameters_beside_layers_are_named(draft):
    d = draft()
    d.module("", "Model")
    d.param("cls_token", (1, 1, WIDTH))
    for i in range(3):
        attention_block(d, f"h.{i}", {"qkv": 48})
    found = summary(d.profile(num_heads=HEADS, num_kv_heads=HEADS))
    assert found["loose_parameters"] == ["cls_token"]
    assert [(p["column"], p["row"]) for p in found["tp_pairs"]] == [(["attn.qkv"], ["attn.o"])]


def test_blocks_without_pairs_are_not_cut():
    found = summary(load_profile(PROFILES / "vit_finetune"))
    assert found["tp_blocks"] == [f"vit.layers.{i}" for i in range(12)]
    assert "vit.embeddings" in found["block_paths"]


def test_tables_and_heads_are_listed_with_those_tied_to_them(make_decoder):
    tables = [
        {"module": "embed", "kind": "embedding", "rows": 2048},
        {"module": "head", "kind": "head", "rows": 2048},
    ]
    assert summary(make_decoder())["tp_tables"] == tables
    assert summary(make_decoder(tied=True))["tp_tables"] == tables
    assert summary(make_decoder(vocab=64))["tp_tables"] == []


def test_adapters_are_named_beside_the_weights_that_they_adapt():
    pairs = summary(load_profile(PROFILES / "lora_7b"))["tp_pairs"]
    assert pairs[0]["adapters"] == [f"self_attn.{name}_proj.{end}" for name in "koqv" for end in "AB"]  # bare parameters
    assert pairs[0]["column"] == [f"self_attn.{n}_proj.base" for n in "qkv"]


def adapted_model(draft):
    d = draft()
    d.module("", "Model")
    for i in range(3):
        path = f"h.{i}"
        d.module(path, "Block", x=HIDDEN, y=HIDDEN)
        d.module(f"{path}.attn", "Attention", x=HIDDEN, y=HIDDEN)
        for name in ("q", "k", "v"):
            adapted(d, f"{path}.attn.{name}")
        q = [BATCH, HEADS, SEQ, WIDTH // HEADS]
        d.op(f"{path}.attn", "_scaled_dot_product_flash_attention", [q, q, q], [q], op_class="attention", flops=1000)
        adapted(d, f"{path}.attn.o")
    return d.profile(num_heads=HEADS, num_kv_heads=HEADS)


def test_linear_layers_of_adapters_are_cut_with_the_weights_beside_them(draft):
    (pair,) = summary(adapted_model(draft))["tp_pairs"]
    assert pair["low_rank"] == {"out": ["attn.k.B", "attn.q.B", "attn.v.B"], "in": ["attn.o.A"]}
    assert (pair["adapters"], pair["inner"]) == ([], [])


def adapted(d, path):
    d.module(path, "Adapted", x=HIDDEN, y=HIDDEN)
    d.linear(f"{path}.base", WIDTH, WIDTH, SEQ, group=1)
    d.linear(f"{path}.A", WIDTH, 2, SEQ)
    d.linear(f"{path}.B", 2, WIDTH, SEQ)


@pytest.mark.parametrize(
    ("name", "renamed", "reason"),
    [
        ("llama3_8b", {}, ""),
        ("gpt2", {}, ""),
        ("llama3_8b", {"aten._to_copy": "aten.argmax"}, "argmax reads the logits beside the cross-entropy"),
        ("gpt2", {"aten.nll_loss_forward": "aten.mse_loss"}, "the loss is no cross-entropy of the logits"),
        ("resnet50", {}, "no head is divided by vocabulary"),
    ],
)
def test_logits_stay_divided_where_a_cross_entropy_alone_reads_them(name, renamed, reason):
    profile = load_profile(PROFILES / name)
    profile.operators["operator"] = profile.operators["operator"].astype(str).replace(renamed)
    assert summary(profile)["whole_logits"] == reason
    assert shape(profile).cuts_loss == (not reason)


def test_low_rank_sums_of_adapters_are_charged(draft):
    """One sum of outputs beside each row weight forward, one of input gradients beside each column weight backward, of two numbers a token."""
    work = shape(adapted_model(draft))
    charges = {c.purpose: c for c in charged(work, Plan(tp_degree=2, micro_batch=3, runtime="torch-tp")) if "adapters" in c.purpose}
    assert {purpose: (c.kind, c.count, c.bytes) for purpose, c in charges.items()} == {
        "adapters forward": ("all-reduce", 3, 3 * 3 * SEQ * 2 * 4),
        "adapters backward": ("all-reduce", 9, 9 * 3 * SEQ * 2 * 4),
    }
