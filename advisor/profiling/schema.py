"""StepProfile: one training step as four frames and a header, whatever way it was seen.

A saved profile is a folder (`meta.json`, `operators.json.gz`, `modules.json.gz`, `parameters.json.gz`) that can be planned again
without torch, a GPU or the script.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from advisor.errors import AdvisorError
from cost_models.types import OP_CLASSES

SCHEMA_VERSION = 1
FRAMES = ("operators", "modules", "parameters")
PHASES = ("forward", "backward", "recompute", "optimizer", "data")
#: Columns that must hold numbers.
_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "operators": ("flops", "read_bytes", "written_bytes", "saved_bytes", "num_kernels", "measured_s"),
    "modules": ("order", "num_calls", "num_params", "total_params", "input_group"),
    "parameters": ("num_elements",),
}

#: One row per operator call of one micro-batch forward + backward, plus one optimizer step. Never per view or shape op.
OPERATOR_COLUMNS: Mapping[str, str] = {
    "call": "order of the call, from 0",
    "module": 'path of the innermost module that called it ("" for the root or code outside any module)',
    "phase": "forward, backward, recompute (a checkpointed forward run again), optimizer or data",
    "operator": 'overload packet name, e.g. "aten.addmm"; a kernel name where only kernels are known',
    "op_class": "one of cost_models.types.OP_CLASSES; backward carries the class of its forward operator",
    "input_shapes": "list of shapes (lists of int) of the tensor arguments",
    "output_shapes": "list of shapes of the tensors returned",
    "dtype": 'dtype of the first floating output or input: "bf16", "fp16", "fp32", "fp8", "int64", ...',
    "weight": 'name of the parameter among the arguments, "" if none (first one where several)',
    "flops": "multiply-add counted as 2; 0 where it moves bytes only",
    "read_bytes": "bytes of the tensor arguments",
    "written_bytes": "bytes of the tensors returned",
    "saved_bytes": "bytes this forward call newly keeps for backward (parameters and inputs already kept count 0)",
    "causal": "1 for causal attention, else 0",
    "num_kernels": "device kernels it launches (1 unless known better)",
    "device": 'intended device, e.g. "cuda:0"; "cpu"',
    "copy_from": 'source device of a copy, "" otherwise',
    "copy_to": 'target device of a copy, "" otherwise',
    "measured_s": "device seconds measured; NaN where nothing was measured",
}
#: One row per module that owns parameters, was called, or both.
MODULE_COLUMNS: Mapping[str, str] = {
    "module": 'path, "" for the root',
    "class_name": "Python class name",
    "order": "order of the first call in the step; -1 if never called",
    "num_calls": "calls in one micro-batch's forward",
    "num_params": "unique parameter elements owned directly",
    "total_params": "unique parameter elements of the module with its children",
    "input_shape": "shape of the first tensor argument of the first call; [] if none",
    "output_shape": "shape of the first tensor returned",
    "input_group": "calls whose first argument is the same tensor, back to back, share a number; -1 if not called",
    "weight_shape": 'shape of the parameter named "weight" or of the only 2-D parameter, else []',
    "weight_layout": '"out_in" (nn.Linear), "in_out" (Conv1D style), "embedding", "convolution" or ""',
}
#: One row per unique parameter.
PARAMETER_COLUMNS: Mapping[str, str] = {
    "name": "first name",
    "aliases": "other names of the same tensor (ties)",
    "module": "path of the module that owns it",
    "shape": "list of int",
    "dtype": "as in operators",
    "num_elements": "int",
    "requires_grad": "bool",
    "got_grad": "bool: a gradient arrived in the traced step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileMeta:
    """Header of a StepProfile."""

    script: str  # path as given
    entry: str = ""  # function or model named by the user
    form: str = "script"  # "script" (unmodified, run as __main__), "functions" (build_model ...) or "trace"
    source: str = "traced"  # "measured", "traced" or "imported": where seconds come from
    device: str = ""  # device measured on, e.g. "NVIDIA H200", or "" when only traced
    framework: str = ""  # "torch 2.13.0"
    model_class: str = ""
    num_params: int = 0  # unique
    num_trainable_params: int = 0
    tied: list[list[str]] = field(default_factory=list)  # groups of names of one tensor
    buffer_bytes: int = 0
    other_models: dict[str, int] = field(default_factory=dict)  # class -> parameters of models never trained (EMA, teacher)
    optimizer: str = ""  # "adamw", "sgd", ...; "hand-written" where no torch optimizer stepped
    optimizer_state_bytes_per_param: float = 0.0  # without a master copy
    optimizer_fused: bool = False
    num_optimizers: int = 1
    batch_size: int = 1  # samples in one forward
    input_shapes: list[list[int]] = field(default_factory=list)  # of the root's tensor arguments
    input_bytes: int = 0
    seq_len: int = 0  # 0 where the inputs are not token sequences
    accumulation: int = 1  # forward/backward passes per optimizer step
    autocast_dtype: str = ""  # "bf16", "fp16" or ""
    param_dtype: str = "fp32"  # dtype of most parameters
    uses_checkpointing: bool = False
    uses_grad_scaler: bool = False
    clips_gradients: bool = False
    step_time_s: float | None = None  # measured wall seconds of one optimizer step, else None
    idle_s: float | None = None  # part of it with an idle device
    peak_memory_bytes: int | None = None  # measured
    saved_bytes: int = 0  # kept for backward, whole model, batch as traced
    logits_shape: list[int] = field(default_factory=list)  # of the loss input when it is class scores
    vocab_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    hazards: list[dict[str, str]] = field(default_factory=list)  # {"id": "...", "evidence": "..."}
    warnings: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One step. The frames have exactly the documented columns, in order."""

    meta: ProfileMeta
    operators: pd.DataFrame
    modules: pd.DataFrame
    parameters: pd.DataFrame

    def __post_init__(self) -> None:
        wanted = (("operators", OPERATOR_COLUMNS), ("modules", MODULE_COLUMNS), ("parameters", PARAMETER_COLUMNS))
        for name, columns in wanted:
            have = list(getattr(self, name).columns)
            if have != list(columns):
                raise ValueError(f"{name} has columns {have}, wants {list(columns)}")


def frame(rows: list[dict[str, Any]], columns: Mapping[str, str]) -> pd.DataFrame:
    """Rows as a frame with exactly these columns, also when there are none."""
    return pd.DataFrame(rows, columns=list(columns))


def save_profile(profile: StepProfile, folder: Path) -> None:
    """Write a profile folder; the folder is created. An interruption leaves an older profile there as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(profile.meta)}
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as staging:
        (Path(staging) / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf8")
        for name in FRAMES:
            table = getattr(profile, name)
            columns = {c: table[c].tolist() for c in table.columns}
            with gzip.open(Path(staging) / f"{name}.json.gz", "wt", encoding="utf8", compresslevel=4) as out:
                json.dump(columns, out)
        for part in Path(staging).iterdir():
            part.replace(folder / part.name)


def is_profile(folder: Path) -> bool:
    """Whether a folder holds a saved profile and nothing else of that name."""
    return all((folder / name).is_file() for name in ("meta.json", *(f"{name}.json.gz" for name in FRAMES)))


def load_profile(folder: Path) -> StepProfile:
    """Read a profile folder.

    Raises:
        AdvisorError: the folder is no profile, a damaged one, or one of another version.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf8"))
        version = meta.pop("schema_version")
        if version != SCHEMA_VERSION:
            raise AdvisorError(
                f"{folder} is a profile of version {version}; this advisor reads {SCHEMA_VERSION}.", hint="Profile the script again."
            )
        frames = {}
        for name in FRAMES:
            with gzip.open(folder / f"{name}.json.gz", "rt", encoding="utf8") as source:
                frames[name] = pd.DataFrame(json.load(source))
        profile = StepProfile(meta=ProfileMeta(**meta), **frames)
        check_profile(profile)
        return profile
    except (OSError, EOFError, zlib.error, KeyError, TypeError, ValueError, AttributeError) as error:
        raise AdvisorError(f"{folder} is not a saved profile ({error}).", hint="Make one with `advise profile SCRIPT -o DIR`.") from error


def check_profile(profile: StepProfile) -> None:
    """Types and ranges of a profile that was read from elsewhere.

    Raises:
        ValueError: what is wrong, in a few words.
    """
    for f in dataclasses.fields(ProfileMeta):
        check_value(f.name, getattr(profile.meta, f.name), str(f.type))
    for name, columns in _NUMBERS.items():
        table = getattr(profile, name)
        for column in columns:
            values = pd.to_numeric(table[column], errors="coerce")
            optional = column == "measured_s"
            if not optional and (values.isna().any() or not np.isfinite(values.to_numpy(float)).all()):
                raise ValueError(f"{column} of the {name} holds what is no number")
            if column not in {"order", "input_group"} and (values < 0).any():
                raise ValueError(f"{column} of the {name} is negative")
    if profile.parameters["num_elements"].sum() != profile.meta.num_params:
        raise ValueError(f"its parameters don't add up to {profile.meta.num_params}")
    if profile.operators.empty:
        raise ValueError("it holds no operators")
    for column, allowed in (("phase", PHASES), ("op_class", OP_CLASSES)):
        unknown = set(profile.operators[column].astype(str)) - set(allowed)
        if unknown:
            raise ValueError(f"{column} {sorted(unknown)[0]!r} is none of {', '.join(allowed)}")
    for column in ("input_shapes", "output_shapes"):
        if not profile.operators[column].map(lambda v: isinstance(v, list) and all(_is_shape(x) for x in v)).all():
            raise ValueError(f"{column} holds what is no list of shapes")
    if not profile.parameters["shape"].map(_is_shape).all():
        raise ValueError("shape of the parameters holds what is no shape")


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and n >= 0 for n in value)


def check_value(name: str, value: object, kind: str) -> None:
    """Hold a value read from a file against the annotation of its field; numbers are finite and not negative.

    Raises:
        ValueError: name and value of what doesn't fit.
    """
    if value is None and "None" in kind:
        return
    wanted = {"int": int, "floa": (int, float), "str": str, "bool": bool, "list": list, "dict": dict, "Mapping": dict}
    types = next((t for prefix, t in wanted.items() if kind.startswith(prefix)), object)
    if not isinstance(value, types) or (isinstance(value, bool) and not kind.startswith("bool")):  # type: ignore[arg-type]
        raise ValueError(f"{name} is {value!r}")
    items: list[object] = list(value) if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
    inner = {"list[dict": dict, "list[list": list, "list[int": int, "list[str": str, "dict[str, int": int, "dict[str, str": str}
    wanted_inner = next((t for prefix, t in inner.items() if kind.startswith(prefix)), object)
    if not all(isinstance(item, wanted_inner) for item in items):
        raise ValueError(f"{name} is {value!r}")
    if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value!r}")
