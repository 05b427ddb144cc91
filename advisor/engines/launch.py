"""What starts a plan: the torchrun line, launch.sh, and jobs for Slurm, Kubernetes and SkyPilot."""

from __future__ import annotations

import re
import shlex
from pathlib import Path, PurePath
from typing import Any

from advisor.engines.environment import render
from advisor.engines.types import EngineInput

#: README lines of the files that are written here.
ABOUT = {
    "launch.sh": "starts it on this node",
    "launch/slurm.sbatch": "a Slurm job",
    "launch/job.yaml": "a Kubernetes Job",
    "launch/pytorchjob.yaml": "the same for the Kubeflow training operator",
    "launch/skypilot.yaml": "a SkyPilot task",
}
#: What pip must install beside torch for an engine's files, by the engine's name.
PACKAGES = {"deepspeed": "deepspeed", "accelerate": "accelerate", "trainer": "transformers accelerate", "lightning": "lightning"}
#: The one train file in a plan's own folder that needs more than torch.
DEEPSPEED_FILE = "train_deepspeed.py"
#: SkyPilot's names by beginnings of the catalogue's (`sky show-gpus`); the first that fits counts. GPUs that no cloud lends have none.
_SKYPILOT = {
    "a100-sxm-80gb": "A100-80GB", "a100-pcie-80gb": "A100-80GB", "a100-": "A100", "a10g": "A10G", "a10": "A10", "b200": "B200", "b300": "B300",
    "gb200": "GB200", "gh200": "GH200", "h100-": "H100", "h200-": "H200", "l4": "L4", "l40s": "L40S", "l40": "L40", "mi300x": "MI300X",
    "p100": "P100", "rtx-4090": "RTX4090", "rtx-5090": "RTX5090", "rtx-6000-ada": "RTX6000-Ada", "rtx-a6000": "RTXA6000", "t4": "T4",
    "v100-pcie-32gb": "V100-32GB", "v100-sxm-32gb": "V100-32GB", "v100": "V100",
}  # fmt: skip
_EXACT = {"l4", "l40", "a10", "t4"}  # beginnings of other names


def torchrun_line(inp: EngineInput, file: str | PurePath) -> str:
    """The command to paste; on several nodes it is run on each, with $HEAD_NODE naming the first."""
    if inp.num_nodes == 1:
        start = f"torchrun --standalone --nproc-per-node {inp.gpus_per_node}"
    else:
        start = (
            f"torchrun --nnodes {inp.num_nodes} --nproc-per-node {inp.gpus_per_node} --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500"
        )
    return f"{start} {shlex.quote(str(file))}"


def launch_files(inp: EngineInput, trains: list[str]) -> dict[str, str]:
    """Texts of launch.sh and the jobs by file name below the plan's folder.

    Args:
        inp: plan and script.
        trains: train files in the plan's folder, the first being the one that is started.
    """
    context = _context(inp, trains)
    names = ["launch.sh", "launch/slurm.sbatch", "launch/job.yaml", "launch/pytorchjob.yaml"]
    names += ["launch/skypilot.yaml"] if context["accelerator"] else []
    return {name: render(f"launch/{PurePath(name).name}.j2", context) for name in names}


def _context(inp: EngineInput, trains: list[str]) -> dict[str, Any]:
    folder = PurePath(inp.folder or ".")
    others = [("Worker", inp.num_nodes - 1)] if inp.num_nodes > 1 else []
    return {
        "label": inp.plan.label(), "num_nodes": inp.num_nodes, "gpus_per_node": inp.gpus_per_node, "files": trains,
        "folder": shlex.quote(str(folder)), "train": shlex.quote(str(folder / trains[0])),
        "packages": {name: PACKAGES["deepspeed"] for name in trains if name == DEEPSPEED_FILE}, "launcher": str(folder / "launch.sh"),
        "name": job_name(inp), "roles": [("Master", 1), *others], "accelerator": skypilot_name(inp.gpu),
        "gpu_resource": "amd.com/gpu" if inp.gpu.startswith("mi") else "nvidia.com/gpu",
    }  # fmt: skip


def job_name(inp: EngineInput) -> str:
    """A name that Kubernetes takes: of the script and the plan's folder, at most 40 of a-z, 0-9 and dashes, starting with a letter."""
    text = f"{Path(inp.script).stem}-{PurePath(inp.folder).name}".lower()
    return re.sub(r"[^a-z0-9]+", "-", f"train-{text}").strip("-")[:40].rstrip("-")


def skypilot_name(gpu: str) -> str:
    """SkyPilot's name of a GPU of the catalogue; "" where it has none."""
    fits = (name for start, name in _SKYPILOT.items() if (gpu == start if start in _EXACT else gpu.startswith(start)))
    return next(fits, "")
