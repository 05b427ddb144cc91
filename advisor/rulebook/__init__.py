"""Practice as rules: data in `rules/`, put to the facts of a case; each gives a finding with its evidence."""

from advisor.rulebook.actions import ACTIONS
from advisor.rulebook.collect import collect_facts
from advisor.rulebook.evaluate import evaluate
from advisor.rulebook.explain import explain
from advisor.rulebook.facts import FACTS, HAZARDS
from advisor.rulebook.loader import Rule, load_rules

__all__ = ["ACTIONS", "FACTS", "HAZARDS", "Rule", "collect_facts", "evaluate", "explain", "load_rules"]
