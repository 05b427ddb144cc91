"""How fast plans are priced and searched: `python tests/benchmarks/search.py`.

GPT-3 175B on 1,024 A100s, a usual task of such searches, over every legal plan. Prints plans per second of `cost_models.estimate` (the
fastest of some rounds, one core) for one global batch and for a million plans of many, and the seconds of a whole answer of
`advisor.search.search`, from nothing to ranked candidates. Rates are by processor time, which other jobs on the machine disturb less;
wall time stands beside it. Asserts nothing: times are a machine's, not the code's.
"""
# ruff: noqa: E402 - the number of threads must be set before numpy is imported

from __future__ import annotations

import os

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"  # one core

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable

import numpy as np

import cost_models
from advisor.measure.cluster import resolve_cluster
from advisor.search import Request, SearchResult, legal_plans, search
from cost_models.types import Cluster, Plan, PlanTable, Workload

#: The best of 506 to 788 plans per second that Calculon (calculon-ai/calculon) reached on one core when it was tried at such a task.
CALCULON_PLANS_PER_S = 788.0
WHOLE_ANSWER_S = 5.0  # what an answer may take to feel like one


def gpt3_175b() -> Workload:
    """96 layers, hidden size 12,288, 96 heads, 2,048 tokens, 51,200 words: 175 billion parameters."""
    shape = cost_models.TransformerShape(num_layers=96, hidden_size=12288, num_heads=96, seq_len=2048, vocab_size=51200)
    return cost_models.transformer_workload(shape, name="GPT-3 175B")


def best_seconds(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Processor and wall seconds, each of the fastest of some rounds."""
    taken = []
    for _ in range(rounds):
        start = time.process_time(), time.perf_counter()
        call()
        taken.append((time.process_time() - start[0], time.perf_counter() - start[1]))
    return min(processor for processor, _ in taken), min(wall for _, wall in taken)


def line(name: str, num_plans: int, seconds: tuple[float, float]) -> str:
    """One figure: seconds, rate and its ratio to the reference."""
    processor_s, wall_s = seconds
    rate = num_plans / processor_s
    ratio = rate / CALCULON_PLANS_PER_S
    return f"{name:24} {num_plans:9,} plans  {processor_s:6.3f} s (wall {wall_s:6.3f} s)  {rate:10,.0f} plans/s  {ratio:6,.0f} x Calculon's"


def report(whole: SearchResult, priced: dict[str, tuple[int, tuple[float, float]]], answer_s: tuple[float, float]) -> list[str]:
    """The figures as lines."""
    lines = [line(name, *figures) for name, figures in priced.items()]
    lines.append(
        line("whole answer", whole.num_priced, answer_s) + f", {answer_s[1] / WHOLE_ANSWER_S:.2f} x the {WHOLE_ANSWER_S:g} s allowed"
    )
    for number, candidate in enumerate(whole.candidates, 1):
        lines.append(f"  {number}. {candidate.plan.label():60} {candidate.estimate['step_time_s']:8.2f} s")
    return lines


def all_batches(workload: Workload, cluster: Cluster) -> PlanTable:
    """Over a million distinct plans: the legal ones of many global batches."""
    tables = [
        legal_plans(workload, cluster, global_batch=256 * k)
        for k in (*range(1, 17), 18, 20, 21, 24, 27, 28, 30, 32, 36, 40, 45, 48, 54, 56, 60, 64, 72)
    ]
    columns = {f.name: np.concatenate([getattr(table, f.name) for table in tables]) for f in dataclasses.fields(Plan)}
    return PlanTable(**columns, runtime_names=tables[0].runtime_names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="the fastest counts")
    parser.add_argument("--global-batch", type=int, default=1536, help="samples; 1,536 is Megatron-LM's for this model")
    options = parser.parse_args()
    workload, cluster = gpt3_175b(), resolve_cluster(gpu="a100-sxm-80gb", nodes=128)[0]
    tables = {
        "estimate, one batch": legal_plans(workload, cluster, global_batch=options.global_batch),
        "estimate, many batches": all_batches(workload, cluster),
    }  # fmt: skip
    priced = {}
    for name, plans in tables.items():
        seconds = best_seconds(functools.partial(cost_models.estimate, workload, cluster, plans), options.rounds)
        priced[name] = (len(plans), seconds)
    request = Request(workload=workload, cluster=cluster, global_batch=options.global_batch)
    answer_s = best_seconds(functools.partial(search, request), options.rounds)
    print("\n".join(report(search(request), priced, answer_s)))


if __name__ == "__main__":
    main()
