"""Small models and plans for tensor parallelism, and what the profiler would tell of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from engine_cells import EXAMPLES, GPT2_ARGS, HERE, LLAMA_IMPORTS, run_cells

from advisor.engines import EngineInput, write_plan
from advisor.profiling.schema import ProfileMeta
from cost_models.types import Plan

QKV = [1, 1, 1]
IMPORTS = (*LLAMA_IMPORTS, "transformers.models.gpt2.modeling_gpt2")


def pair(column: list[str], row: str, *, parts: list[int] | None = None, **more) -> dict:
    """Facts of a pair: `parts` are the shares of the products in its first column weight."""
    shares = [parts or [1], *[[1]] * (len(column) - 1)]
    return {"column": column, "row": [row], "parts": shares, "layout": "out_in", "linear": True, "attention": False, "inner": [], **more}


def heads(column: list[str], row: str, **more) -> dict:
    return pair(column, row, attention=True, **more)


VOCAB = 96


@dataclass(frozen=True, kw_only=True)
class Model:
    script: Path
    blocks: str  # path of layer {i}
    pairs: tuple[dict, ...]
    num_layers: int = 2
    tied: tuple[str, ...] = ()
    form: str = "functions"
    args: str = ""
    loose: tuple[str, ...] = ()  # parameters beside layers
    tables: tuple[tuple[str, str], ...] = ()  # modules to cut by vocabulary, and their kinds
    vocab: int = VOCAB
    whole_logits: str = ""  # why they can't stay cut
    frozen: bool = False  # some of it is not trained


_NANO = {"script": HERE / "tensor_models" / "nano_gpt.py", "blocks": "h.{i}", "tied": ("wte.weight", "lm_head.weight"),
         "pairs": (heads(["attn.c_attn"], "attn.c_proj", parts=QKV), pair(["c_fc"], "c_proj"))}  # fmt: skip
_LLAMA = {"script": HERE / "models" / "llama_gqa.py", "blocks": "model.layers.{i}", "num_layers": 4,
          "pairs": (heads([f"self_attn.{n}_proj" for n in "qkv"], "self_attn.o_proj"), pair(["mlp.gate_proj", "mlp.up_proj"], "mlp.down_proj"))}  # fmt: skip
MODELS = {
    "tiny": Model(script=HERE / "tiny_transformer.py", blocks="layers.{i}",
                  pairs=(heads(["query", "key", "value"], "proj"), pair(["up"], "down"))),
    "lora": Model(script=HERE / "tensor_models" / "lora.py", blocks="model.layers.{i}", frozen=True,
                  pairs=(heads(["self_attn.q_proj.base_layer", "self_attn.k_proj", "self_attn.v_proj.base_layer"], "self_attn.o_proj.base_layer",
                               low_rank={"out": ["self_attn.q_proj.lora_B", "self_attn.v_proj.lora_B"], "in": ["self_attn.o_proj.lora_A"]}),
                         pair(["mlp.gate_proj.base_layer", "mlp.up_proj.base_layer"], "mlp.down_proj.base_layer",
                              low_rank={"out": ["mlp.gate_proj.lora_B", "mlp.up_proj.lora_B"], "in": ["mlp.down_proj.lora_A"]}))),
    "nano": Model(**_NANO),
    "vocab": Model(**_NANO, tables=(("wte", "embedding"), ("lm_head", "head"))),
    "vocab_read": Model(**_NANO, tables=(("wte", "embedding"), ("lm_head", "head")), whole_logits="argmax reads the logits beside the cross-entropy"),
    "hf_gpt2": Model(script=HERE / "tensor_models" / "hf_gpt2.py", blocks="transformer.h.{i}", tied=("transformer.wte.weight", "lm_head.weight"),
                     pairs=(heads(["attn.c_attn"], "attn.c_proj", parts=QKV, layout="in_out", linear=False),
                            pair(["mlp.c_fc"], "mlp.c_proj", layout="in_out", linear=False))),
    "llama": Model(**_LLAMA),
    "llama_vocab": Model(**_LLAMA, tables=(("model.embed_tokens", "embedding"), ("lm_head", "head")), vocab=128),
    "bert": Model(script=HERE / "models" / "bert.py", blocks="layer.{i}",
                  pairs=(heads([f"attention.{n}" for n in ("query", "key", "value")], "attention.dense"), pair(["intermediate"], "output"))),
    "vit": Model(script=HERE / "tensor_models" / "vit.py", blocks="layers.{i}", loose=("cls_token", "positions"),
                 pairs=(heads([f"attention.{n}" for n in "qkv"], "attention.out"), pair(["mlp.0"], "mlp.2"))),
    "gpt2": Model(script=EXAMPLES / "gpt2.py", blocks="blocks.{i}", tied=("tokens.weight", "head.weight"), form="script",
                  args=GPT2_ARGS.format(steps=3), pairs=(heads(["attention.qkv"], "attention.proj", parts=QKV), pair(["mlp.0"], "mlp.2"))),
    "saves": Model(script=HERE / "tensor_models" / "saves.py", blocks="transformer.h.{i}", tied=("transformer.wte.weight", "lm_head.weight"),
                   form="script", args="weights.pt",
                   pairs=(heads(["attn.c_attn"], "attn.c_proj", parts=QKV, layout="in_out", linear=False),
                          pair(["mlp.c_fc"], "mlp.c_proj", layout="in_out", linear=False))),
    "biased": Model(script=HERE / "tensor_models" / "biased_heads.py", blocks="h.{i}", tied=("wte.weight", "lm_head.weight"),
                    pairs=(heads(["attn.c_attn"], "attn.c_proj", parts=QKV), pair(["c_fc"], "c_proj"))),
    "odd": Model(script=HERE / "tensor_models" / "odd_sequence.py", blocks="h.{i}", tied=("wte.weight", "lm_head.weight"),
                 pairs=(heads(["attn.c_attn"], "attn.c_proj", parts=QKV), pair(["c_fc"], "c_proj"))),
    "constant": Model(script=HERE / "tensor_models" / "constant_sizes.py", blocks="h.{i}", tied=("wte.weight", "lm_head.weight"),
                      pairs=(heads(["attn.c_attn"], "attn.c_proj", parts=QKV), pair(["c_fc"], "c_proj"))),
}  # fmt: skip


def tensor_input(name: str, plan: Plan, *, precision: str = "fp32") -> EngineInput:
    """What the pipeline would hand over for a small model."""
    model = MODELS[name]
    meta = ProfileMeta(script=model.script.name, form=model.form, num_params=30_000, num_trainable_params=30_000, batch_size=4,
                       clips_gradients=model.form == "script", optimizer="adamw", param_dtype="fp32", tied=[list(model.tied)] if model.tied else [])  # fmt: skip
    facts = {
        "whole_logits": model.whole_logits,
        "block_paths": [model.blocks.format(i=i) for i in range(model.num_layers)], "tp_pairs": list(model.pairs),
        "tied": [list(model.tied)] if model.tied else [], "vocab_size": model.vocab,
        "num_params": 30_000, "num_trainable_params": 3_000 if model.frozen else 30_000, "loose_parameters": list(model.loose), "tp_tables": [{"module": module, "kind": kind, "rows": model.vocab} for module, kind in model.tables],
    }  # fmt: skip
    return EngineInput(
        plan=plan, script=str(model.script), script_args=tuple(model.args.split()), form=model.form, meta=meta, gpus_per_node=plan.world_size,
        model=facts, precision=precision,
    )  # fmt: skip


def train_cell(cell: str, name: str, plan: Plan, folder: Path, **more) -> dict:
    """Write a plan and say how to train with it."""
    inp = tensor_input(name, plan, **more)
    names = write_plan(replace(inp, engines=("tensor_parallel",)), folder / cell)
    assert "train.py" in names
    args = ["--steps", "3"] if inp.form == "functions" else [arg.replace("weights", str(folder / cell)) for arg in inp.script_args]
    return {"name": cell, "file": str(folder / cell / "train.py"), "args": args}


def probe_case(case: str, name: str, plan: Plan, folder: Path) -> dict:
    """Write a plan's parallelize.py for `tensor_probe.py`."""
    names = write_plan(replace(tensor_input(name, plan), engines=("tensor_parallel",)), folder / case)
    assert "parallelize.py" in names
    return {"name": case, "folder": str(folder / case), "script": str(MODELS[name].script), "data_ranks": plan.dp_degree}


def probe(cases: list[dict], folder: Path, *, num_procs: int) -> dict[str, list[dict]]:
    """What every rank tells of each case, and of each of their models trained whole."""
    scripts = {Path(case["script"]).stem: case["script"] for case in cases}
    spec = folder / "cases.json"
    spec.write_text(json.dumps([{"name": name, "script": script, "data_ranks": 1} for name, script in scripts.items()] + cases))
    run_cells([{"name": "probe", "file": str(HERE / "tensor_probe.py"), "args": [str(spec)]}], folder, num_procs=num_procs, imports=IMPORTS)
    found = [json.loads(Path(f"{spec}.{rank}.json").read_text()) for rank in range(num_procs)]
    return {name: [of_rank[name] for of_rank in found] for name in found[0]}


def alone_cell(name: str, batch: int, folder: Path) -> dict:
    """The same training on one process."""
    model = MODELS[name]
    if model.form == "script":
        return {"name": name, "file": str(model.script), "args": model.args.replace("weights", str(folder / name)).split(), "alone": True}
    return {"name": name, "file": str(HERE / "references.py"), "args": ["functions", str(model.script), str(batch), "1"], "alone": True}
