"""`advise explain RULE`: the rule's page, made from its file alone."""

from __future__ import annotations

import difflib
import re
import textwrap

from advisor.errors import AdvisorError
from advisor.rulebook.actions import ACTIONS
from advisor.rulebook.facts import FACTS
from advisor.rulebook.loader import Condition, Rule, load_rules, rules_by_id
from advisor.rulebook.shown import shown
from advisor.words import plural

_WIDTH = 100


def explain(rule_id: str) -> str:
    """What a rule says, why, when it fires, what to do, what holds of it, and where it is from.

    Raises:
        AdvisorError: no such rule; names the nearest.
    """
    rules = rules_by_id()
    rule = rules.get(rule_id.strip().casefold())
    if rule is None:
        near = difflib.get_close_matches(rule_id, list(rules), n=3, cutoff=0.6)
        words = {w for w in rule_id.casefold().split("-") if len(w) > 3}
        near += [r.id for r in load_rules() if words & set(r.id.split("-")) and r.id not in near][:3]
        hint = f"Nearest: {', '.join(near)}." if near else "`advise explain` lists them."
        raise AdvisorError(f'There is no rule "{rule_id}".', hint=hint)
    return _page(rule)


def _page(rule: Rule) -> str:
    sections = [
        ("What it says", [_named(rule.because)]),
        ("Why", [rule.why]),
        ("When it fires", _conditions(rule)),
        ("What to do", [ACTIONS[name] for name in rule.then]),
        ("Holds?", [rule.holds]),
        ("Source", [f"{rule.source} Confidence: {rule.confidence}. Since {rule.since}."]),
    ]
    lines = [f"{rule.id} ({rule.severity}, {rule.topic})", rule.title]
    for title, paragraphs in sections:
        lines += ["", title]
        for paragraph in paragraphs:
            lines += textwrap.wrap(paragraph, _WIDTH, initial_indent="  ", subsequent_indent="  ")
        if title == "What to do" and rule.example:
            lines += ["", textwrap.indent(rule.example, "    ")]
    return "\n".join(lines)


def _conditions(rule: Rule) -> list[str]:
    lines = [f"Applies where {_compared(c)}." for c in rule.applies]
    lines += [f"{'Fires where' if i == 0 else 'and'} {_compared(c)}." for i, c in enumerate(rule.when)]
    return lines + [f"Then, where {' and '.join(_compared(c) for c in v.when)}: {_named(v.say)}" for v in rule.verdicts]


def _compared(condition: Condition) -> str:
    """A condition with the fact's meaning, e.g. "num_nodes > 1 (nodes)"."""
    fact = FACTS[condition.fact]
    if condition.fact2:
        value = condition.fact2 if condition.times == 1.0 else f"{condition.times:g} x {condition.fact2}"
    else:
        value = shown(condition.value if condition.value is not None else "", fact.unit)
    return f"{fact.name} {condition.op} {value} ({fact.meaning})"


def _named(sentence: str) -> str:
    """A sentence with its facts as names: "{num_gpus}" -> "<num gpus>", "{num_gpus:GPU}" -> "<num gpus> GPUs"."""
    names = re.sub(r"{(\w+):([^}]+)}", lambda match: f"{{{match[1]}}} {plural(match[2])}", sentence)
    return re.sub(r"{(\w+)}", lambda match: f"<{match[1].replace('_', ' ')}>", names)
