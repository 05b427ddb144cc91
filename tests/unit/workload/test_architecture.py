"""What the summary tells of a model's blocks."""

from advisor.workload import shape
from advisor.workload.summary import model_summary


def test_blocks_and_what_lies_outside_are_told_apart(make_decoder):
    profile = make_decoder(tied=True)
    summary = model_summary(profile, shape(profile))
    inside, outside = summary["block_parameters"], summary["outer_parameters"]
    assert len(summary["block_classes"]) == 1
    assert all(not name.startswith("layers.") for name in (*inside, *outside))
    assert set(summary["block_modules"]) == {name.rpartition(".")[0] for name in inside}
    assert summary["outer_modules"]["embed"] == "Embedding"
    sizes = [sum(width if len(s) == 1 else s[0] * s[1] for s in shapes.values() for width in s[:1]) for shapes in (inside, outside)]
    assert 4 * sizes[0] + sizes[1] == summary["num_params"]


def test_blocks_of_several_forms_have_no_common_parameters(draft):
    d = draft()
    d.module("", "Model")
    for i, width in enumerate((16, 32)):
        d.module(f"blocks.{i}", "Block", x=(2, 4, 8), y=(2, 4, 8))
        d.linear(f"blocks.{i}.up", 8, width, 4)
        d.linear(f"blocks.{i}.down", width, 8, 4)
    summary = model_summary(d.profile(), shape(d.profile()))
    assert summary["block_parameters"] == {}
    assert summary["outer_parameters"] == {}
    assert summary["causal_attention"] is None
