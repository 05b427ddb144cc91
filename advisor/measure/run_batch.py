"""Micro-batch and accumulation of a row: stated, worked out, or a documented default."""

from __future__ import annotations

import dataclasses

import numpy as np

from advisor.measure.run_values import Fields, Skip
from cost_models import estimate
from cost_models.traits import Runtime
from cost_models.types import Cluster, Plan, PlanTable, Workload

#: Where neither batch is stated: tokens of a step of a network that reads text, and the largest micro-batch that is tried.
PRESUMED_TOKENS = 2.0**21
PRESUMED_MICRO_BATCH = 256
#: Tokens of a sequence up to which a transformer is presumed to take as many sequences at a time as fit, as BERT is trained.
SHORT_SEQUENCE = 512


def states_batch(row: Fields) -> bool:
    """Whether a row says how many samples a step has, on a data rank or in all."""
    return row.number("micro_batch") is not None or row.number("global_batch") is not None


def with_stated_batch(row: Fields, plan: Plan, runtime: Runtime) -> Plan:
    """The plan with the micro-batch and accumulation of a row that says at least how many samples one of them has.

    Raises:
        Skip: the micro-batch is no batch.
    """
    stated, total, accumulation = row.number("micro_batch"), row.number("global_batch"), row.number("grad_accum")
    if stated is not None and stated < 1:
        raise Skip(f"the micro-batch is {stated:g}")
    if total is None:
        row.assumed.append("global_batch")
        total = (stated or 1.0) * (accumulation or 1.0) * plan.dp_degree
    share = max(total / plan.dp_degree, 1.0)
    if stated is None:
        row.assumed.append("micro_batch")
        guess = share / accumulation if accumulation else _usual_micro_batch(runtime, share, plan.pp_degree)
        stated = max(guess, 1.0)
    elif runtime.splits_batch and plan.pp_degree > 1 and stated > 1:
        stated = 1.0
    micro = max(stated, 1.0)
    num_micro = max(round(share / micro), 1)
    if abs(num_micro * micro - share) / share > 0.5:
        micro = share / num_micro
    plan = dataclasses.replace(plan, micro_batch=max(round(micro), 1), num_microbatches=num_micro)
    if row.number("global_batch") is not None and plan.global_batch != total:
        row.assumed.append(f"global_batch = {plan.global_batch} (of micro-batches of {plan.micro_batch})")
    elif row.number("micro_batch") is not None and plan.micro_batch != row.number("micro_batch"):
        row.assumed.append(f"micro_batch = {plan.micro_batch}")
    return plan


def _usual_micro_batch(runtime: Runtime, share: float, pp: int) -> float:
    """Micro-batch where none is stated: eight micro-batches per pipeline stage, at most 4 samples without a pipeline."""
    if pp > 1:
        return min(share, max(1.0, share / (8 * pp)))
    return share if runtime.whole_batch else min(share, 4.0)


def with_presumed_batch(row: Fields, plan: Plan, workload: Workload) -> Plan:
    """The plan of a transformer whose row states no batch: micro-batches of one sequence, about two million tokens in a step."""
    num_micro = max(round(PRESUMED_TOKENS / (workload.tokens_per_sample * plan.dp_degree)), plan.pp_degree)
    return _named(row, dataclasses.replace(plan, micro_batch=1, num_microbatches=num_micro))


def with_fitting_micro_batch(
    row: Fields, plan: Plan, workload: Workload, cluster: Cluster, *, most: int = PRESUMED_MICRO_BATCH, accumulates: bool = False
) -> Plan:
    """The plan of a network whose row doesn't state its micro-batch: `most`, or the largest power of two below that fits the device's memory.

    Accumulation makes up the global batch; where that isn't stated either, about two million tokens if `accumulates`, else there is none.
    """
    micro, total = _largest_that_fits(plan, workload, cluster, most), row.number("global_batch")
    if total is not None:
        share = max(round(total / plan.dp_degree), 1)
        micro = min(micro, share)
        num_micro = max(round(share / micro), 1)
    elif accumulates:
        num_micro = round(PRESUMED_TOKENS / (workload.tokens_per_sample * micro * plan.dp_degree))
    else:
        num_micro = 1
    return _named(row, dataclasses.replace(plan, micro_batch=micro, num_microbatches=max(num_micro, plan.pp_degree)))


def _named(row: Fields, plan: Plan) -> Plan:
    """Says what was chosen, with its size."""
    row.assumed.append(f"micro_batch = {plan.micro_batch}")
    if row.number("global_batch") is None:
        row.assumed.append(f"global_batch = {plan.global_batch}")
    return plan


def _largest_that_fits(plan: Plan, workload: Workload, cluster: Cluster, most: int) -> int:
    sizes = (most, *(2**i for i in range((most - 1).bit_length() - 1, -1, -1)))
    tried = PlanTable.from_plans([dataclasses.replace(plan, micro_batch=n) for n in sizes])
    fits = estimate(workload, cluster, tried).high_memory_bytes <= cluster.device.memory_bytes
    return sizes[int(np.argmax(fits))] if fits.any() else 1
