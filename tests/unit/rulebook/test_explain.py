"""`advise explain`: every rule has a page with every section; a wrong id names the near ones."""

import pytest

from advisor.errors import AdvisorError
from advisor.rulebook import explain, load_rules
from advisor.rulebook.shown import fill, shown


@pytest.mark.parametrize("rule", load_rules(), ids=lambda rule: rule.id)
def test_every_rule_has_a_whole_page(rule):
    page = explain(rule.id)
    for section in ("What it says", "Why", "When it fires", "What to do", "Holds?", "Source"):
        assert f"\n{section}\n" in page
    assert rule.title in page and "{" not in page
    assert max(map(len, page.splitlines())) <= 100


def test_a_wrong_id_names_the_near_ones():
    with pytest.raises(AdvisorError, match="hybrid-shard-on-slow-links"):
        explain("hybrid-shards")
    with pytest.raises(AdvisorError, match="logits-dominate"):
        explain("logit-dominates")
    assert explain("Pipeline-Bubble").startswith("pipeline-bubble")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.63, "share", "63%"), (0.031, "share", "3.1%"), (0.0, "share", "0%"), (6.4e10, "bytes", "59.6 GiB"), (100.0, "bytes", "100 B"),
     (0.0123, "s", "12.3 ms"), (2.5, "s", "2.5 s"), (8e-6, "s", "8 µs"), (0.0, "s", "0 s"), (-0.25, "s", "-250 ms"), (1e11, "bytes/s", "100 GB/s"),
     (1.25e9, "bytes/s", "1.25 GB/s"), (8.03e9, "params", "8.03 B"), (12, "params", "12"), (128256, "count", "128,256"), (1920, "ratio", "1,920"),
     (True, "flag", "yes"), ("x", "text", "x")],
)  # fmt: skip
def test_units_are_written_in_one_way(value, unit, text):
    assert shown(value, unit) == text


def test_sentences_are_filled():
    assert fill("{num_gpus} GPUs at {idle_share}", {"num_gpus": 8, "idle_share": 0.5}) == "8 GPUs at 50%"


@pytest.mark.parametrize(("number", "text"), [(1, "1 process of a node"), (8, "8 processes of a node")])
def test_nouns_agree_with_their_numbers(number, text):
    assert fill("{gpus_per_node:process} of a node", {"gpus_per_node": number}) == text


def test_a_page_names_counted_facts_with_their_noun():
    assert "<gpus per node> processes of a node" in " ".join(explain("model-built-eagerly").split())
