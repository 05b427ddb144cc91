"""Puts the facts of a case to the rules. Every rule gives a finding; one that can't be judged says why."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from advisor.report.report import FindingEntry
from advisor.rulebook.actions import ACTIONS
from advisor.rulebook.collect import Value
from advisor.rulebook.facts import FACTS
from advisor.rulebook.loader import Condition, Rule, Verdict, placeholders
from advisor.rulebook.shown import fill, shown

_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


def evaluate(rules: Iterable[Rule], facts: Mapping[str, Value]) -> tuple[FindingEntry, ...]:
    """One finding per rule, in the rules' order.

    Args:
        rules: from `load_rules`.
        facts: from `collect_facts`.

    Returns:
        Findings with status "fired", "silent", "not-applicable" or "not-evaluated"; the message says why in each case.
    """
    return tuple(_finding(rule, facts) for rule in rules)


def _finding(rule: Rule, facts: Mapping[str, Value]) -> FindingEntry:
    status, message = _judge(rule, facts)
    severity: str = rule.severity
    then: tuple[str, ...] = ()
    if status == "fired":
        verdict = _first_verdict(rule, facts)
        message, then = fill(rule.because, facts), rule.then
        if verdict is not None:
            message = f"{message} {fill(verdict.say, facts)}"
            severity, then = verdict.severity or severity, verdict.then or then
    return FindingEntry(
        rule=rule.id, title=rule.title, status=status, severity=severity, message=message, action=" ".join(ACTIONS[name] for name in then),
        source=rule.source, confidence=rule.confidence,
    )  # fmt: skip


def _judge(rule: Rule, facts: Mapping[str, Value]) -> tuple[str, str]:
    """Status, and why it isn't fired. What is known decides first: one false condition settles a rule even where other facts lack."""
    for condition in rule.applies:
        if _holds(condition, facts) is False:
            return "not-applicable", _contrary(condition, facts)
    for condition in rule.when:
        if _holds(condition, facts) is False:
            return "silent", _contrary(condition, facts)
    missing = [name for name in rule.required_facts if name not in facts]
    return ("not-evaluated", "; ".join(_unknown(name) for name in missing)) if missing else ("fired", "")


def _first_verdict(rule: Rule, facts: Mapping[str, Value]) -> Verdict | None:
    for verdict in rule.verdicts:
        known = all(name in facts for name in placeholders(verdict.say))
        if known and all(_holds(condition, facts) for condition in verdict.when):
            return verdict
    return None


def _holds(condition: Condition, facts: Mapping[str, Value]) -> bool | None:
    """Whether a condition holds; None where a fact is missing."""
    if condition.fact not in facts or (condition.fact2 and condition.fact2 not in facts):
        return None
    other: Any = condition.value
    if condition.fact2:
        other = facts[condition.fact2]
        if isinstance(other, int | float) and condition.times != 1.0:
            other = other * condition.times
    return bool(_COMPARE[condition.op](facts[condition.fact], other))


def _contrary(condition: Condition, facts: Mapping[str, Value]) -> str:
    """Why a condition doesn't hold: the fact's value against what the rule wants."""
    fact = FACTS[condition.fact]
    have = shown(facts[condition.fact], fact.unit)
    if condition.fact2:
        factor = "" if condition.times == 1.0 else f"{condition.times:g} times "
        want = f"{factor}{condition.fact2} ({shown(facts[condition.fact2], fact.unit)})"
    else:
        want = shown(condition.value if condition.value is not None else "", fact.unit)
    return f"{fact.meaning}: {have}; the rule wants {condition.op} {want}"


def _unknown(name: str) -> str:
    fact = FACTS[name]
    return f"not known: {fact.meaning}" + (f" (needs {fact.needs})" if fact.needs else "")
