"""Plans, scripts and the one start per world size in which all cells run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from advisor.engines import EngineInput, write_plan
from advisor.profiling.schema import ProfileMeta
from advisor.verify.cells import free_ports
from advisor.verify.starts import heavy_imports
from cost_models.types import Plan

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
GPT2_ARGS = "--steps {steps} --layers 2 --width 64 --heads 4 --seq 32 --batch 4 --vocab 211"
#: Imported once, before cells are forked.
TORCH_IMPORTS = ("torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.optim", "torch.distributed.pipelining",
                 "torch.distributed.tensor.parallel", "torch.profiler._cupti_monitor")  # fmt: skip
LLAMA_IMPORTS = (*TORCH_IMPORTS, "transformers.models.llama.modeling_llama")
DEEPSPEED_IMPORTS = (*LLAMA_IMPORTS, *heavy_imports(["deepspeed"]))
#: Small pictures, and enough of them in a micro-batch for batch normalisation to be well conditioned.
RESNET_ENV = {"RESNET_WIDTH": "8", "RESNET_IMAGE_SIZE": "64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A plan for a script through one engine."""

    name: str
    script: str  # key of SCRIPTS
    plan: Plan
    file: str = "train.py"
    reference: str = ""  # name of the cell that runs alone
    precision: str = "fp32"
    tolerance: float = 1e-4


def script_input(name: str, plan: Plan, *, precision: str = "fp32", folder: str = "") -> EngineInput:
    """What the pipeline would hand over for one of the four small scripts."""
    common = {"optimizer": "adamw", "param_dtype": "fp32"}
    if name == "gpt2":
        meta = ProfileMeta(script="gpt2.py", num_params=115_648, num_trainable_params=115_648, tied=[["tokens.weight", "head.weight"]],
                           batch_size=4, clips_gradients=True, **common)  # fmt: skip
        path, args, blocks = EXAMPLES / "gpt2.py", GPT2_ARGS.format(steps=3).split(), ["blocks.0", "blocks.1"]
    elif name == "llama":
        meta = ProfileMeta(
            script="llama3_8b.py", num_params=218_944, num_trainable_params=218_944, batch_size=1, clips_gradients=True, **common
        )
        path, args = EXAMPLES / "llama3_8b.py", ["--tiny", "--dtype", "float32", "--steps", "3"]
        blocks = [f"model.layers.{i}" for i in range(4)]
    elif name in {"habits", "stream"}:
        meta = ProfileMeta(script="habits.py", num_params=7_000, num_trainable_params=6_700, batch_size=8, accumulation=2, clips_gradients=True,
                           **common)  # fmt: skip
        path, args, blocks = HERE / "habits.py", [], ["blocks.0", "blocks.1", "blocks.2"]
    elif name == "never_calls":
        meta = ProfileMeta(script="never_calls.py", num_params=5, num_trainable_params=5, batch_size=2, **common | {"optimizer": "sgd"})
        path, args, blocks = HERE / "never_calls.py", [], []
    elif name == "saves_alone":
        meta = ProfileMeta(script="saves_alone.py", num_params=144, num_trainable_params=144, batch_size=2, **common)
        path, args, blocks = HERE / "saves_alone.py", ["0", "alone.pt"], ["0", "1"]
    elif name == "resnet":
        meta = ProfileMeta(script="resnet50.py", form="functions", num_params=25_557_032, num_trainable_params=25_557_032, batch_size=64,
                           optimizer="sgd", buffer_bytes=212_692)  # fmt: skip
        path, args = EXAMPLES / "resnet50.py", []
        blocks = [f"stages.{i}.{j}" for i, count in enumerate((3, 4, 6, 3)) for j in range(count)]
    else:
        meta = ProfileMeta(
            script="tiny_transformer.py", form="functions", num_params=30_000, num_trainable_params=30_000, batch_size=4, **common
        )
        path, args, blocks = HERE / "tiny_transformer.py", [], ["layers.0", "layers.1"]
    pairs = {
        "tiny": [{"column": ["query", "key", "value"], "row": ["proj"], "attention": True}, {"column": ["up"], "row": ["down"]}],
        "llama": [{"column": [f"self_attn.{n}_proj" for n in "qkv"], "row": ["self_attn.o_proj"], "attention": True},
                  {"column": ["mlp.gate_proj", "mlp.up_proj"], "row": ["mlp.down_proj"]}],
    }  # fmt: skip
    return EngineInput(
        plan=plan, script=str(path), script_args=tuple(args), form=meta.form, meta=meta, num_nodes=1, gpus_per_node=plan.world_size,
        model={"block_paths": blocks, "tp_pairs": pairs.get(name, [])}, precision=precision, folder=folder,
    )  # fmt: skip


def losses(output: str) -> list[float]:
    """Losses over the global batch that a run printed, in order."""
    over_batch = re.findall(r"loss (\S+) over the global batch", output)
    return [float(x) for x in over_batch or re.findall(r"loss (\S+)", output)]


def run_cells(cells: list[dict], folder: Path, *, num_procs: int, imports: tuple[str, ...]) -> dict[str, list[dict]]:
    """Results of all ranks by cell name."""
    for cell, port in zip(cells, free_ports(len(cells)), strict=True):
        cell["port"] = port
    spec = folder / "cells.json"
    spec.write_text(json.dumps({"out": str(folder), "cells": cells, "num_procs": num_procs, "imports": imports}))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(HERE / "harness.py"), str(spec)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {c["name"]: [_result(folder / f"{c['name']}.{rank}") for rank in range(1 if c.get("alone") else num_procs)] for c in cells}


def _result(stem: Path) -> dict:
    """What a rank left; one that was stopped left only its output."""
    done, text = Path(f"{stem}.json"), Path(f"{stem}.txt")
    if done.is_file():
        return json.loads(done.read_text())
    return {"code": -1, "steps": [], "output": text.read_text() if text.is_file() else "never started"}


def generated(cell: Cell, folder: Path) -> dict:
    """Write the cell's plan and say how to run it."""
    inp = script_input(cell.script, cell.plan, precision=cell.precision)
    names = write_plan(inp, folder / cell.name)
    assert cell.file in names
    args = ["--steps", "3"] if inp.form == "functions" else []
    turns = cell.plan.num_microbatches
    if cell.script == "gpt2":  # more turns of the loop, the same samples
        args = GPT2_ARGS.format(steps=3).split()
    elif cell.script in {"habits", "stream"}:
        args = ["--save", str(folder / f"{cell.name}.pt"), *(["--stream"] if cell.script == "stream" else [])]
    elif cell.script == "llama":
        args = ["--tiny", "--dtype", "float32", "--steps", str(3 * turns)]
    return {"name": cell.name, "file": str(folder / cell.name / cell.file), "args": args, "env": RESNET_ENV}
