"""The modules of a plan's pipeline stages: the cut is the price's, and every parameter lies on one stage."""

from pathlib import Path

import numpy as np
import pytest

from advisor.profiling.schema import load_profile
from advisor.workload import model_summary, shape
from advisor.workload.stages import stage_modules
from cost_models.stages import stage_split
from cost_models.types import Plan

PROFILES = Path(__file__).parents[2] / "profiles"
CHAINS = pytest.mark.parametrize("name", ["gpt2", "llama3_8b", "lora_7b", "vit_finetune", "multitask_unused", "custom_autograd"])
PLANS = pytest.mark.parametrize(
    "plan",
    [
        Plan(pp_degree=2, schedule="1f1b", num_microbatches=4, runtime="torch-tp"),
        Plan(pp_degree=2, virtual_stages=2, schedule="interleaved", num_microbatches=4, runtime="torch-tp"),
        Plan(pp_degree=4, schedule="gpipe", num_microbatches=4, runtime="nanotron"),
    ],
    ids=["1f1b", "interleaved", "greedy"],
)


def lies_on(name: str, stage: list[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in stage)


@CHAINS
@PLANS
def test_every_parameter_lies_on_one_stage(name: str, plan: Plan) -> None:
    profile = load_profile(PROFILES / name)
    stages = stage_modules(profile, shape(profile), plan)
    assert len(stages) == plan.pp_degree * plan.virtual_stages
    for parameter in profile.parameters["name"]:
        assert sum(lies_on(parameter, stage) for stage in stages) == 1


@CHAINS
@PLANS
def test_stages_hold_the_layers_that_the_price_gives_them(name: str, plan: Plan) -> None:
    profile = load_profile(PROFILES / name)
    workload = shape(profile)
    blocks = model_summary(profile, workload)["block_paths"]
    stages = stage_modules(profile, workload, plan)
    assert [path for stage in stages for path in stage if path in set(blocks)] == blocks
    cut = {"torch-tp": "balanced", "nanotron": "greedy"}[plan.runtime]
    counts = stage_split(workload, len(stages), cut=cut).counts
    priced = counts @ np.array([group.num_params for group in workload.groups])
    sizes = dict(zip(profile.parameters["name"], profile.parameters["num_elements"], strict=True))
    assert [sum(size for p, size in sizes.items() if lies_on(p, stage)) for stage in stages] == pytest.approx(list(priced))


@CHAINS
def test_a_stage_ends_with_a_layer(name: str) -> None:
    profile = load_profile(PROFILES / name)
    workload = shape(profile)
    blocks = set(model_summary(profile, workload)["block_paths"])
    stages = stage_modules(profile, workload, Plan(pp_degree=4, schedule="1f1b", num_microbatches=4, runtime="torch-tp"))
    assert all(stage[-1] in blocks for stage in stages[:-1])


def test_the_workload_must_be_the_profiles() -> None:
    profile, other = load_profile(PROFILES / "gpt2"), load_profile(PROFILES / "resnet50")
    with pytest.raises(ValueError, match="the profile has 3 parts"):
        stage_modules(profile, shape(other), Plan(pp_degree=2, schedule="1f1b", runtime="torch-tp"))
