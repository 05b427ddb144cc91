"""How a user checks that a plan's run computes what the script alone computes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path, PurePath

from advisor.engines.scripts import ScriptFacts, build_function, read_script
from advisor.engines.types import EngineInput

_WITHIN = "within 1e-4 in fp32, 1e-2 in 16 bits"
_DRAWS = {"randint", "randn", "rand", "randperm", "multinomial"}


def draws(facts: ScriptFacts) -> bool:
    """Whether the script draws numbers, as it would for batches of its own."""
    return bool(facts.names & _DRAWS)


def normalizes_batches(inp: EngineInput) -> bool:
    """Whether the model has batch normalization, by the profile or by the script's text."""
    seen = any(hazard.get("id") == "batch-norm" for hazard in inp.meta.hazards)
    return seen or any(name.startswith("BatchNorm") for name in read_script(Path(inp.script)).names)


def checks(inp: EngineInput, script_path: str) -> list[str]:
    """What to run alone and which lines to compare; then what must be seen of the devices."""
    plan = inp.plan
    script = script_path if inp.folder in {"", "."} else inp.script
    losses = _of_functions(inp, script) if inp.form == "functions" else _of_script(inp, script)
    if normalizes_batches(inp) and plan.dp_degree > 1:
        losses += (
            " BatchNorm's statistics are each rank's, not the global batch's, so losses differ slightly; with `SyncBatchNorm` they agree."
        )
    found = [*_verify(inp), losses, "`nvidia-smi` must show every GPU busy and the memory that the report predicts."]
    if plan.zero_stage and plan.dp_shard_degree > 1:
        layers = " of its stage" * (plan.pp_degree > 1) + " of the layers" * (plan.tp_degree > 1 and plan.pp_degree == 1)
        found.append(f"A rank's optimizer holds 1/{plan.dp_shard_degree * plan.tp_degree} of the states{layers}.")
    return found


def _verify(inp: EngineInput) -> list[str]:
    """The command that does it all on a few processes, where the folder is one of an advice."""
    folder = PurePath(inp.folder)
    number = folder.name.removeprefix("plan-")
    if not number.isdigit():
        return []
    command = f"advise verify {shlex.quote(str(folder.parent))} --plan {number}"
    return [
        f"`{command}` runs these files, shrunk to a few processes, and compares losses, gradient norms, weights, sharding and collectives with "
        "one process alone."
    ]


def _of_script(inp: EngineInput, script: str) -> str:
    facts = read_script(Path(inp.script))
    command = f"`{shlex.join(['python', script, *inp.script_args])}`"
    alone = f"{inp.plan.global_batch // max(inp.meta.accumulation, 1)}"
    per_step = f" and its {inp.meta.accumulation} backward passes a step" if inp.meta.accumulation > 1 else ""
    lines = "`optimizer step 0: loss ...` and so on, each a mean over the global batch"
    if "DataLoader" in facts.names:
        order = "the first steps' losses must agree, " + _WITHIN
        if facts.shuffles:
            order = f"with `shuffle=False` in both {order}; shuffled, the ranks see another order, and only the level of the first losses compares"
        return (
            f"Run the script alone, {command}, with a batch of {alone} (its loader's `batch_size`){per_step} and the same number of optimizer steps; "
            f"compare the losses that it prints with the lines {lines}: {order}."
        )
    if draws(facts):
        return (
            f"The script draws its own batches, differently on each rank, so losses can't agree with a single process step by step. Run {command} "
            f"and compare the level of the first loss that it prints with the line `optimizer step 0: loss ...` (a mean over the global batch)."
        )
    return (
        f"Run the script alone, {command}, with a batch of {alone}{per_step} and the same number of optimizer steps; compare the losses that it prints "
        f"with the lines {lines}: on the same samples the first steps' must agree, {_WITHIN}."
    )


def _of_functions(inp: EngineInput, script: str) -> str:
    code = (
        f"import runpy, torch; torch.manual_seed({inp.seed}); u = runpy.run_path({json.dumps(script)}); "
        f'm = u["{build_function(inp)}"](); '
        f'print(u["loss_fn"](m, u["make_batch"]({inp.plan.global_batch})).item())'
    )
    where = PurePath(script).parent
    return (
        "One process alone gives the first loss (of the whole global batch, on the CPU, as the script computes it):\n\n   ```bash\n"
        f"   PYTHONPATH={shlex.quote(str(where))} python -c {shlex.quote(code)}\n   ```\n\n"
        f"   The line `step 0 loss ...` must agree with it, {_WITHIN}; dropout is drawn differently."
    )
