"""What the generated files must know of the user's script, read from its source without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from advisor.engines.types import EngineInput

#: Names that show a script which already spreads its own work; wrapping it again would be wrong.
_DISTRIBUTED = (
    "init_process_group", "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "deepspeed", "accelerate", "lightning",
    "pytorch_lightning", "Accelerator", "horovod", "DataParallel",
)  # fmt: skip
#: Names of loops that the script hands over to a library.
_TRAINERS = ("Trainer", "SFTTrainer", "Seq2SeqTrainer")

#: Engines whose train file has a loop of its own, and so needs the functions.
_OWN_LOOP = {"accelerate", "trainer", "lightning"}

#: Variables that torchrun and the train file set by themselves.
_LAUNCHERS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFacts:
    """Names and habits found in a script's source."""

    functions: frozenset[str] = frozenset()  # defined at the top level
    names: frozenset[str] = frozenset()  # identifiers, attributes and imported modules, anywhere
    strings: frozenset[str] = frozenset()
    computes_own_loss: bool = False  # reads `.loss` of what the model returns, so the loss is computed inside the model
    steps_with_closure: bool = False
    saves: bool = False  # calls torch.save
    saves_conditionally: bool = False  # does so inside an `if` (the one on `__name__` apart)
    breaks: bool = False  # leaves a loop by `break`
    shuffles: bool = False  # passes `shuffle=` something other than False
    environment: tuple[str, ...] = ()  # variables it reads, sorted, without those that a launcher sets


def read_script(path: Path) -> ScriptFacts:
    """Facts of a Python file; empty ones when it can't be read or parsed (a saved profile planned elsewhere)."""
    try:
        tree = ast.parse(path.read_text(encoding="utf8"))
    except (OSError, SyntaxError, ValueError):
        return ScriptFacts()
    nodes = list(ast.walk(tree))
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    return ScriptFacts(
        functions=frozenset(n.name for n in tree.body if isinstance(n, ast.FunctionDef)),
        names=frozenset(name for n in nodes for name in _names(n)),
        strings=frozenset(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)),
        computes_own_loss=any(isinstance(n, ast.Attribute) and n.attr == "loss" for n in nodes),
        steps_with_closure=any(c.func.attr == "step" and any(k.arg == "closure" for k in c.keywords) for c in calls),  # type: ignore[attr-defined]
        saves=any(_saves(n) for n in nodes),
        saves_conditionally=any(_saves(inner) for n in nodes if isinstance(n, ast.If) and not _on_name(n) for inner in ast.walk(n)),
        breaks=any(isinstance(n, ast.Break) for n in nodes),
        shuffles=any(n.arg == "shuffle" and ast.unparse(n.value) != "False" for n in nodes if isinstance(n, ast.keyword)),
        environment=tuple(sorted({name for n in nodes for name in _variables(n)} - _LAUNCHERS)),
    )


def _saves(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.save"


def _on_name(node: ast.If) -> bool:
    return any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))


def _variables(node: ast.AST) -> Iterator[str]:
    """Literal names in `os.environ["X"]`, `os.environ.get("X")`, `os.getenv("X")` and `"X" in os.environ`."""
    named: ast.AST | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_environ(node.value):
        named = node.slice
    elif isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute | ast.Name):
        called = ast.unparse(node.func)
        if called in {"os.getenv", "getenv"} or called.removeprefix("os.") in {"environ.get", "environ.setdefault"}:
            named = node.args[0]
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn) and _is_environ(node.comparators[0]):
        named = node.left
    if isinstance(named, ast.Constant) and isinstance(named.value, str):
        yield named.value


def _is_environ(node: ast.AST) -> bool:
    return ast.unparse(node) in {"os.environ", "environ"}


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Import):
        yield from (alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield (node.module or "").split(".")[0]
        yield from (alias.name for alias in node.names)


def why_not_run(inp: EngineInput, facts: ScriptFacts, *, engine: str) -> str:
    """Why no train file can be written for this script; empty when one can.

    `parallelize.py` and `ds_config.json` can be used in the user's own loop all the same.
    """
    if "cuda:1" in facts.strings or any(h.get("id") == "two-device-split" for h in inp.meta.hazards):
        return "the script places its model on cuda:1 or on several devices by itself; undo that first"
    if inp.form == "functions":
        return _why_not_functions(inp, facts, engine)
    if inp.form != "script":
        return "only a trace is known, not the script"
    if engine in _OWN_LOOP:
        return "its loop needs a file that declares build_model, make_batch and loss_fn"
    if inp.plan.pp_degree > 1:
        return "the stages call the loss by themselves, which needs a file that declares build_model, make_batch and loss_fn"
    meta, plan = inp.meta, inp.plan
    used = next((n for n in (*_DISTRIBUTED, *_TRAINERS) if n in facts.names), "")
    turns, rest = divmod(plan.num_microbatches, max(meta.accumulation, 1))
    checks = (
        (used != "", f"the script already uses {used}: put the plan's degrees there, or use parallelize.py in its place"),
        (meta.num_optimizers > 1, f"the script has {meta.num_optimizers} optimizers; parallelise each of its models with parallelize.py"),
        (meta.optimizer == "hand-written", "the script updates its weights by hand; give it a torch.optim optimizer first"),
        (meta.optimizer == "lbfgs" or facts.steps_with_closure, "its optimizer evaluates the model again inside a step"),
        ("compile" in facts.names and "torch" in facts.names, "the script calls torch.compile; compile after parallelize(model) instead"),
        (rest != 0 or turns == 0, f"the script accumulates over {meta.accumulation} backward passes and the plan over {plan.num_microbatches}: "
         "set the script's own accumulation to 1"),
        (engine != "deepspeed" and inp.precision == "fp16" and meta.param_dtype == "fp32" and not meta.uses_grad_scaler,
         "fp16 gradients need dynamic loss scaling and the script has none: take bf16, or add a torch.amp.GradScaler"),
        (engine == "deepspeed" and meta.uses_grad_scaler, "the script scales its loss itself, and so would DeepSpeed: take its GradScaler out"),
        (engine == "fsdp1" and meta.uses_grad_scaler, "the script's GradScaler sees this rank's shards alone, and ranks would skip different "
         "steps: use FSDP2, or torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler with parallelize.py"),
        (engine != "ddp" and bool(meta.other_models), f"a second model ({', '.join(meta.other_models)}) is kept beside the trained one, and "
         "can't be mixed with sharded weights"),
    )  # fmt: skip
    return next((reason for wrong, reason in checks if wrong), "")


def _why_not_functions(inp: EngineInput, facts: ScriptFacts, engine: str) -> str:
    missing = [name for name in ("make_batch", "loss_fn") if name not in facts.functions]
    if missing and facts.functions:
        return f"{Path(inp.script).name} declares no {' and no '.join(missing)}, which a training loop needs"
    if engine == "accelerate" and (inp.plan.tp_degree > 1 or inp.plan.pp_degree > 1):
        return "Megatron-LM builds the model and reads the data by itself"
    return ""


def build_function(inp: EngineInput) -> str:
    """The function that builds the model."""
    return inp.entry or "build_model"
