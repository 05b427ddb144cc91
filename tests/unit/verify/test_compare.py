"""What is called equal, and what is not: records as workers leave them."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch

from advisor.verify import compare, parameters
from advisor.verify.charges import check_collectives, priced, seen
from advisor.verify.engine_run import steps_compared
from advisor.verify.verdicts import FAILED, MEASURED, NOT_HERE, PASSED
from cost_models.types import Plan

PROFILES = Path(__file__).parents[2] / "profiles"
FP32 = compare.tolerance("fp32", "fp32")
PLAN = Plan(dp_shard_degree=2, zero_stage=3)


def rank(**more) -> dict:
    """A rank that holds half of two parameters, and did everything right."""
    step = {"losses": [2.0, 4.0], "squares": {"w": 4.5, "b": 0.5}, "shards": {"w": 2, "b": 2}, "counted": False}
    equal = {"difference_norm": 0.0, "reference_norm": 3.0, "num_left_out": 0}
    return {
        "code": 0, "reason": "", "output": "step 0 loss 3.000000\n", "steps": [copy.deepcopy(step) for _ in range(3)], "world_size": 2,
        "backend": "gloo", "differences": {"w": dict(equal), "b": dict(equal)},
        "holdings": {"num_states": 10, "num_local": 5, "num_params": 10, "placements": ["(Shard(dim=0),)"], "meshes": ["(2,)"]}, **more,
    }  # fmt: skip


def alone() -> dict:
    step = {"losses": [1.0, 2.0, 4.0, 5.0], "squares": {"w": 9.0, "b": 1.0}, "shards": {"w": 1, "b": 1}}
    return {
        "code": 0,
        "steps": [step] * 3,
        "holdings": {"num_states": 20, "num_local": 10, "num_params": 10, "placements": [], "meshes": [], "shapes": [[4, 2], [2]]},
    }


def test_the_loss_of_a_step_is_the_mean_over_ranks_and_micro_batches() -> None:
    assert compare.step_losses([rank(), rank()]) == compare.step_losses([alone()]) == [3.0] * 3


def test_ranks_without_a_loss_say_nothing() -> None:
    first_stage = rank()
    for step in first_stage["steps"]:
        step["losses"] = []
    assert compare.step_losses([first_stage, rank()]) == [3.0] * 3


def test_parts_of_gradients_add_up_and_copies_count_once() -> None:
    expected = compare.gradient_norms([alone()], 2)
    assert compare.gradient_norms([rank(), rank()], 2) == pytest.approx(expected)
    copies = [rank(), rank()]
    for one in copies:
        for step in one["steps"]:
            step["squares"], step["shards"] = {"w": 9.0, "b": 1.0}, {"w": 1, "b": 1}
    assert compare.gradient_norms(copies, 2) == pytest.approx(expected)
    partitions = [rank(), rank()]
    for one, square in zip(partitions, (3.0, 7.0), strict=True):
        for step in one["steps"]:
            step["squares"], step["shards"] = {"flat AdamW 0": square}, {"flat AdamW 0": 1}
    assert compare.gradient_norms(partitions, 2) == pytest.approx(expected)


def test_printed_losses_of_both_forms_of_train_files() -> None:
    output = "step 0 loss 2.5\noptimizer step 1: loss 2.25 over the global batch\nstep 1 evaluation 9\n"
    assert compare.printed_losses([rank(output=output)], "functions") == [2.5]
    assert compare.printed_losses([rank(output=output)], "script") == [2.25]


@pytest.mark.parametrize(("found", "status"), [([3.0, 3.0], PASSED), ([3.0, 3.001], FAILED), ([3.0, float("nan")], FAILED), ([], FAILED)])
def test_a_series_fails_at_the_first_wrong_step(found: list[float], status: str) -> None:
    assert compare.check_series("losses", found, [3.0, 3.0], FP32.losses, FP32.words).status == status


def test_16_bits_may_differ_more_and_says_so() -> None:
    half = compare.tolerance("bf16", "fp32")
    assert compare.check_series("losses", [3.02], [3.0], half.losses, half.words).status == PASSED
    assert "16 bits" in half.words


def test_the_rank_that_broke_first_is_named_with_its_last_words() -> None:
    broken, ended = rank(code=1, output="Traceback\nValueError: no\n"), rank(code=-9, reason="ended because another rank failed")
    check = compare.check_runs([ended, broken], 2)
    assert (check.status, check.detail) == (FAILED, "rank 1 ended with status 1: ValueError: no")


@pytest.mark.parametrize(("taken", "compared"), [(0, 0), (1, 0), (2, 1), (3, 2), (5, 4), (9, 4)])
def test_a_short_script_is_compared_as_far_as_it_goes(taken: int, compared: int) -> None:
    assert steps_compared(4, {"steps": [{}] * taken}) == compared


def test_saved_parameters_know_their_step(tmp_path: Path) -> None:
    file = tmp_path / "reference.npz"
    assert parameters.steps_before(file) == 0
    for num_steps in (1, 2):
        parameters.save(file, [("w", torch.full((2,), float(num_steps)))], {}, num_steps=num_steps)
    assert parameters.steps_before(file) == 2
    assert parameters.differences(file, [("w", torch.full((2,), 2.0))])["w"]["difference_norm"] == 0


def test_too_few_steps_are_a_failure_of_our_own_loop_only() -> None:
    short = rank(steps=rank()["steps"][:2])
    assert compare.check_runs([short, short], 2).status == FAILED
    assert compare.check_runs([short, short], 2, ends=False).status == NOT_HERE


@pytest.mark.parametrize(
    "differences",
    [
        {"w": {"difference_norm": 0.01, "reference_norm": 3.0, "num_left_out": 0}, "b": None},
        {"w": {"difference_norm": 0.0, "reference_norm": 3.0, "num_left_out": 0}},  # b is on no rank
        {
            "w": {"difference_norm": 0.01, "reference_norm": 3.0, "num_left_out": 0},
            "b": {"difference_norm": 0.0, "reference_norm": 1.0, "num_left_out": 0},
        },
        {
            "w": {"difference_norm": float("nan"), "reference_norm": 3.0, "num_left_out": 0},
            "b": {"difference_norm": 0.0, "reference_norm": 1.0, "num_left_out": 0},
        },
    ],
)
def test_a_parameter_that_differs_is_missing_or_unknown_fails(differences: dict) -> None:
    assert compare.check_parameters([rank(), rank()], alone(), FP32).status == PASSED
    wrong = rank(differences=differences)
    other = wrong if set(differences) == {"w"} else rank()
    assert compare.check_parameters([other, wrong], alone(), FP32).status == FAILED


@pytest.mark.parametrize(("world_size", "backend"), [(1, "gloo"), (2, "nccl"), (2, "")])
def test_another_world_or_backend_fails(world_size: int, backend: str) -> None:
    assert compare.check_world([rank(), rank()], PLAN, "gloo").status == PASSED
    wrong = rank(world_size=world_size, backend=backend)
    assert compare.check_world([wrong, wrong], PLAN, "gloo").status == FAILED


def holding(states: int, params: int) -> dict:
    return rank(holdings={"num_states": states, "num_local": params, "num_params": 10, "placements": [], "meshes": []})


@pytest.mark.parametrize(
    ("plan", "ranks", "status"),
    [
        (PLAN, [(10, 5), (10, 5)], PASSED),
        (PLAN, [(20, 10), (20, 10)], FAILED),  # nothing is sharded
        (PLAN, [(10, 5), (0, 0)], FAILED),  # a shard is missing
        (Plan(dp_shard_degree=2, zero_stage=1), [(12, 10), (8, 10)], PASSED),  # whole tensors dealt out
        (Plan(dp_shard_degree=2, zero_stage=1), [(20, 10), (20, 10)], FAILED),
        (Plan(dp_replicate_degree=2), [(20, 10), (20, 10)], PASSED),
        (Plan(dp_replicate_degree=2), [(10, 5), (10, 5)], FAILED),
        (Plan(tp_degree=2), [(12, 6), (12, 6)], PASSED),  # norms and embeddings are whole on both
        (Plan(tp_degree=2), [(20, 10), (20, 10)], FAILED),
        (Plan(pp_degree=2), [(14, 7), (6, 3)], PASSED),
        (Plan(pp_degree=2), [(20, 10), (20, 10)], FAILED),
        (Plan(dp_replicate_degree=2, dp_shard_degree=2, zero_stage=3), [(10, 5)] * 4, PASSED),
    ],
)
def test_sharding_is_what_the_plan_says(plan: Plan, ranks: list[tuple[int, int]], status: str) -> None:
    assert compare.check_sharding([holding(*one) for one in ranks], alone(), plan).status == status


@pytest.mark.parametrize(
    ("zero_stage", "placements", "held", "status"),
    [
        (3, ["(Shard(dim=0),)"], (40, 24, 24, 24), PASSED),  # the single row lies on the first rank, 2 of the 6 rows on three of them
        (3, ["(Shard(dim=0),)"], (56, 24, 24, 8), FAILED),
        (3, [], (28, 28, 28, 28), PASSED),
        (3, [], (108, 4, 0, 0), FAILED),
        (1, [], (96, 16, 0, 0), PASSED),  # whole tensors
        (1, [], (112, 0, 0, 0), FAILED),
    ],
)
def test_a_rank_may_hold_what_the_shapes_bring_about(zero_stage: int, placements: list, held: tuple, status: str) -> None:
    whole = alone() | {"holdings": {"num_states": 112, "num_params": 112, "shapes": [[1, 16], [6, 16]]}}
    ranks = [
        rank(holdings={"num_states": n, "num_local": n, "num_params": 112, "placements": placements, "meshes": ["(4,)"]}) for n in held
    ]
    assert compare.check_sharding(ranks, whole, Plan(dp_shard_degree=4, zero_stage=zero_stage)).status == status


@pytest.mark.parametrize(("tied_share", "status"), [(0.3, PASSED), (0.0, FAILED)])
def test_tied_weights_may_lie_on_both_ends_of_a_pipeline(tied_share: float, status: str) -> None:
    ranks = [holding(14, 7), holding(12, 6)]
    assert compare.check_sharding(ranks, alone(), Plan(pp_degree=2), tied_share=tied_share).status == status
    assert compare.check_sharding([holding(20, 10)] * 2, alone(), Plan(pp_degree=2), tied_share=tied_share).status == FAILED


class TestCollectives:
    def counted(self, workload, plan) -> list[dict]:
        return [
            {"kind": kind, "ranks": ranks, "bytes": num_bytes / calls, "count": calls}
            for (kind, ranks), (calls, num_bytes) in priced(workload, plan).items()
        ]

    @pytest.fixture(scope="class")
    def workload(self):
        from advisor.profiling.schema import load_profile
        from advisor.workload import shape

        return shape(load_profile(PROFILES / "gpt2"))

    def test_small_ones_are_bookkeeping(self) -> None:
        rows = [{"kind": "all-reduce", "ranks": 2, "bytes": 4, "count": 3}, {"kind": "all-reduce", "ranks": 2, "bytes": 100, "count": 2}]
        assert seen({"collectives": rows}) == {("all-reduce", 2): (2, 200)}

    @pytest.mark.parametrize(
        "plan", [Plan(dp_shard_degree=2, zero_stage=3, runtime="fsdp2"), Plan(dp_replicate_degree=2, runtime="torch-ddp")]
    )
    def test_what_was_charged_passes_and_all_else_fails(self, workload, plan) -> None:
        rows = self.counted(workload, plan)
        assert check_collectives([{"collectives": rows}], workload, plan, engine="fsdp2").status == PASSED
        assert check_collectives([{"collectives": []}], workload, plan, engine="fsdp2").status == FAILED
        assert check_collectives([{}], workload, plan, engine="fsdp2").status == NOT_HERE
        for factor in (0.9, 1.2):
            other = [{**row, "bytes": factor * row["bytes"]} for row in rows]
            assert check_collectives([{"collectives": other}], workload, plan, engine="fsdp2").status == FAILED
            assert check_collectives([{"collectives": other}], workload, plan, engine="deepspeed").status == MEASURED

    def test_buffers_of_two_dtypes_are_sent_apart(self, workload) -> None:
        plan = Plan(dp_replicate_degree=2, runtime="torch-ddp")
        rows = self.counted(dataclasses.replace(workload, buffer_bytes=4096), plan)
        sent = [row for row in rows if row["kind"] == "broadcast"]
        assert [(row["count"], row["bytes"]) for row in sent] == [(1, 4096)]
        for parts, status in ((2, PASSED), (3, FAILED)):
            apart = [row for row in rows if row not in sent] + [{**sent[0], "count": parts, "bytes": 4096 / parts}]
            check = check_collectives([{"collectives": apart}], dataclasses.replace(workload, buffer_bytes=4096), plan, engine="ddp")
            assert check.status == status, check.detail

    def test_what_is_not_judged_says_why(self, workload) -> None:
        plan = Plan(dp_shard_degree=2, zero_stage=2, runtime="deepspeed-zero")
        check = check_collectives([{"collectives": []}], workload, plan, engine="deepspeed")
        assert check.status == MEASURED
        assert check.detail.endswith("not judged: this engine chooses its collectives by backend and size")

    def test_what_is_made_beside_it_is_said(self, workload) -> None:
        plan = Plan(dp_replicate_degree=2, runtime="torch-ddp")
        extra = [*self.counted(workload, plan), {"kind": "all-to-all", "ranks": 2, "bytes": 4096, "count": 1}]
        check = check_collectives([{"collectives": extra}], workload, plan, engine="ddp")
        assert check.status == PASSED
        assert "not charged: 1 all-to-all among 2 (4 KiB)" in check.detail
