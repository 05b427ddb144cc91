"""Tensor-parallel models under gloo: they train as one process does, hold their share, and communicate as often as Megatron."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine_cells import losses, run_cells
from tensor_cells import IMPORTS, MODELS, alone_cell, probe, probe_case, train_cell

from cost_models.types import Plan


def tensor(**more) -> Plan:
    return Plan(tp_degree=2, runtime="torch-tp", **{"micro_batch": 4, **more})


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a plan and the collectives of its forward and backward pass."""

    model: str
    plan: Plan
    forward: dict[str, int]
    backward: dict[str, int]

    @property
    def name(self) -> str:
        plan = self.plan
        parts = [self.model, f"tp{plan.tp_degree}", "sequence" if plan.sequence_parallel else "", f"zero{plan.zero_stage}" if plan.zero_stage else "",
                 "replicas" if plan.dp_replicate_degree > 1 else "", plan.recompute if plan.recompute != "none" else ""]  # fmt: skip
        return "-".join(filter(None, parts))


def reduces(count: int, **more: int) -> dict[str, int]:
    return {"all-reduce": count, **more}


def gathers(count: int, reduce_scatters: int, **more: int) -> dict[str, int]:
    return {"all-gather": count, "reduce-scatter": reduce_scatters, **more}


# Two all-reduces a layer forward and two backward; a sequence split is gathered at the end (and its gradient at the start), and norms reduce their
# gradients. Recomputation repeats a layer's first, and its second where a norm follows; FSDP gathers and scatters layers and the rest once more.
SPLIT, SPLIT_SELECTIVE = {"sequence_parallel": True}, {"sequence_parallel": True, "recompute": "selective"}
TWO = (
    Case(model="nano", plan=tensor(), forward=reduces(4), backward=reduces(4)),
    Case(model="nano", plan=tensor(**SPLIT), forward=gathers(5, 4), backward=gathers(5, 4, **reduces(8))),
    Case(model="hf_gpt2", plan=tensor(recompute="full"), forward=reduces(4), backward=reduces(6)),
    Case(model="hf_gpt2", plan=tensor(**SPLIT_SELECTIVE), forward=gathers(5, 4), backward=gathers(9, 6, **reduces(8))),
    Case(model="llama", plan=tensor(), forward=reduces(8), backward=reduces(8)),
    Case(model="llama", plan=tensor(**SPLIT_SELECTIVE), forward=gathers(9, 8), backward=gathers(17, 12, **reduces(8))),
    Case(model="bert", plan=tensor(recompute="full"), forward=reduces(4), backward=reduces(8)),
    Case(model="bert", plan=tensor(**SPLIT), forward=gathers(5, 4), backward=gathers(5, 4, **reduces(8))),
    Case(model="tiny", plan=tensor(), forward=reduces(4), backward=reduces(4)),
    Case(model="tiny", plan=tensor(**SPLIT_SELECTIVE), forward=gathers(5, 4), backward=gathers(9, 6, **reduces(8))),
    Case(model="vit", plan=tensor(**SPLIT), forward=gathers(5, 4), backward=gathers(5, 4, **reduces(8))),
    # vocabulary: the table's sum and the head's gradient; logits are gathered, or cut: then three numbers a token are reduced
    Case(model="vocab_read", plan=tensor(), forward=reduces(5, **{"all-gather": 1}), backward=reduces(5)),
    Case(model="vocab", plan=tensor(), forward=reduces(8), backward=reduces(5)),
    Case(model="llama_vocab", plan=tensor(**SPLIT), forward=gathers(9, 8, **reduces(4)), backward=gathers(9, 8, **reduces(9))),
    # adapters: inputs of row adapters are summed forward, input gradients of column adapters backward
    Case(model="lora", plan=tensor(), forward=reduces(8), backward=reduces(11)),
    Case(model="lora", plan=tensor(**SPLIT), forward=gathers(13, 8), backward=gathers(8, 11, **reduces(12))),
)  # fmt: skip
SHARDED = {"dp_shard_degree": 2, "micro_batch": 2}
FOUR = (
    Case(model="nano", plan=tensor(zero_stage=3, **SHARDED), forward=reduces(4, **{"all-gather": 3}), backward=gathers(2, 3, **reduces(4))),
    Case(model="hf_gpt2", plan=tensor(zero_stage=2, **SHARDED, **SPLIT_SELECTIVE), forward=gathers(8, 4), backward=gathers(9, 9, **reduces(8))),
    Case(model="vit", plan=tensor(zero_stage=3, **SHARDED), forward=reduces(4, **{"all-gather": 3}), backward=gathers(2, 3, **reduces(4))),
    Case(model="llama", plan=tensor(zero_stage=3, **SHARDED, **SPLIT), forward=gathers(14, 8), backward=gathers(13, 13, **reduces(8))),
    Case(model="llama", plan=tensor(micro_batch=2, dp_replicate_degree=2), forward=reduces(8), backward=reduces(13)),
    Case(model="vocab", plan=tensor(zero_stage=3, **SHARDED), forward=reduces(8, **{"all-gather": 3}), backward=gathers(2, 3, **reduces(5))),
    Case(model="llama_vocab", plan=tensor(micro_batch=2, dp_replicate_degree=2), forward=reduces(12), backward=reduces(14)),
    Case(model="lora", plan=tensor(zero_stage=3, **SHARDED, **SPLIT), forward=gathers(16, 8), backward=gathers(10, 13, **reduces(12))),
    Case(model="lora", plan=tensor(micro_batch=2, dp_replicate_degree=2), forward=reduces(8), backward=reduces(13)),
    Case(model="nano", plan=tensor(zero_stage=1, **SHARDED), forward=reduces(4, **{"all-gather": 3}), backward=reduces(4, **{"reduce-scatter": 3})),
    Case(model="bert", plan=Plan(tp_degree=4, micro_batch=4, runtime="torch-tp"), forward=reduces(4), backward=reduces(4)),
)  # fmt: skip
CASES = pytest.mark.parametrize("case", TWO + FOUR, ids=lambda case: case.name)
OTHER_NUMBERS = "cut over 2 ranks, Block doesn't compute what it computes whole: its forward must take sizes from its tensors"
#: Sizes of the whole layer in the code, heads told apart by their number, a sequence of 15.
REFUSED = {
    "constant": (tensor(), OTHER_NUMBERS),
    "biased": (tensor(), OTHER_NUMBERS),
    "odd": (tensor(sequence_parallel=True), "a sequence of 15 can't be shared out evenly over 2 ranks"),
}
TRAINED = {
    "gpt2-tensor-sequence-accumulate": ("gpt2", tensor(micro_batch=2, num_microbatches=2, sequence_parallel=True, recompute="full")),
    "saves-tensor-sequence": ("saves", tensor(**SPLIT)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor")


def cases_in(folder: Path, cases: tuple[Case, ...]) -> list[dict]:
    return [probe_case(case.name, case.model, case.plan, folder) for case in cases]


@pytest.fixture(scope="module")
def probed(folder: Path) -> dict[str, list[dict]]:
    refused = [probe_case(name, name, plan, folder) for name, (plan, _) in REFUSED.items()]
    two = probe(cases_in(folder, TWO) + refused, folder, num_procs=2)
    return two | probe(cases_in(folder, FOUR), folder, num_procs=4)


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, list[dict]]:
    cells = [alone_cell(name, 4, folder) for name in ("gpt2", "saves")]
    cells += [train_cell(cell, name, plan, folder) for cell, (name, plan) in TRAINED.items()]
    return run_cells(cells, folder, num_procs=2, imports=IMPORTS)


def stem(name: str) -> str:
    return MODELS[name].script.stem


@CASES
def test_losses_are_those_of_one_process(case: Case, probed: dict[str, list[dict]]) -> None:
    alone = probed[stem(case.model)][0]["losses"]
    for rank in probed[case.name]:
        assert rank.get("error", "") == ""
        assert rank["losses"] == pytest.approx(alone, rel=1e-4)


@CASES
def test_gradient_norms_and_final_weights_are_those_of_one_process(case: Case, probed: dict[str, list[dict]]) -> None:
    alone = probed[stem(case.model)][0]
    weights, trained = defaultdict(float), {whole_name(name) for name in probed[case.name][0]["trained"]}
    for name, norm in probed[case.name][0]["weights"].items():
        weights[whole_name(name)] = math.hypot(weights[whole_name(name)], norm)
    assert trained == set(alone["trained"])
    assert weights == pytest.approx(alone["weights"], rel=1e-3, abs=1e-3)
    for rank in probed[case.name]:
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-3)


def whole_name(name: str) -> str:
    """Of a parameter that is cut product by product."""
    return re.sub(r"\.parts\.\d+", "", name)


@CASES
def test_collectives_are_two_a_layer_and_pass(case: Case, probed: dict[str, list[dict]]) -> None:
    for rank in probed[case.name]:
        assert (rank["forward"], rank["backward"], rank["step"]) == (case.forward, case.backward, {})


def cut_side(case: Case, name: str) -> int | None:
    """Which side of a layer's parameter the tensor ranks share; None for whole ones."""
    transposed = any(pair["layout"] == "in_out" for pair in MODELS[case.model].pairs) and "parts" not in name
    layer, _, kind = name.rpartition(".")
    layer = layer.split(".parts.")[0]
    for pair in MODELS[case.model].pairs:
        for end, side in (("out", 0), ("in", 1)):
            if layer.endswith(tuple(f".{name}" for name in pair.get("low_rank", {}).get(end, []))):
                return side
        if layer.endswith(tuple(f".{column}" for column in pair["column"])):
            return 1 if transposed and kind == "weight" else 0
        if layer.endswith(f".{pair['row'][0]}"):
            return None if kind == "bias" else 0 if transposed else 1
    return 0 if layer in dict(MODELS[case.model].tables) else None


@CASES
def test_ranks_hold_their_share(case: Case, probed: dict[str, list[dict]]) -> None:
    shards = case.plan.dp_shard_degree
    whole = probed[stem(case.model)][0]["held"]
    for number, rank in enumerate(probed[case.name]):
        for name, shape in rank["held"].items():
            expected = list(whole_shape(name, whole))
            side = cut_side(case, name)
            if side is not None:
                expected[side] //= case.plan.tp_degree
            if shards > 1:
                chunk = -(-expected[0] // shards)
                expected[0] = min(chunk, expected[0] - number // case.plan.tp_degree * chunk)
            assert shape == expected, name


def whole_shape(name: str, whole: dict[str, list[int]]) -> list[int]:
    """Of a parameter, or of a third of one that held q, k and v (as nn.Linear keeps it, whatever the layer did)."""
    if ".parts." not in name:
        return whole[name]
    layer, kind = name.split(".parts.")[0], name.rsplit(".", 1)[1]
    shape = whole[f"{layer}.{kind}"]
    return [max(shape) // 3, *([min(shape)] if kind == "weight" else [])]


@pytest.mark.parametrize("name", REFUSED)
def test_code_that_would_compute_something_else_is_stopped(name: str, probed: dict[str, list[dict]]) -> None:
    assert "error" not in probed[stem(name)][0]
    for rank in probed[name]:
        assert REFUSED[name][1] in rank["error"]


@pytest.mark.parametrize("cell", TRAINED)
def test_scripts_train_unchanged(cell: str, trained: dict[str, list[dict]]) -> None:
    (alone,) = trained[TRAINED[cell][0]]
    assert [rank["code"] for rank in trained[cell]] == [0, 0], trained[cell][0]["output"][-3000:]
    expected = losses(alone["output"])
    assert len(expected) == 3
    assert losses(trained[cell][0]["output"]) == pytest.approx(expected, rel=1e-4)


def test_a_script_saves_weights_as_it_names_them(trained: dict[str, list[dict]], folder: Path) -> None:
    assert [rank["code"] for rank in trained["saves-tensor-sequence"]] == [0, 0]
    alone, here = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("saves", "saves-tensor-sequence"))
    assert here.keys() == alone.keys()
    for name, weight in alone.items():
        torch.testing.assert_close(here[name], weight, rtol=1e-3, atol=2e-4)
