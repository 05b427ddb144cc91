"""README.md of a plan's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from advisor.engines.common import arithmetic, unused_parameters
from advisor.engines.environment import render
from advisor.engines.launch import torchrun_line
from advisor.engines.scripts import read_script
from advisor.engines.types import EngineInput, Support

_ABOUT = {
    "parallelize.py": "`parallelize(model)` for your own loop: short, PyTorch only, made to be read",
    "train.py": "runs your script's training as the plan says",
    "ds_config.json": "the plan for DeepSpeed",
    "train_deepspeed.py": "the same training through DeepSpeed",
    "launch.sh": "starts it, by hand or through Slurm",
}
#: What stands between the user's code and torch, by form of script.
_CHANGES = {
    "script": "Nothing in your script. The train file runs it as `__main__` and stands between it and torch at four points: the optimizer's "
    "constructor (the model is parallelised there), the `DataLoader` (each rank reads its share), `backward` (losses are counted and averaged) "
    "and `torch.save` and `print` (rank 0 only). Each is a short function with its reason, yours to edit.",
    "functions": "Nothing in your file: the train file calls `build_model`, `make_batch`, `loss_fn` and `build_optimizer` and holds the loop, "
    "yours to edit.",
}


def readme(inp: EngineInput, texts: Mapping[str, str], engines: list[Support], refusals: Mapping[str, str], trains: list[str]) -> str:
    """What the plan is, how to launch it, what was changed, how to check it."""
    context: dict[str, Any] = {
        "label": inp.plan.label(), "script": inp.script, "form": inp.form, "plan": inp.plan, "arithmetic": arithmetic(inp.plan),
        "num_nodes": inp.num_nodes, "gpus_per_node": inp.gpus_per_node, "precision": inp.precision,
        "files": {name: _ABOUT[name] for name in texts if name in _ABOUT}, "refusals": refusals,
        "engines": [e for e in engines if not e.supported and not e.reason.startswith("there is nothing")],
        "launch": [torchrun_line(inp, f"{inp.folder or '.'}/{name}") for name in trains], "notes": _notes(inp, bool(trains)),
        "changes": _CHANGES.get(inp.form, "") if trains else "",
    }  # fmt: skip
    return render("common/README.md.j2", context)


def _notes(inp: EngineInput, runs: bool) -> list[str]:
    """What the user must know about this script under this plan."""
    plan, meta = inp.plan, inp.meta
    turns = max(1, plan.num_microbatches // max(meta.accumulation, 1))
    unmodified = runs and inp.form == "script"
    batch = f"{meta.batch_size} sample{'s' if meta.batch_size > 1 else ''}"
    unused = unused_parameters(inp.model)
    norm = any(name.startswith("BatchNorm") for name in read_script(Path(inp.script)).names)
    checks = (
        (unmodified and plan.micro_batch != meta.batch_size,
         f"The script's forward takes {batch}, the plan wants {plan.micro_batch}. A DataLoader is given the plan's batch size; where the script "
         "draws its batches itself, change the size there (or by its arguments)."),
        (unmodified, "Batches that the script draws itself (`torch.randint`, `torch.randn`) differ between ranks, because each rank gets its own "
         "seed once the model is built; rank 0 draws what a single process would."),
        (unmodified and turns > 1, f"{turns} turns of the script's loop make one optimizer step: give it {turns} times as many turns. Clearing, "
         "clipping and learning-rate schedules wait for the last of them."),
        (unmodified, "What the script prints is rank 0's view: losses of its micro-batch, metrics of its share of a validation set."),
        (unmodified, "Losses must be means over the batch: gradients are averaged over ranks."),
        (unmodified and plan.zero_stage == 1 and plan.runtime != "deepspeed", "The optimizer's states are spread over the ranks: "
         "`optimizer.state_dict()` of the script's own object is empty."),
        (plan.zero_stage >= 2, "Every rank builds the whole model before its share is cut out, so a node needs host memory for "
         f"{inp.gpus_per_node} x {meta.num_params * _param_bytes(meta.param_dtype) / 2**30:.3g} GiB of parameters."),
        (meta.uses_checkpointing and plan.recompute == "none", "The script checkpoints activations by itself, the plan needs it not: "
         "switch it off for speed."),
        (plan.tp_degree > 1, "Embeddings, last norm, head and loss are whole on every rank of a tensor group; only the layers are split. Consecutive "
         f"ranks form a group of {plan.tp_degree} and read the same data."),
        (norm, "BatchNorm takes its statistics from each rank's micro-batch alone; below about 16 samples a GPU use "
         "`torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` before `parallelize`."),
        (bool(unused), f"{len(unused)} trainable parameters got no gradient in the profiled step: {', '.join(unused[:4])}. Freeze or remove what "
         "is never used."),
        (plan.offload, "Optimizer states are on the host, and so is the optimizer's step: `fused=True` makes torch's AdamW several times faster "
         "there."),
    )  # fmt: skip
    return [note for applies, note in checks if applies]


def _param_bytes(dtype: str) -> int:
    return {"fp32": 4, "fp64": 8, "fp8": 1}.get(dtype, 2)
