"""The loader: what a rule file may hold, and how mistakes are told."""

import pytest

from advisor.rulebook import ACTIONS, FACTS, load_rules
from advisor.rulebook.facts import UNITS
from advisor.rulebook.loader import parse_rule

GOOD = """
id = "wide-load"
title = "A wide load"
severity = "note"
confidence = "low"
since = "0.1.0"
when = [{ fact = "matmul_time_share", op = ">", value = 0.5 }]
then = ["follow-ranking"]
because = "Products take {matmul_time_share}."
why = "Because."
holds = "Yes."
source = "A test."
"""


def test_a_good_rule_is_whole():
    rule = parse_rule(GOOD, "strategy", "wide-load")
    assert rule.topic == "strategy" and rule.required_facts == ("matmul_time_share",) and rule.verdicts == ()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [('fact = "matmul_time_share"', 'fact = "matmul_tim_share"', "near: matmul_time_share"),
     ("{matmul_time_share}", "{matmull_time_share}", "near: matmul_time_share"),
     ('"follow-ranking"', '"follow-rankings"', "near: follow-ranking"),
     ('op = ">"', 'op = "=>"', "unknown operator"), ("value = 0.5", 'value = "half"', "can't be compared"),
     ("value = 0.5", 'fact2 = "num_gpus"', "is in share, num_gpus in count"), ("value = 0.5", "valu = 0.5", "near: value"),
     ("value = 0.5", 'value = 0.5, fact2 = "num_gpus"', "either value or fact2"),
     ('severity = "note"', 'severity = "notice"', "unknown severity"), ('source = "A test."', "", "source missing"),
     ('source = "A test."', 'sauce = "A test."', "near: source"), ("wide-load", "wide-loads", "must be the file's name"),
     ('title = "A wide load"', "title = ", "not TOML"), ('title = "A wide load"', 'title = "t"\nneeds = ["num_gpu"]', "near: num_gpus")],
)  # fmt: skip
def test_mistakes_name_the_near_match(old, new, says):
    assert old in GOOD
    with pytest.raises(ValueError, match=r"rules/strategy/wide-load\.toml") as error:
        parse_rule(GOOD.replace(old, new), "strategy", "wide-load")
    assert says in str(error.value)


@pytest.mark.parametrize("name", ["use-zero", "no-bf16", "Wide-Load", "wide_load"])
def test_ids_name_a_state(name):
    with pytest.raises(ValueError, match="an id"):
        parse_rule(GOOD.replace("wide-load", name), "strategy", name)


def test_flags_take_only_equality():
    text = GOOD.replace('{ fact = "matmul_time_share", op = ">", value = 0.5 }', '{ fact = "has_bf16", op = ">", value = true }')
    with pytest.raises(ValueError, match="== or !="):
        parse_rule(text, "strategy", "wide-load")


def test_the_shipped_rules_load():
    rules = load_rules()
    assert len(rules) >= 50
    assert len({rule.id for rule in rules}) == len(rules)
    assert {"strategy", "memory", "network", "pipeline", "bottlenecks", "hazards"} <= {rule.topic for rule in rules}


def test_facts_and_actions_are_described():
    for fact in FACTS.values():
        assert fact.unit in UNITS and fact.meaning
    assert all(sentence.endswith(".") for sentence in ACTIONS.values())


def test_no_rule_promises_a_saving_of_its_own():
    # savings come from the cost model, through facts
    for rule in load_rules():
        assert "faster by" not in rule.because and "saves you" not in rule.because
