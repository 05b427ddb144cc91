"""Every rule against its cases: `fires`, `silent`, `not_applicable`, and `known_miss`, which the rule ought to catch and doesn't."""

import tomllib
from pathlib import Path

import pytest

from advisor.rulebook import FACTS, evaluate, load_rules

CASES = Path(__file__).parent / "cases"
RULES = {rule.id: rule for rule in load_rules()}
STATUS = {"fires": "fired", "silent": "silent", "not_applicable": "not-applicable", "known_miss": "silent"}


def _cases():
    for path in sorted(CASES.glob("*.toml")):
        for kind, items in tomllib.loads(path.read_text(encoding="utf8")).items():
            for i, item in enumerate(items):
                yield pytest.param(path.stem, kind, item, id=f"{path.stem}-{kind}-{i}")


@pytest.mark.parametrize(("rule_id", "kind", "case"), _cases())
def test_rule(rule_id, kind, case):
    unknown = set(case["facts"]) - set(FACTS)
    assert not unknown, f"no such facts: {unknown}"
    (finding,) = evaluate([RULES[rule_id]], case["facts"])
    assert finding.status == STATUS[kind], finding.message
    for words in case.get("says", ()):
        assert words in finding.message
    assert "{" not in finding.message and finding.message
    assert bool(finding.action) == (finding.status == "fired")
    assert kind != "known_miss" or case["why"]


@pytest.mark.parametrize("rule_id", RULES)
def test_every_rule_has_a_case_that_fires_and_one_that_stays_silent(rule_id):
    path = CASES / f"{rule_id}.toml"
    assert path.exists(), f"tests/rules/cases/{rule_id}.toml is missing"
    kinds = set(tomllib.loads(path.read_text(encoding="utf8")))
    assert {"fires", "silent"} <= kinds <= set(STATUS)


def test_every_case_belongs_to_a_rule():
    assert {path.stem for path in CASES.glob("*.toml")} == set(RULES)


@pytest.mark.parametrize("rule_id", RULES)
def test_without_any_fact_a_rule_says_what_it_lacks(rule_id):
    (finding,) = evaluate([RULES[rule_id]], {})
    assert finding.status == "not-evaluated" and finding.message.startswith("not known: ")
