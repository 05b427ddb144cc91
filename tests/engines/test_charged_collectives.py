"""What the cost model charges as communication, and what it says each rank holds, is what generated files do on 8, 64 and 512 ranks.

Counts and bytes are linear in the number of layers (checked here), so full depth follows from one and two layers of full width.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from advisor.engines import EngineInput, ddp, fsdp2, tensor_parallel
from advisor.profiling.schema import StepProfile, load_profile
from advisor.workload import model_summary, shape
from cost_models.collectives import charged, collective_kind
from cost_models.terms.memory import memory_costs
from cost_models.types import Cluster, Device, Link, Plan, PlanTable, Workload

HERE = Path(__file__).parent
PROFILES = {"llama": "llama3_8b", "gpt2": "gpt2"}
ENGINES = {"torch-ddp": ddp, "fsdp2": fsdp2, "torch-tp": tensor_parallel}
MESH_GROUPS = {"dp_shard": "mesh_shard", "dp_replicate": "mesh_replicate", "tp": "mesh_tensor"}
LARGEST_DEVIATION = 0.02

Totals = Counter[tuple[str, str, bool]]  # by kind, group, and whether backward is running


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: str
    name: str
    plan: Plan
    layers: tuple[int, ...] = (1, 2)  # that are traced

    @property
    def id(self) -> str:
        return f"{self.model}-{self.name}-{self.plan.world_size}"


def plans(tensor_ranks: int) -> dict[str, list[Plan]]:
    """Plans on 8, 64 and 512 ranks by strategy."""
    worlds = (8, 64, 512)
    tensor = {"tp_degree": tensor_ranks, "runtime": "torch-tp"}
    both = [dict(tensor, tp_degree=min(tensor_ranks, w // 2), dp_shard_degree=w // min(tensor_ranks, w // 2), zero_stage=3) for w in worlds]
    return {
        "ddp": [Plan(dp_replicate_degree=w, runtime="torch-ddp") for w in worlds],
        "zero3": [Plan(dp_shard_degree=w, zero_stage=3, micro_batch=2, runtime="fsdp2") for w in worlds],
        "zero2": [Plan(dp_shard_degree=w, zero_stage=2, runtime="fsdp2") for w in (8, 64)],
        "hsdp": [Plan(dp_replicate_degree=w // 8 or 1, dp_shard_degree=8, zero_stage=3, runtime="fsdp2") for w in (16, 64, 512)],
        "tensor": [Plan(**tensor, micro_batch=2)],
        "sequence": [Plan(**tensor, sequence_parallel=True)],
        "tensor-fsdp": [Plan(**shards) for shards in both[::2]],
        "sequence-fsdp": [Plan(**shards, sequence_parallel=True) for shards in both[1:]],
    }


#: Further plans on few ranks, of the smaller model.
MORE = {
    "ddp-accumulate": Plan(dp_replicate_degree=8, num_microbatches=3, runtime="torch-ddp"),
    "zero1": Plan(dp_shard_degree=8, zero_stage=1, runtime="torch-ddp"),
    "zero3-accumulate-recompute": Plan(dp_shard_degree=8, zero_stage=3, num_microbatches=3, recompute="full", runtime="fsdp2"),
    "zero2-accumulate": Plan(dp_shard_degree=8, zero_stage=2, num_microbatches=3, runtime="fsdp2"),
    "hsdp-accumulate": Plan(dp_replicate_degree=2, dp_shard_degree=4, zero_stage=3, num_microbatches=3, runtime="fsdp2"),
    "tensor-recompute": Plan(tp_degree=4, recompute="full", runtime="torch-tp"),
    "sequence-selective": Plan(tp_degree=4, sequence_parallel=True, recompute="selective", num_microbatches=2, runtime="torch-tp"),
    "tensor-replicas": Plan(tp_degree=4, dp_replicate_degree=2, runtime="torch-tp"),
    "tensor-zero1": Plan(tp_degree=4, dp_shard_degree=2, zero_stage=1, num_microbatches=2, runtime="torch-tp"),
    "tensor-zero2": Plan(tp_degree=4, dp_shard_degree=2, zero_stage=2, runtime="torch-tp"),
    "tensor-hsdp": Plan(tp_degree=2, dp_shard_degree=2, dp_replicate_degree=2, zero_stage=3, runtime="torch-tp"),
}
CASES = [
    Case(model=model, name=name, plan=plan)
    for model, found in (("llama", plans(8)), ("gpt2", plans(4) | {name: [plan] for name, plan in MORE.items()}))
    for name, several in found.items()
    for plan in several
]
#: Strategies of which three layers are traced too, to see that each adds the same.
DEEPER = {"ddp-8", "zero3-64", "sequence-fsdp-64"}
CASES = [dataclasses.replace(c, layers=(1, 2, 3)) if c.id.removeprefix(f"{c.model}-") in DEEPER else c for c in CASES]


@cache
def profile(model: str) -> StepProfile:
    return load_profile(HERE.parent / "profiles" / PROFILES[model])


@cache
def workload(model: str) -> Workload:
    return shape(profile(model))


def written(case: Case, folder: Path) -> Path:
    """The files of the case's engine."""
    step, plan = profile(case.model), case.plan
    script = HERE.parents[1] / "examples" / f"{PROFILES[case.model]}.py"
    per_node = min(8, plan.world_size)
    inp = EngineInput(
        plan=plan, script=str(script), meta=step.meta, model=model_summary(step, workload(case.model)), num_nodes=plan.world_size // per_node,
        gpus_per_node=per_node, precision=workload(case.model).compute_dtype, folder="plan",
    )  # fmt: skip
    engine = ENGINES[plan.runtime]
    assert engine.supports(plan, inp.model) == ""
    folder.mkdir()
    for name, text in engine.files(inp, str(script)).items():
        (folder / Path(name).name).write_text(text)
    return folder / "parallelize.py"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Collectives and holdings by case and number of layers."""
    folder = tmp_path_factory.mktemp("worlds")
    jobs = []
    for case in CASES:
        file, plan = written(case, folder / case.id), case.plan
        jobs += [
            {"name": f"{case.id}-{n}", "file": str(file), "model": case.model, "layers": n, "seq_len": int(workload(case.model).seq_len),
             "world_size": plan.world_size, "micro_batch": plan.micro_batch, "num_microbatches": plan.num_microbatches,
             "zero1": plan.zero_stage == 1 and plan.tp_degree == 1, "reduces_once": plan.zero_stage == 1 and plan.tp_degree > 1}
            for n in case.layers
        ]  # fmt: skip
    (folder / "cases.json").write_text(json.dumps(jobs))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(HERE / "fake_world.py"), str(folder / "cases.json"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, dict] = {}
    for case in {c.plan.world_size: c for c in CASES}.values():
        results |= json.loads((folder / f"{case.plan.world_size}.json").read_text())
    return results


def counted(result: dict) -> tuple[Totals, Totals]:
    """Calls and bytes."""
    calls, sizes = Counter(), Counter()
    for call in result["calls"]:
        key = (collective_kind(call["op"]), call["group"], call["in_backward"])
        calls[key] += 1
        sizes[key] += call["bytes"]
    return calls, sizes


def expected(work: Workload, plan: Plan) -> tuple[Totals, Totals]:
    """The same by the cost model."""
    one_group = sum(d > 1 for d in (plan.dp_replicate_degree, plan.dp_shard_degree, plan.tp_degree)) == 1
    calls, sizes = Counter(), Counter()
    for c in charged(work, plan):
        # what ZeRO-1 updates is sent round after the step, or by FSDP before the next
        in_backward = not (c.purpose.endswith("forward") or c.purpose in {"parameters", "buffers"})
        key = (c.kind, "default_pg" if one_group else MESH_GROUPS[c.group], in_backward)
        calls[key] += c.count
        if c.purpose != "buffers":  # a few bytes, which the script's cast to bf16 halves
            sizes[key] += c.bytes
    return calls, sizes


def at_depth(case: Case, values: list[float]) -> float:
    """What one and two layers say of all."""
    return values[0] + (num_blocks(case.model) - 1) * (values[1] - values[0])


def num_blocks(model: str) -> int:
    return max(g.num_repeats for g in workload(model).groups)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_collectives_are_those_that_are_charged(case: Case, traced: dict[str, dict]) -> None:
    one, two = (counted(traced[f"{case.id}-{n}"]) for n in (1, 2))
    calls, sizes = expected(workload(case.model), case.plan)
    assert set(calls) == set(two[0])
    for key in calls:
        assert at_depth(case, [one[0][key], two[0][key]]) == pytest.approx(calls[key], rel=LARGEST_DEVIATION), key
        if sizes[key]:
            assert at_depth(case, [one[1][key], two[1][key]]) == pytest.approx(sizes[key], rel=LARGEST_DEVIATION), key


@pytest.mark.parametrize("case", [c for c in CASES if len(c.layers) == 3], ids=lambda c: c.id)
def test_each_layer_adds_the_same(case: Case, traced: dict[str, dict]) -> None:
    one, two, three = (counted(traced[f"{case.id}-{n}"]) for n in case.layers)
    for i in (0, 1):
        assert {key: three[i][key] - two[i][key] for key in three[i]} == {key: two[i][key] - one[i][key] for key in three[i]}


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_buckets_of_all_layers_are_those_that_are_charged(model: str, traced: dict[str, dict]) -> None:
    """Exactly, at the depths that were traced: what is left of a layer could have joined the next one's bucket."""
    for n in (1, 2, 3):
        few = tuple(dataclasses.replace(g, num_repeats=min(g.num_repeats, n)) for g in workload(model).groups)
        work = dataclasses.replace(workload(model), groups=few, num_params=sum(g.num_params * g.num_repeats for g in few))
        key = ("all-reduce", "default_pg", True)
        plan = Plan(dp_replicate_degree=8, runtime="torch-ddp")
        assert counted(traced[f"{model}-ddp-8-{n}"])[0][key] == expected(work, plan)[0][key]


def cluster(plan: Plan) -> Cluster:
    device = Device(name="gpu", memory_bytes=80e9, memory_bytes_per_s=2e12, peak_flops_per_s={"bf16": 3e14, "fp32": 2e13})
    link = Link(name="link", bytes_per_s=1e11, latency_s=1e-6)
    return Cluster(device=device, gpus_per_node=min(8, plan.world_size), num_nodes=max(plan.world_size // 8, 1), intra=link, inter=link)


def whole_gradient(case: Case) -> bool:
    """Without FSDP, DTensor's backward of an embedding that is cut by rows leaves every rank its whole gradient."""
    return case.model == "llama" and case.plan.runtime == "torch-tp" and case.plan.dp_degree == 1


@pytest.mark.parametrize("case", [c for c in CASES if c.plan.zero_stage != 1], ids=lambda c: c.id)
def test_a_rank_holds_what_the_memory_model_says(case: Case, traced: dict[str, dict]) -> None:
    one, two = (traced[f"{case.id}-{n}"]["held"] for n in (1, 2))
    work = workload(case.model)
    parts = memory_costs(work, cluster(case.plan), PlanTable.from_plans([case.plan])).parts
    for name, part in (("parameters", "parameters"), ("gradients", "gradients"), ("states", "optimizer")):
        modelled = float(parts[part][0]) - (work.resident_bytes if part == "parameters" else 0.0)
        held = at_depth(case, [one[name], two[name]])
        if part == "gradients" and whole_gradient(case):
            table = work.groups[0].num_params * work.grad_bytes
            held -= table * (1 - 1 / case.plan.tp_degree)
        assert held == pytest.approx(modelled, rel=1e-5), name
