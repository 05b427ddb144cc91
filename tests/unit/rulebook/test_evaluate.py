"""Findings: what fires, what stays silent, what can't be judged, and what the cost model adds."""

from advisor.rulebook import evaluate, load_rules
from advisor.rulebook.loader import Condition, Rule, Verdict


def rule(**changes):
    fields = {
        "id": "wide-load", "topic": "strategy", "title": "A wide load", "severity": "note", "confidence": "low", "since": "0.1.0", "needs": (),
        "applies": (Condition(fact="num_gpus", op=">", value=1),), "when": (Condition(fact="matmul_time_share", op=">", value=0.5),),
        "then": ("follow-ranking",), "because": "Products take {matmul_time_share}.", "verdicts": (), "why": "w", "holds": "h", "source": "s",
    }  # fmt: skip
    return Rule(**{**fields, **changes})


def finding(facts, **changes):
    (entry,) = evaluate([rule(**changes)], facts)
    return entry


def test_the_four_answers():
    assert finding({"num_gpus": 8, "matmul_time_share": 0.7}).status == "fired"
    assert finding({"num_gpus": 8, "matmul_time_share": 0.2}).status == "silent"
    assert finding({"num_gpus": 1, "matmul_time_share": 0.7}).status == "not-applicable"
    assert finding({"num_gpus": 8}).status == "not-evaluated"


def test_each_answer_says_why():
    assert finding({"num_gpus": 8, "matmul_time_share": 0.7}).message == "Products take 70%."
    assert "20%" in finding({"num_gpus": 8, "matmul_time_share": 0.2}).message
    assert "> 1" in finding({"num_gpus": 1}).message
    assert "needs an operator profile" in finding({"num_gpus": 8}).message


def test_only_a_fired_rule_tells_what_to_do():
    assert finding({"num_gpus": 8, "matmul_time_share": 0.7}).action
    assert not finding({"num_gpus": 8, "matmul_time_share": 0.2}).action


def test_a_false_condition_settles_a_rule_that_lacks_other_facts():
    when = (Condition(fact="idle_share", op=">", value=0.1), Condition(fact="matmul_time_share", op=">", value=0.5))
    assert finding({"num_gpus": 8, "matmul_time_share": 0.1}, when=when).status == "silent"


def test_two_facts_are_compared_with_a_factor():
    when = (Condition(fact="optimizer_bytes", op="<", fact2="device_memory_bytes", times=0.02),)
    facts = {"num_gpus": 8, "device_memory_bytes": 100.0, "matmul_time_share": 0.1}
    assert finding({**facts, "optimizer_bytes": 1.0}, when=when).status == "fired"
    assert finding({**facts, "optimizer_bytes": 3.0}, when=when).status == "silent"


def test_the_first_verdict_that_holds_is_added():
    verdicts = (
        Verdict(when=(Condition(fact="best_tp_plan_slowdown_share", op=">", value=0.05),), say="The model disagrees by {best_tp_plan_slowdown_share}."),
        Verdict(when=(Condition(fact="num_gpus", op=">", value=1),), say="Fallback."),
    )  # fmt: skip
    facts = {"num_gpus": 8, "matmul_time_share": 0.7}
    assert finding({**facts, "best_tp_plan_slowdown_share": 0.25}, verdicts=verdicts).message.endswith("disagrees by 25%.")
    assert finding({**facts, "best_tp_plan_slowdown_share": 0.01}, verdicts=verdicts).message.endswith("Fallback.")
    assert finding(facts, verdicts=verdicts).message.endswith("Fallback.")


def test_a_verdict_may_replace_action_and_severity():
    always = (Condition(fact="num_gpus", op=">", value=1),)
    facts = {"num_gpus": 8, "matmul_time_share": 0.7}
    plain = finding(facts)
    changed = finding(facts, verdicts=(Verdict(when=always, say="But no.", then=("use-zero-1",), severity="warning"),))
    assert (plain.severity, changed.severity) == ("note", "warning")
    assert changed.action != plain.action and "ZeRO-1" in changed.action


def test_every_shipped_rule_answers():
    entries = evaluate(load_rules(), {"num_gpus": 8})
    assert len(entries) == len(load_rules())
    assert {e.status for e in entries} <= {"fired", "silent", "not-applicable", "not-evaluated"}
    assert all(e.message for e in entries)
