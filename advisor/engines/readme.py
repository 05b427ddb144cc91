"""README.md of a plan's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from advisor.engines import launch
from advisor.engines.checks import checks, draws, normalizes_batches
from advisor.engines.common import arithmetic, unused_parameters
from advisor.engines.environment import render
from advisor.engines.scripts import ScriptFacts, read_script
from advisor.engines.types import EngineInput, Support

_DEEPSPEED = launch.DEEPSPEED_FILE
#: What an offloading plan keeps on the host, by whether parameters are sharded too.
_HOST = {False: "optimizer states", True: "parameters, gradients and optimizer states"}
#: Files that belong to no single engine.
_ABOUT = {**launch.ABOUT, "plan.json": "the plan for programs, and for `advise verify`"}
#: What stands between the user's code and torch, by form of script.
_CHANGES = {
    "script": "Nothing in your script. The train file runs it as `__main__` and stands between it and torch at four points: the optimizer's "
    "constructor (the model is parallelised there), the `DataLoader` (each rank reads its share), `backward` (losses are counted and averaged) "
    "and `torch.save` and `print` (rank 0 only{deepspeed}). Each is a short function with its reason, yours to edit.",
    "functions": "Nothing in your file: the train file calls `build_model`, `make_batch`, `loss_fn` and `build_optimizer` and holds the loop, "
    "yours to edit.",
}


def readme(
    inp: EngineInput,
    texts: Mapping[str, str],
    engines: list[Support],
    *,
    about: Mapping[str, str],
    starts: Mapping[str, str],
    refusals: Mapping[str, str],
    trains: list[str],
    script_path: str,
) -> str:
    """What the plan is, how to launch it, what was changed, how to check it."""
    lines = {**about, **_ABOUT}
    context: dict[str, Any] = {
        "label": inp.plan.label(), "script": inp.script, "form": inp.form, "plan": inp.plan, "arithmetic": arithmetic(inp.plan),
        "num_nodes": inp.num_nodes, "gpus_per_node": inp.gpus_per_node, "precision": inp.precision,
        "files": {name: lines[name] for name in texts if name in lines}, "refusals": refusals,
        "engines": [e for e in engines if not e.supported and not e.reason.startswith("there is nothing")],
        "launch": list(starts.values()), "packages": _packages(starts), "notes": _notes(inp, trains),
        "changes": _changes(inp, trains), "checks": checks(inp, script_path), "host": _HOST[inp.plan.zero_stage == 3] if inp.plan.offload else "nothing",
        "start": "From this folder" if inp.folder in {"", "."} else "From the folder in which you ran `advise`",
    }  # fmt: skip
    return render("common/README.md.j2", context)


def _packages(starts: Mapping[str, str]) -> list[str]:
    """What launch lines need beside torch, and which files those are."""
    files = {"deepspeed": _DEEPSPEED}
    return [f"`pip install {launch.PACKAGES[name]}` for `{files.get(name, f'{name}/')}`" for name in starts if name in launch.PACKAGES]


def _changes(inp: EngineInput, trains: list[str]) -> str:
    if not trains:
        return ""
    deepspeed = f"; in `{_DEEPSPEED}` DeepSpeed's own checkpoint takes the place of `torch.save`'s" if _DEEPSPEED in trains else ""
    return _CHANGES.get(inp.form, "").format(deepspeed=deepspeed)


def _notes(inp: EngineInput, trains: list[str]) -> list[str]:
    """What the user must know about this script under this plan."""
    facts = read_script(Path(inp.script))
    notes = [*_data_notes(inp, facts), *_saving_notes(inp, facts, trains)] if trains and inp.form == "script" else []
    notes += _plan_notes(inp)
    if facts.environment:
        names = ", ".join(f"`{name}`" for name in facts.environment)
        notes.append(f"The script reads environment variables: set {names} as when the plan was made, on every node.")
    return notes


def _data_notes(inp: EngineInput, facts: ScriptFacts) -> list[str]:
    """About batches, turns of the loop and printed losses of a script that is run unmodified."""
    plan, meta = inp.plan, inp.meta
    turns = max(1, plan.num_microbatches // max(meta.accumulation, 1))
    batch = f"{meta.batch_size} sample{'s' if meta.batch_size > 1 else ''}"
    alone, loads = meta.batch_size * max(meta.accumulation, 1), "DataLoader" in facts.names
    checked = (
        (plan.micro_batch != meta.batch_size,
         f"The script's forward takes {batch}, the plan wants {plan.micro_batch}. A DataLoader is given the plan's batch size; where the script "
         "draws its batches itself, change the size there (or by its arguments)."),
        (not loads or draws(facts), "Batches that the script draws itself (`torch.randint`, `torch.randn`) differ between ranks, because each rank "
         "gets its own seed once the model is built; rank 0 draws what a single process would."),
        (turns > 1, f"{turns} turns of the script's loop make one optimizer step: give it {turns} times as many turns. Clearing, "
         "clipping and learning-rate schedules wait for the last of them."),
        (True, "What the script prints is rank 0's view: losses of its micro-batch, metrics of its share of a validation set."),
        (True, "Losses must be means over the batch: gradients are averaged over ranks."),
        (True, "Checkpoints, restarts, evaluation and schedules are the script's own. No restart is added: the script's counters, the schedules that "
         "follow them and the files that it writes can't be set from outside, and would start over beside restored weights. A file that declares `build_model`, `make_batch` and `loss_fn` "
         "gets a train file with asynchronous checkpoints, restarts, evaluation, warm-up and metrics."),
        (loads and plan.global_batch > alone, f"The data set stays as it is, so an epoch has fewer optimizer steps: each takes {plan.global_batch} "
         f"samples, the script alone {alone}. Schedules that count steps end earlier."),
        (bool(facts.names) and not loads and not draws(facts) and plan.dp_degree > 1, "No `DataLoader` and no random draws are seen in the script: "
         "batches that it takes in a fixed order are the same on every rank. Let the rank (`os.environ[\"RANK\"]`) choose them."),
    )  # fmt: skip
    return [note for applies, note in checked if applies]


def _saving_notes(inp: EngineInput, facts: ScriptFacts, trains: list[str]) -> list[str]:
    """About `torch.save` and decisions that each rank takes by itself."""
    plan = inp.plan
    together = plan.zero_stage >= 2 or plan.tp_degree > 1 or _DEEPSPEED in trains
    own = "from `loss.item()`, its own micro-batch's: decide from a loss averaged over the ranks (`torch.distributed.all_reduce`)"
    where = "The script saves inside an `if`" if facts.saves_conditionally else "The script saves"
    files = " and ".join(f"`{name}`" for name in trains if name == _DEEPSPEED or plan.zero_stage >= 2 or plan.tp_degree > 1)
    checked = (
        (facts.saves and together, f"{where}: in {files} all ranks take part in `torch.save`, so all must reach it. None may decide that {own}. A rank "
         "that saves alone waits 60 s for the others, says so and stops the run."),
        (facts.saves and "train.py" in trains and plan.zero_stage >= 2 and plan.tp_degree == 1, "In `train.py` what the script saves is whole, and "
         "what it loads by `load_state_dict` is cut for the ranks: its own way to resume works."),
        (facts.saves_conditionally and "train.py" in trains and plan.zero_stage < 2 and plan.tp_degree == 1, f"{where}: rank 0 alone writes, in "
         "`train.py` also where it decides from its own micro-batch's loss."),
        (facts.saves and _DEEPSPEED in trains, f"In `{_DEEPSPEED}` `torch.save(value, NAME)` doesn't do as in the script: it writes DeepSpeed's own "
         "checkpoint into the folder `NAME.deepspeed/` and drops the value, as no rank holds whole states; a line says so each time."
         " `zero_to_fp32.py` in that folder makes whole weights of it." * (plan.zero_stage > 0)),
        (facts.breaks and plan.dp_degree > 1, "The script leaves a loop by `break`: all ranks must at the same turn, or the run hangs; none may decide "
         f"that {own}."),
        (plan.zero_stage == 1 and plan.runtime != "deepspeed", "The optimizer's states are spread over the ranks: "
         "`optimizer.state_dict()` of the script's own object is empty."),
    )  # fmt: skip
    return [note for applies, note in checked if applies]


def _plan_notes(inp: EngineInput) -> list[str]:
    """About memory, layers and the optimizer under the plan."""
    plan, meta = inp.plan, inp.meta
    unused = unused_parameters(inp.model)
    checked = (
        (plan.zero_stage >= 2 or plan.pp_degree > 1, "Every rank builds the whole model before its share is cut out, so a node needs host memory for "
         f"{inp.gpus_per_node} x {meta.num_params * _param_bytes(meta.param_dtype) / 2**30:.3g} GiB of parameters."),
        (meta.uses_checkpointing and plan.recompute == "none", "The script checkpoints activations by itself, the plan needs it not: "
         "switch it off for speed."),
        (plan.tp_degree > 1, f"Consecutive ranks form a group of {plan.tp_degree} and read the same data. Embeddings and head are whole on each of "
         "them unless the files cut them by vocabulary. PyTorch's files compare each layer with a whole copy of itself at its first call: one whose "
         "attention takes its sizes from constants, or from attributes of names unknown to `split_layers.py`, stops there and says what to change."),
        (plan.pp_degree > 1, "Stages send each other tensors of one shape, so micro-batches must be padded to one. Between stages only the hidden state "
         "crosses: a loss that is collected from many layers (balance of experts) can't be had."),
        (normalizes_batches(inp), "BatchNorm takes its statistics from each rank's micro-batch alone; below about 16 samples a GPU use "
         "`torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` before `parallelize`."),
        (bool(unused), f"{len(unused)} trainable parameters got no gradient in the profiled step: {', '.join(unused[:4])}. Freeze or remove what "
         "is never used."),
        (plan.offload, f"{_HOST[plan.zero_stage == 3].capitalize()} are on the host, and so is the optimizer's step: `fused=True` "
         "makes torch's AdamW several times faster there."),
    )  # fmt: skip
    return [note for applies, note in checked if applies]


def _param_bytes(dtype: str) -> int:
    return {"fp32": 4, "fp64": 8, "fp8": 1}.get(dtype, 2)
