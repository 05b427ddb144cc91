"""What a script is, read from its syntax tree: nothing of it is run."""

from __future__ import annotations

import ast
import importlib.util
import sys
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

from advisor.errors import ScriptError

_DECLARATIONS = ("build_model", "make_batch", "loss_fn", "build_optimizer")
_EXAMPLE = "Declare build_model(), and make_batch(batch_size) returning one batch of inputs."


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A script as its text tells it."""

    path: Path
    entry: str  # function that builds the model; "" for the form "script"
    form: str  # "functions" or "script"
    declared: tuple[str, ...]  # of build_model, make_batch, loss_fn, build_optimizer
    imports: tuple[str, ...] = ()  # top-level modules that it imports, in order
    facts: dict[str, str] = field(default_factory=dict)  # hazard id -> evidence, seen in the text


def read_source(script: str, entry: str | None = None) -> Source:
    """Parse a script and settle its form.

    Args:
        script: path, or "path:ENTRY".
        entry: name of the function that builds the model; overrides the one in `script`.

    Raises:
        ScriptError: no such file, not Python, empty, or without the function asked for.
    """
    path, named = _split(script)
    entry = entry or named
    if path.suffix == ".ipynb" and path.is_file():
        raise ScriptError(f"{path} is a notebook, not a Python file.",
                          hint="Export it with `jupyter nbconvert --to script`, or use advisor.profile from inside it.")  # fmt: skip
    if path.is_dir():
        raise ScriptError(f"{path} is a folder, not a training script.", hint="Give the path of a Python file.")
    if not path.is_file():
        if path.is_symlink():
            raise ScriptError(
                f"{path} is a link to {path.readlink()}, which does not exist.", hint="Mend the link, or give the file itself."
            )
        raise ScriptError(f"There is no file {path}.", hint=_nearest(path))
    try:
        tree = ast.parse(_text(path), filename=str(path))
    except SyntaxError as error:
        raise ScriptError(f"{path}:{error.lineno or 1} is not valid Python: {error.msg}.", hint="Mend the syntax first.") from None
    except OSError as error:
        raise ScriptError(f"{path} can't be read: {error.strerror}.", hint="Give a file that you may read.") from None
    except (RecursionError, MemoryError):
        raise ScriptError(f"{path} is nested too deeply to be parsed.", hint="Give the path of a Python file.") from None
    except ValueError as error:
        raise ScriptError(f"{path} is not a Python text file ({error}).", hint="Give the path of a Python file.") from None
    if all(_is_docstring(node) for node in tree.body):
        raise ScriptError(f"{path} is empty: there is nothing to run.", hint=f"Give a training script. {_EXAMPLE}")
    return _settle(path, entry, tree)


def _text(path: Path) -> str:
    """Text of a Python file in the encoding that it declares: a byte order mark, a PEP 263 comment, else UTF-8."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except SyntaxError as error:  # of the encoding: there is no text to have a syntax yet
        raise ValueError(error.msg) from None


def _split(script: str) -> tuple[Path, str | None]:
    if not Path(script).exists() and ":" in script:
        head, _, tail = script.rpartition(":")
        if tail.isidentifier():
            return Path(head), tail
    return Path(script), None


def _nearest(path: Path) -> str:
    import difflib

    siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    return f"Did you mean {path.parent / close[0]}?" if close else "Give the path of a training script."


def _settle(path: Path, entry: str | None, tree: ast.Module) -> Source:
    defined = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    defined |= {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    imported = {a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    declared = tuple(name for name in _DECLARATIONS if name in defined | imported)
    coroutines = [n.name for n in tree.body if isinstance(n, ast.AsyncFunctionDef) and n.name in {*_DECLARATIONS, entry}]
    if coroutines and (entry is not None or {"build_model", "make_batch"} <= {*defined, *imported, *coroutines}):
        raise ScriptError(f"{path}: {coroutines[0]}() is `async def`, and nobody awaits it.", hint="Declare it with a plain `def`.")
    if entry in _DECLARATIONS[1:]:
        raise ScriptError(f"{path}:{entry} does not build a model.", hint="ENTRY is the function that returns the model, e.g. build_model.")
    if entry is not None and entry not in defined | imported:
        raise ScriptError(f"{path} declares no {entry}.", hint=f"It declares: {', '.join(sorted(defined)) or 'nothing'}.")
    if entry is not None and "make_batch" not in declared:
        raise ScriptError(
            f"{path} declares {entry} but no make_batch(batch_size), so there is nothing to feed the model with.", hint=_EXAMPLE
        )
    has_loop = any(isinstance(node, ast.If) and "__name__" in ast.dump(node.test) for node in tree.body)
    if entry is None and "build_model" in declared:
        if "make_batch" in declared:
            entry = "build_model"
        elif not has_loop and not _trains(tree):
            raise ScriptError(
                f"{path} declares build_model() but no make_batch(batch_size), so there is nothing to feed the model with.", hint=_EXAMPLE
            )
    if entry is None and "make_batch" in declared and not has_loop and not _trains(tree):
        raise _no_builder(path, tree)
    return Source(path=path, entry=entry or "", form="functions" if entry else "script", declared=declared, imports=_imports(tree),
                  facts=_text_facts(path, tree))  # fmt: skip


def _no_builder(path: Path, tree: ast.Module) -> ScriptError:
    """The error of a file that makes batches and doesn't say what builds the model: names what may be meant."""
    builders = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name not in _DECLARATIONS and not _num_required(n.args)]
    modules = [n for n in tree.body if isinstance(n, ast.ClassDef) and any(ast.unparse(base).endswith("Module") for base in n.bases)]
    for node in modules:
        starts = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
        if all(_num_required(f.args) <= 1 for f in starts):  # self
            builders.append(node.name)
    message = f"{path} declares make_batch() but no build_model()"
    if not builders:
        return ScriptError(f"{message}.", hint=_EXAMPLE)
    return ScriptError(
        f"{message}; what builds the model may be {', '.join(builders)}.",
        hint=f"Name it: advise {path}:NAME, for example {path}:{builders[0]}.",
    )


def _num_required(arguments: ast.arguments) -> int:
    """Arguments without a default."""
    positional = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    return positional + sum(default is None for default in arguments.kw_defaults)


def _trains(tree: ast.Module) -> bool:
    """Whether the top level itself runs something: a loop or a call that is not an import."""
    return any(isinstance(node, (ast.For, ast.While, ast.Expr, ast.With, ast.Try)) and not _is_docstring(node) for node in tree.body)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _imports(tree: ast.AST) -> tuple[str, ...]:
    found: list[tuple[int, str]] = []
    guarded = {id(n) for t in ast.walk(tree) if isinstance(t, ast.Try) for n in ast.walk(t)}
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, a.name.split(".")[0]) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.lineno, node.module.split(".")[0]))
    return tuple(dict.fromkeys(name for _, name in sorted(found)))


def missing_modules(source: Source) -> list[str]:
    """Modules that the script imports and this Python can't find, in the order of the text."""
    folder = str(source.path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        return [name for name in source.imports if name not in sys.modules and importlib.util.find_spec(name) is None]
    finally:
        sys.path.remove(folder)


def _text_facts(path: Path, tree: ast.Module) -> dict[str, str]:
    facts: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or (
            isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
        ):
            continue
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and _called(call) == "init_process_group":
                facts["process-group-at-import"] = f"init_process_group is called at {path.name}:{call.lineno}, when the file is imported"
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            for keyword in call.keywords:
                if keyword.arg == "device_map" and isinstance(keyword.value, ast.Constant) and keyword.value.value not in (None, "cpu"):
                    facts["device-map-sequential"] = (
                        f'device_map="{keyword.value.value!s}" at {path.name}:{call.lineno} runs layers one device after another'
                    )
    return facts


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
