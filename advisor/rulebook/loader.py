"""Rules as data: reads `rules/<topic>/<id>.toml`, and refuses what is unknown, missing or misspelt.

    id = "convolution-dominates"            # file name; a noun phrase naming the state, no verbs, no "no-"
    title = "Convolutions take most of the device time"
    severity = "note"                       # or "warning"
    confidence = "medium"                   # high, medium or low
    since = "0.1.0"
    needs = ["best_ddp_plan_label"]         # facts without which the rule can't speak, beyond those it names
    applies = [{ fact = "num_gpus", op = ">", value = 1 }]              # else: not applicable
    when = [{ fact = "convolution_time_share", op = ">", value = 0.6 }] # all must hold
    then = ["use-data-parallel"]            # ids of advisor.rulebook.actions
    because = "Convolutions take {convolution_time_share} of the device time."
    why = "..."                             # what goes wrong, for `advise explain`
    holds = "..."                           # what of the rule of thumb is true, and what isn't
    source = "..."
    example = "..."                         # optional

    [[verdicts]]                            # optional; the first that holds is added: what the cost model says
    when = [{ fact = "best_ddp_plan_slowdown_share", op = ">", value = 0.05 }]
    say = "The cost model disagrees: {best_ddp_plan_label} takes {best_ddp_plan_slowdown_share} longer."
    then = ["follow-ranking"]               # optional: in place of the rule's own
    severity = "note"                       # optional: in place of the rule's own

A condition compares a fact with a `value` or with another fact (`fact2`, times `times`).
"""

from __future__ import annotations

import difflib
import functools
import re
import string
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from advisor.rulebook.actions import ACTIONS
from advisor.rulebook.facts import FACTS

OPERATORS = (">", ">=", "<", "<=", "==", "!=")
SEVERITIES = ("warning", "note")
CONFIDENCES = ("high", "medium", "low")
_REQUIRED = ("id", "title", "severity", "confidence", "since", "when", "then", "because", "why", "holds", "source")
_OPTIONAL = ("needs", "applies", "verdicts", "example")
#: Words that a rule's id may not begin with: it names the state, not the cure (STYLE of Lighthouse's and Ruff's rules).
_VERBS = (
    "no",
    "use",
    "avoid",
    "add",
    "set",
    "enable",
    "disable",
    "increase",
    "reduce",
    "prefer",
    "split",
    "move",
    "do",
    "dont",
    "check",
    "fix",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A fact compared with a value, or with another fact."""

    fact: str
    op: str
    value: float | str | bool | None = None
    fact2: str = ""
    times: float = 1.0  # multiplies fact2


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is added to a fired rule's message where its conditions hold."""

    when: tuple[Condition, ...]
    say: str
    then: tuple[str, ...] = ()  # replaces the rule's actions
    severity: str = ""  # replaces the rule's severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One file of `rules/`."""

    id: str
    topic: str  # its folder
    title: str
    severity: str
    confidence: str
    since: str
    needs: tuple[str, ...]
    applies: tuple[Condition, ...]
    when: tuple[Condition, ...]
    then: tuple[str, ...]
    because: str
    verdicts: tuple[Verdict, ...]
    why: str
    holds: str
    source: str
    example: str = ""

    @property
    def required_facts(self) -> tuple[str, ...]:
        """Facts that must be known before the rule can speak: of its conditions, its `needs` and its `because`."""
        named = [f for c in (*self.applies, *self.when) for f in (c.fact, c.fact2) if f]
        return tuple(dict.fromkeys([*named, *self.needs, *placeholders(self.because)]))


@functools.cache
def load_rules() -> tuple[Rule, ...]:
    """All rules that are installed, by topic and id.

    Raises:
        ValueError: a rule file is wrong; the message names file, key and the near match.
    """
    rules = [parse_rule(text, topic, name) for topic, name, text in _rule_files()]
    seen: set[str] = set()
    for rule in rules:
        if rule.id in seen:
            raise ValueError(f"two rules are called {rule.id}")
        seen.add(rule.id)
    return tuple(rules)


def _rule_files() -> Iterator[tuple[str, str, str]]:
    root = resources.files("advisor.rules")
    for topic in sorted((t for t in root.iterdir() if t.is_dir()), key=lambda t: t.name):
        for file in sorted(topic.iterdir(), key=lambda f: f.name):
            if file.name.endswith(".toml"):
                yield topic.name, file.name.removesuffix(".toml"), file.read_text(encoding="utf8")


def parse_rule(text: str, topic: str, name: str) -> Rule:
    """One rule from its TOML.

    Args:
        text: content of the file.
        topic: folder it lies in.
        name: file name without ".toml"; must be the rule's id.

    Raises:
        ValueError: unknown or missing key, fact, operator or action; the message says where and what is near.
    """
    where = f"rules/{topic}/{name}.toml"
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where}: not TOML: {error}") from error
    for key in data:
        _among(key, (*_REQUIRED, *_OPTIONAL), "key", where)
    missing = [key for key in _REQUIRED if not data.get(key)]
    if missing:
        raise ValueError(f"{where}: {', '.join(missing)} missing or empty")
    _check_id(data["id"], name, where)
    _among(data["severity"], SEVERITIES, "severity", where)
    _among(data["confidence"], CONFIDENCES, "confidence", where)
    for action in data["then"]:
        _among(action, ACTIONS, "action", where)
    for fact in data.get("needs", ()):
        _among(fact, FACTS, "fact", where)
    return Rule(
        id=data["id"], topic=topic, title=data["title"], severity=data["severity"], confidence=data["confidence"], since=data["since"],
        needs=tuple(data.get("needs", ())), applies=_conditions(data.get("applies", ()), where), when=_conditions(data["when"], where),
        then=tuple(data["then"]), because=_sentence(data["because"], where), verdicts=tuple(_verdict(v, where) for v in data.get("verdicts", ())), why=_prose(data["why"]),
        holds=_prose(data["holds"]), source=_prose(data["source"]), example=data.get("example", "").strip("\n"),
    )  # fmt: skip


def _verdict(item: Mapping[str, Any], where: str) -> Verdict:
    for key in item:
        _among(key, ("when", "say", "then", "severity"), "key of a verdict", where)
    if not item.get("when") or not item.get("say"):
        raise ValueError(f"{where}: a verdict needs when and say")
    for action in item.get("then", ()):
        _among(action, ACTIONS, "action", where)
    if "severity" in item:
        _among(item["severity"], SEVERITIES, "severity", where)
    return Verdict(
        when=_conditions(item["when"], where), say=_sentence(item["say"], where), then=tuple(item.get("then", ())),
        severity=item.get("severity", ""),
    )  # fmt: skip


def placeholders(sentence: str) -> tuple[str, ...]:
    """Names of the facts that a sentence fills in."""
    return tuple(name for _, name, _, _ in string.Formatter().parse(sentence) if name)


def _check_id(rule_id: str, name: str, where: str) -> None:
    if rule_id != name:
        raise ValueError(f"{where}: the id is {rule_id}; it must be the file's name")
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule_id):
        raise ValueError(f"{where}: an id is lower-case words joined by dashes")
    if rule_id.split("-", 1)[0] in _VERBS:
        raise ValueError(f"{where}: an id names the state of things (a noun), not what to do or what is absent")


def _conditions(items: Any, where: str) -> tuple[Condition, ...]:
    conditions = []
    for item in items:
        for key in item:
            _among(key, ("fact", "op", "value", "fact2", "times"), "key of a condition", where)
        if ("value" in item) == ("fact2" in item):
            raise ValueError(f"{where}: a condition has either value or fact2: {item}")
        condition = Condition(**item)
        for fact in filter(None, (condition.fact, condition.fact2)):
            _among(fact, FACTS, "fact", where)
        _among(condition.op, OPERATORS, "operator", where)
        _check_type(condition, where)
        conditions.append(condition)
    return tuple(conditions)


def _check_type(condition: Condition, where: str) -> None:
    unit = FACTS[condition.fact].unit
    if condition.fact2:
        if FACTS[condition.fact2].unit != unit:
            raise ValueError(f"{where}: {condition.fact} is in {unit}, {condition.fact2} in {FACTS[condition.fact2].unit}")
        return
    wanted = {"text": str, "flag": bool}.get(unit)
    is_number = isinstance(condition.value, int | float) and not isinstance(condition.value, bool)
    if not (isinstance(condition.value, wanted) if wanted else is_number):
        raise ValueError(f"{where}: {condition.fact} is a {unit}; {condition.value!r} can't be compared with it")
    if wanted and condition.op not in ("==", "!="):
        raise ValueError(f"{where}: {condition.fact} is a {unit}; compare it with == or !=")


def _sentence(text: str, where: str) -> str:
    for name in placeholders(text):
        _among(name, FACTS, "fact", where)
    return _prose(text)


def _prose(text: str) -> str:
    return " ".join(text.split())


def _among(value: str, known: Collection[str], what: str, where: str) -> None:
    if value not in known:
        near = difflib.get_close_matches(value, list(known), n=3, cutoff=0.5)
        raise ValueError(f'{where}: unknown {what} "{value}"' + (f"; near: {', '.join(near)}" if near else ""))


def rules_by_id() -> Mapping[str, Rule]:
    """Id -> rule."""
    return {rule.id: rule for rule in load_rules()}
