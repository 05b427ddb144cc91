"""Plan of a row: its layout and batch as stated, else the plain defaults."""

from __future__ import annotations

import math

from advisor.measure.known_networks import KnownNetwork
from advisor.measure.run_batch import SHORT_SEQUENCE, states_batch, with_fitting_micro_batch, with_presumed_batch, with_stated_batch
from advisor.measure.run_sharding import recompute_of, sharding_of
from advisor.measure.run_values import Fields, Skip
from cost_models.traits import Runtime
from cost_models.types import Cluster, Plan, Workload

_MOST_SAMPLES = 10**9


def transformer_plan(row: Fields, *, runtime: Runtime, num_gpus: int, workload: Workload, cluster: Cluster) -> Plan:
    """Plan of a transformer known by its sizes; where no batch is stated, of about two million tokens.

    Raises:
        Skip: the layout or the batch is impossible.
    """
    plan = _layout(row, runtime, cluster, num_gpus, is_interleaved=True)
    _check_layout(plan, workload)
    if states_batch(row):
        return _checked(with_stated_batch(row, plan, runtime))
    if workload.seq_len <= SHORT_SEQUENCE:
        return _checked(with_fitting_micro_batch(row, plan, workload, cluster, accumulates=True))
    return _checked(with_presumed_batch(row, plan, workload))


def network_plan(
    row: Fields, *, network: KnownNetwork, runtime: Runtime, num_gpus: int, workload: Workload, cluster: Cluster
) -> Plan:  # fmt: skip
    """Plan of a network known by its name; where no micro-batch is stated, its recipe's or the largest below that fits.

    Raises:
        Skip: the layout or the batch is impossible.
    """
    plan = _layout(row, runtime, cluster, num_gpus, is_interleaved=False)
    _check_layout(plan, workload)
    if row.number("micro_batch") is None and row.number("grad_accum") is None:
        most = max(network.usual_batch // plan.dp_degree, 1) if network.shares_batch else network.usual_batch
        return _checked(with_fitting_micro_batch(row, plan, workload, cluster, most=most, accumulates=network.accumulates))
    return _checked(with_stated_batch(row, plan, runtime))


def _checked(plan: Plan) -> Plan:
    """Raises Skip where a step has more samples than any run."""
    if max(plan.global_batch, plan.micro_batch) > _MOST_SAMPLES:
        raise Skip(f"a step has {plan.global_batch:.3g} samples")
    return plan


def _check_layout(plan: Plan, workload: Workload) -> None:
    """Raises Skip where the model has less to divide than the layout divides."""
    num_layers = sum(group.num_repeats for group in workload.groups)
    if plan.pp_degree > num_layers:
        raise Skip(f"{plan.pp_degree} pipeline stages for {num_layers:g} layers")
    if plan.ep_degree > max(workload.num_experts, 1):
        raise Skip(f"{plan.ep_degree} expert ranks for {workload.num_experts} experts")
    if plan.ep_degree > plan.dp_degree * plan.tp_degree * plan.cp_degree:
        raise Skip(f"{plan.ep_degree} expert ranks in pipeline stages of {plan.dp_degree * plan.tp_degree * plan.cp_degree} GPUs")
    if plan.tp_degree > 1 and not any(group.num_tp_params for group in workload.groups):
        raise Skip("tensor parallelism finds nothing to divide in this model")


def _layout(row: Fields, runtime: Runtime, cluster: Cluster, num_gpus: int, *, is_interleaved: bool) -> Plan:
    """The row's layout, at a micro-batch of one sample."""
    tp, pp, cp, ep = (int(row.number(k) or 1) for k in ("tp", "pp", "cp", "ep"))
    if row.number("tp") is None or row.number("pp") is None:
        row.assumed.append("tp, pp")
    dp = int(row.number("dp") or max(1, num_gpus // (tp * pp * cp)))
    if dp * tp * pp * cp > num_gpus:
        raise Skip(f"the layout (dp {dp}, tp {tp}, pp {pp}, cp {cp}) needs {dp * tp * pp * cp} GPUs, the row has {num_gpus}")
    if dp * tp * pp * cp < num_gpus:
        row.assumed.append(f"n_gpus = {dp * tp * pp * cp} (of dp, tp, pp and cp)")
    sharding = sharding_of(row, runtime, dp)
    shard = math.gcd(dp, max(cluster.gpus_per_node // (tp * cp), 1)) if sharding.in_nodes else dp
    instances = int(row.number("optimizer_instances") or 1)
    if sharding.zero_stage and dp % instances == 0:
        shard = min(shard, dp // instances)
    virtual = row.number("vp")
    if virtual is None and pp > 1 and runtime.virtual_stages > 1:
        row.assumed.append("vp")
    virtual = (virtual or runtime.virtual_stages) if pp > 1 and is_interleaved else 1.0
    sequence = row.number("sequence_parallel")
    return Plan(
        dp_replicate_degree=dp // shard, dp_shard_degree=shard, tp_degree=tp, cp_degree=cp, ep_degree=ep, pp_degree=pp, virtual_stages=int(virtual),
        zero_stage=sharding.zero_stage,
        recompute=recompute_of(row),
        schedule="none" if pp == 1 else "interleaved" if virtual > 1 else "1f1b",
        sequence_parallel=tp > 1 and bool(runtime.sequence_parallel if sequence is None else sequence),
        offload=sharding.zero_stage > 0 and bool(row.number("offload")), runtime=runtime.name,
    )  # fmt: skip
