"""Why a plan stands where it stands: the term that decides against it, or what carries it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from advisor.search.types import Candidate
from advisor.words import counted

#: Parts of a step as people say them.
TIME_WORDS: Mapping[str, str] = {
    "compute": "compute on smaller or more pieces",
    "host_overhead": "launch and host overhead",
    "recompute": "recomputing activations",
    "tp_communication": "tensor-parallel collectives",
    "pipeline_bubble": "the pipeline bubble",
    "pipeline_p2p": "sends between stages",
    "dp_communication": "exposed gradient reduction",
    "fsdp_communication": "exposed gathering and scattering of shards",
    "optimizer": "the optimizer step",
    "offload": "optimizer offload over the host link",
    "data_loading": "copying inputs",
    "fixed": "fixed time a step",
}

#: From so many times the time on, a percentage is no longer read.
MANY_TIMES = 10
#: Below this share a gain rounds to nothing.
_NO_GAIN = 0.005
#: Less memory than this left is as good as none.
_HARDLY_BYTES = 0.1 * 2**30
#: Parts of the memory as people say them.
MEMORY_WORDS: Mapping[str, str] = {
    "optimizer": "optimizer states", "logits": "logits and loss", "gathered": "gathered parameters", "buckets": "communication buckets",
    "reserve": "the runtime's reserve", "recomputed": "recomputed activations",
}  # fmt: skip


def seconds(value_s: float) -> str:
    """Three significant digits in s or ms; whole seconds from a thousand on."""
    if value_s >= 1e3:
        return f"{value_s:,.0f} s"
    return f"{value_s:.3g} s" if value_s >= 1 else f"{value_s * 1e3:.3g} ms"


def reasons_against(candidate: Candidate, ranked: Sequence[Candidate], *, objective: str, available_bytes: float) -> tuple[str, ...]:
    """One to three short reasons, the binding one first. For the best plan itself: what makes it best.

    Args:
        candidate: the plan.
        ranked: all candidates, best first.
        objective: what is asked for.
        available_bytes: what a plan may take of a device.
    """
    best = ranked[0]
    if candidate.plan == best.plan:
        better = _better_without_files(ranked, objective)
        return (*_for_the_best(best, objective, available_bytes, "plans with files" if better else "legal plans"), *better)
    slower = candidate.estimate["step_time_s"] / best.estimate["step_time_s"] - 1
    more_bytes = candidate.estimate["peak_memory_bytes"] - best.estimate["peak_memory_bytes"]
    worse = {name: candidate.breakdown_s[name] - best.breakdown_s[name] for name in best.breakdown_s}
    term = max(worse, key=lambda name: worse[name])
    out = []
    if objective == "memory":
        gib = more_bytes / 2**30
        out.append((f"{gib:+.3g} GiB a GPU" if abs(gib) >= 0.01 else "as little memory") + f"; step {slower:+.0%}".replace("-0%", "+0%"))
    elif slower < -0.0005 and candidate.no_files:
        out.append(f"{slower:+.1%}")
    elif slower < -0.0005:
        out.append(f"{slower:+.1%}: within the error of the prices, and less simple to run")
    elif slower < 0.005:
        out.append("as fast, but " + ("more memory" if more_bytes > 0.01 * best.estimate["peak_memory_bytes"] else "less simple to run"))
    if worse[term] > 0 and slower >= 0.005:
        saved = ", part of it saved elsewhere" if worse[term] > 1.3 * slower * best.estimate["step_time_s"] else ""
        much = f"{slower:+.0%}" if 1 + slower < MANY_TIMES else f"{1 + slower:,.0f} times the time"
        out.append(f"{much}: {TIME_WORDS.get(term, term)}, {seconds(worse[term])} more{saved}")
    bubble = candidate.breakdown_s.get("pipeline_bubble", 0.0) / candidate.estimate["step_time_s"]
    if candidate.plan.pp_degree > 1 and bubble > 0.02:
        out.append(
            f"bubble {bubble:.0%} at {counted(candidate.plan.num_microbatches, 'micro-batch')} over {candidate.plan.pp_degree} stages"
        )
    if more_bytes < -(2**30) and objective != "memory":
        out.append(f"frees {-more_bytes / 2**30:.3g} GiB a GPU")
    reasons = out + _host_memory(candidate) or ["slower in sum"]
    if candidate.no_files:
        reasons[0] += f"; {candidate.no_files}"
    return tuple(reasons)


def _better_without_files(ranked: Sequence[Candidate], objective: str) -> list[str]:
    """A sentence on the plan that would lead if an engine wrote it."""
    first = ranked[0]
    measure = "high_memory_bytes" if objective == "memory" else "step_time_s"
    if first.no_files:
        return []
    better = [c for c in ranked[1:] if c.no_files and c.estimate[measure] < first.estimate[measure]]
    if not better:
        return []
    best = min(better, key=lambda c: c.estimate[measure])
    gain = 1 - best.estimate[measure] / first.estimate[measure]
    if gain < _NO_GAIN:
        return []
    return [f"{best.plan.label()} would take {gain:.0%} less {'memory' if objective == 'memory' else 'time'}, but {best.no_files}."]


def _host_memory(candidate: Candidate) -> list[str]:
    """What offloading asks of the host, which clusters rarely state."""
    if not candidate.plan.offload:
        return []
    return [f"needs {candidate.estimate['host_memory_bytes'] / 2**30:.3g} GiB of host memory a node"]


def _for_the_best(best: Candidate, objective: str, available_bytes: float, which: str) -> tuple[str, ...]:
    step = best.estimate["step_time_s"]
    useful = best.breakdown_s.get("compute", 0.0) / step
    exposed = sum(
        best.breakdown_s.get(name, 0.0) for name in ("tp_communication", "dp_communication", "fsdp_communication", "pipeline_p2p")
    )
    free = available_bytes - best.estimate["high_memory_bytes"]
    first = {
        "memory": f"the least memory, within 1%, of all {which}: {best.estimate['high_memory_bytes'] / 2**30:.3g} GiB at most",
        "gpus": "fits on the fewest GPUs",
    }.get(objective)
    return (
        *([first] if first else []),
        f"compute {useful:.0%} and exposed communication {exposed / step:.0%} of the step",
        f"{free / 2**30:.3g} GiB a GPU left even in the cautious estimate"
        if free >= _HARDLY_BYTES
        else "fits with hardly any memory to spare",
        *_host_memory(best),
    )
