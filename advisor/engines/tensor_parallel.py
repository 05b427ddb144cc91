"""PyTorch tensor and sequence parallelism (`parallelize_module`), with FSDP2 over the data ranks."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping
from typing import Any

from advisor.engines import common, trainfile
from advisor.engines.environment import render_python
from advisor.engines.scripts import read_script
from advisor.engines.types import EngineInput
from cost_models.types import Plan

NAME = "tensor_parallel"
TITLE = "PyTorch tensor parallelism"
#: Names in `cost_models/runtimes` that this engine is priced by.
RUNTIMES: tuple[str, ...] = ("torch-tp",)
FOLDER = ""
TRAIN_FILE = "train.py"
LAYERS_FILE, LOSS_FILE = "split_layers.py", "cut_loss.py"
ABOUT: Mapping[str, str] = {
    "parallelize.py": common.ABOUT_PARALLELIZE,
    LAYERS_FILE: "how the products of a layer are cut over a tensor group; PyTorch only, made to be read",
    LOSS_FILE: "the cross-entropy of logits that are cut by vocabulary; PyTorch only, made to be read",
    "train.py": common.ABOUT_TRAIN,
    **trainfile.ABOUT_HELPERS,
}

#: Weights by output and input side as nn.Linear and as transformers' Conv1D keep them.
_LAYOUTS = ("out_in", "in_out")


def supports(plan: Plan, model: Mapping[str, Any]) -> str:
    """Empty when the plan can be expressed, else why not."""
    if plan.tp_degree == 1:
        return "there is nothing to split"
    if plan.pp_degree > 1 or plan.cp_degree > 1 or plan.ep_degree > 1:
        return "pipelines, context and expert parallelism are not written"
    if plan.offload:
        return "with split layers no offloading is written"
    if plan.sequence_parallel and (model.get("seq_len") or 0) % plan.tp_degree:
        return f"a sequence of {int(model['seq_len'])} can't be shared out evenly over {plan.tp_degree} ranks"
    return _why_not_layers(model, plan.tp_degree) or _why_not_beside(model) or common.why_not_recompute(plan, model)


def why_not_split(model: Mapping[str, Any], tp_degree: int) -> str:
    """Why an engine that knows no more than `tensor_parallel/split.py.j2` can't cut a model over so many ranks; empty when it can."""
    loose = model.get("loose_parameters") or []
    beside = f"{common.named(loose)} belongs to a module that has layers of its own; put it into a module that holds nothing else"
    return _why_not_layers(model, tp_degree) or (beside if loose else "")


def _why_not_layers(model: Mapping[str, Any], tp_degree: int) -> str:
    pairs = model.get("tp_pairs") or []
    if not pairs:
        return str(model.get("tp_reason") or "no column and row weights are known")
    if len({(pair.get("group", ""), pair.get("unit", 0)) for pair in pairs}) > 1:
        return "its layers are of several kinds"
    return _why_not_heads(model, tp_degree) or next(filter(None, map(_why_not_cut, pairs)), "")


def _why_not_heads(model: Mapping[str, Any], tp_degree: int) -> str:
    for key, name in (("num_heads", "heads"), ("num_kv_heads", "key-value heads")):
        if (model.get(key) or 0) % tp_degree:
            return f"{model[key]} {name} can't be shared out evenly over {tp_degree} ranks"
    return ""


def _why_not_cut(pair: Mapping[str, Any]) -> str:
    """What stands against cutting a pair's weights."""
    names = [*pair["column"], *pair["row"]]
    if any("in_proj_weight" in name for name in names):
        return "nn.MultiheadAttention keeps q, k and v in a bare parameter and computes with all its heads; write it with nn.Linear layers"
    if any("experts" in name.split(".") for name in names):
        return "its experts are cut by expert parallelism, which is not written"
    if _layout(pair) not in _LAYOUTS:
        return "some of the weights to split are no nn.Linear (or transformers' Conv1D)"
    unknown = [name for name, shares in zip(pair["column"], _parts(pair), strict=True) if not shares]
    if unknown:
        return f"{unknown[0]} holds several products in one weight, and of which sizes is not known: a cut would mix them"
    if pair.get("low_rank", {}).get("out") and any(len(shares) > 1 for shares in _parts(pair)):
        return f"{pair['column'][0]} holds several products in one weight, and an adapter beside it would mix them"
    if pair.get("adapters"):
        return f"low-rank adapters ({common.named(pair['adapters'])}) are no nn.Linear layers: write them so, or shard with FSDP2"
    if pair.get("inner"):
        return f"{common.named(pair['inner'])} has weights between split layers, and each rank would train them on its own heads only"
    return ""


def _why_not_beside(model: Mapping[str, Any]) -> str:
    """Parameters that a repeated layer holds beside its modules; those outside of the layers are kept whole."""
    layers = tuple(f"{path}." for path in _blocks(model))
    inside = [name for name in model.get("loose_parameters") or [] if name.startswith(layers)]
    if inside:
        return f"{common.named(inside)} belongs to a layer that has modules of its own; put it into a module that holds nothing else"
    return ""


def _blocks(model: Mapping[str, Any]) -> list[str]:
    """The layers that are cut; other blocks, such as a vision transformer's embeddings, stay whole."""
    return list(model.get("tp_blocks") or model.get("block_paths") or [])


def _layout(pair: Mapping[str, Any]) -> str:
    return str(pair.get("layout", "out_in" if pair.get("linear", True) else ""))


def _parts(pair: Mapping[str, Any]) -> list[list[int]]:
    """Shares of the products in each column weight; where a summary doesn't say, a name may tell that there are several."""
    return pair.get("parts") or [[] if common.is_fused(name) else [1] for name in pair["column"]]


def files(inp: EngineInput, script_path: str) -> dict[str, str]:
    """parallelize.py and, where the script allows it, train.py."""
    context = _context(inp)
    texts = {
        "parallelize.py": render_python("tensor_parallel/parallelize.py.j2", context),
        LAYERS_FILE: render_python("tensor_parallel/split_layers.py.j2", context),
    }
    if context["cut_logits"]:
        texts[LOSS_FILE] = render_python("tensor_parallel/cut_loss.py.j2", {})
    extra = {name: context[name] for name in ("fused", "conv1d")}
    return texts | trainfile.train_file(inp, engine=NAME, file_name=TRAIN_FILE, script_path=script_path, extra=extra)


def _context(inp: EngineInput) -> dict[str, Any]:
    plan = inp.plan
    sharded = plan.zero_stage > 0 and plan.dp_shard_degree > 1
    replicas = plan.dp_replicate_degree if sharded else plan.dp_degree
    data = [("replicate", replicas)] if replicas > 1 else []
    dtype, vocabulary = common.half_dtype(inp), vocabulary_tables(inp)
    # FSDP brings the precision too, so that even one data rank may need it
    data += [("shard", plan.dp_shard_degree if sharded else 1)] if plan.dp_degree > 1 or dtype else []
    names, sizes = zip(*data, ("tensor", plan.tp_degree), strict=True)
    recompute = "none" if inp.meta.uses_checkpointing else plan.recompute
    kinds = f"{plan.tp_degree} ranks split every layer" + (" and its sequence" if plan.sequence_parallel else "")
    over = f"; {'parameters' if sharded else 'copies'} over {plan.dp_degree} data ranks" if plan.dp_degree > 1 else ""
    return {
        "title": f"Tensor parallelism: {kinds}{over}.", "summary": f"Cut the layers over {plan.tp_degree} ranks{_then(plan, sharded)}.",
        "block_patterns": common.block_patterns({"block_paths": _blocks(inp.model)}), "needs_blocks": True, "recompute": recompute,
        "checkpointed": common.checkpointed("block", recompute),
        **split_context(inp.model, sequence_parallel=plan.sequence_parallel),
        "tied": bool(inp.model.get("tied")), "beside": bool(inp.model.get("loose_parameters")), "vocabulary": vocabulary,
        **loss_context(inp, vocabulary), "mesh_shape": sizes, "mesh_names": names,
        "data_mesh": (names[0] if len(data) == 1 else tuple(name for name, _ in data)) if data else "",
        "keeps_gathered": bool(data) and plan.zero_stage != 3, "param_dtype": dtype, "precision": inp.precision,
        "kept_reason": "layers stay gathered from forward to backward" if sharded else "copies are whole: nothing to gather again",
        "fp32_scores": bool(dtype) and not read_script(trainfile.script_file(inp)).computes_own_loss,
    }  # fmt: skip


def vocabulary_tables(inp: EngineInput) -> list[Mapping[str, Any]]:
    """Tables and heads to cut by rows of the vocabulary: all or none, and only if no rank's shard is smaller than another's."""
    tables = [t for t in inp.model.get("tp_tables") or [] if t["kind"] == "head" or t["rows"] == inp.model.get("vocab_size")]
    ranks = inp.plan.tp_degree * inp.plan.dp_shard_degree
    return tables if all(table["rows"] % ranks == 0 for table in tables) else []


def loss_context(inp: EngineInput, vocabulary: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether logits stay cut by vocabulary until the loss, and why not where a head is cut."""
    has_head = any(table["kind"] == "head" for table in vocabulary)
    reason = str(inp.model.get("whole_logits", "what reads them is not known"))
    if not reason and _imports_loss_by_name(inp):
        reason = "the script imports cross_entropy by name, where it can't be exchanged"
    return {"has_head": has_head, "cut_logits": has_head and not reason, "whole_reason": reason if has_head else ""}


def _imports_loss_by_name(inp: EngineInput) -> bool:
    try:
        tree = ast.parse(trainfile.script_file(inp).read_text(encoding="utf8"))
    except (OSError, SyntaxError, ValueError):
        return False
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "torch.nn.functional"]
    return any(alias.name == "cross_entropy" for node in imports for alias in node.names)


def split_context(model: Mapping[str, Any], *, sequence_parallel: bool) -> dict[str, Any]:
    """What `tensor_parallel/split.py.j2` is filled with."""
    pairs = model["tp_pairs"]
    holders = {pair["column"][0]: home for pair in pairs if pair.get("attention") and (home := _holder(pair)) is not None}
    low_rank = {end: [name for pair in pairs for name in pair.get("low_rank", {}).get(end, [])] for end in ("out", "in")}
    return {
        "pairs": [{"column": list(p["column"]), "row": list(p["row"])} for p in pairs], "conv1d": _layout(pairs[0]) == "in_out",
        "attention": holders, "narrows": any(holders.values()), "low_rank": low_rank,
        "fused": {name: tuple(shares) for p in pairs for name, shares in zip(p["column"], _parts(p), strict=True) if len(shares) > 1},
        "frozen": model.get("num_trainable_params") != model.get("num_params"),
        "sequence_parallel": sequence_parallel, "stream": "Shard(1)" if sequence_parallel else "Replicate()",
    }  # fmt: skip


def _holder(pair: Mapping[str, Any]) -> str | None:
    """The module that holds the columns of a pair; adapters around each of them don't count. None where there are several."""
    homes = set()
    for column in pair["column"]:
        home = column.rpartition(".")[0]
        shared = sum(name.startswith(f"{home}.") for name in pair["column"]) > 1
        adapted = home and not shared and any(name.startswith(f"{home}.") for name in pair.get("low_rank", {}).get("out", []))
        homes.add(home.rpartition(".")[0] if adapted else home)
    return homes.pop() if len(homes) == 1 else None


def _then(plan: Plan, sharded: bool) -> str:
    if plan.dp_degree == 1:
        return ""
    return ", then shard what each holds over the data ranks" if sharded else ", each group with its own share of the batch"


def start_line(inp: EngineInput, folder: str) -> str:
    """The torchrun command; "" where the script can't be run by a train file."""
    return trainfile.start_line(inp, folder, engine=NAME, file_name=TRAIN_FILE)


def validate(files: Mapping[str, str], inp: EngineInput) -> list[str]:
    """What is wrong with the files; empty when they compile and cut what the plan says, over the ranks that it says."""
    problems = trainfile.check(files, inp, TRAIN_FILE)
    if any(common.check_python(name, text) for name, text in files.items() if name.endswith(".py")):
        return problems
    context = _context(inp)
    expected = {"PAIRS": [(pair["column"], pair["row"]) for pair in context["pairs"]]}
    expected |= {name: context[key] for name, key in (("FUSED", "fused"), ("ATTENTION", "attention")) if context[key]}
    expected |= {"LOW_RANK": context["low_rank"]} if any(context["low_rank"].values()) else {}
    found = _constants(ast.parse(files[LAYERS_FILE]))
    problems += [f"{LAYERS_FILE}: {name} is {found.get(name, 'missing')}, the plan says {value}" for name, value in expected.items()
                 if found.get(name) != value]  # fmt: skip
    return problems + _check_mesh(ast.parse(files["parallelize.py"]), context)


def _constants(tree: ast.Module) -> dict[str, object]:
    """Names that a module assigns a literal to."""
    found: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def _check_mesh(tree: ast.Module, context: Mapping[str, Any]) -> list[str]:
    """parallelize() is there, and its mesh has the plan's sizes and names."""
    problems = []
    if not any(isinstance(node, ast.FunctionDef) and node.name == "parallelize" for node in tree.body):
        problems.append("parallelize.py defines no parallelize")
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "init_device_mesh"]
    sizes = [ast.literal_eval(call.args[1]) for call in calls]
    names = [ast.literal_eval(k.value) for call in calls for k in call.keywords if k.arg == "mesh_dim_names"]
    if (sizes, names) != ([context["mesh_shape"]], [context["mesh_names"]]):
        shown = ", ".join(f"{size}" for size in sizes) or "missing"
        wanted = f"{context['mesh_shape']}, named {context['mesh_names']}"
        problems.append(f"parallelize.py: the mesh is {shown}, named {', '.join(map(str, names))}; the plan says {wanted}")
    return problems
