"""Which class of work an operator or a device kernel is: ordered patterns from two data files, the first match wins.

No torch: names are enough, so a saved profile or somebody else's trace is classified anywhere.
"""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from importlib import resources

from cost_models.types import OP_CLASSES

#: What marks the backward of an operator: removed when the name as a whole belongs to no family.
_BACKWARD = re.compile(r"_backward(_backward)?(_data|_overrideable|_input|_weights?|_elemt|_reduce)?_?\d*$|backward\d*$")
_EVALUATE = "autograd::engine::evaluate_function: "
_AUTOGRAD_NODE = re.compile(r"[A-Z]\w*Backward\d*$")
_PLAIN_OPERATOR = re.compile(r"\w+(::|\.)\w+(\.\w+)?")  # "namespace::name": no kernel is called so
#: A generic copy: the devices tell its direction.
_COPY = "copy"


def operator_class(name: str, *, phase: str = "forward", copy_from: str = "", copy_to: str = "") -> str:
    """Class of an operator by its name.

    Args:
        name: operator as torch, a profile or a trace writes it: "aten.addmm", "aten::addmm.default", "c10d::allreduce_",
            "autograd::engine::evaluate_function: AddmmBackward0"; kernel names work too.
        phase: phase of the step. In "optimizer" everything but collectives and copies between devices is "optimizer".
        copy_from: source device of a copy, e.g. "cpu"; "" if it is none or not known.
        copy_to: target device of a copy, e.g. "cuda:0".

    Returns:
        One of `cost_models.types.OP_CLASSES`; "other" for names in no family.
    """
    family = _family(name)
    if family == "collective":
        return family
    direction = copy_class(copy_from, copy_to)
    if direction != "copy-same-device":
        return direction
    if phase == "optimizer":
        return "optimizer"
    return direction if family == _COPY else family


def kernel_class(name: str) -> str:
    """Class of a device kernel (CUDA, ROCm, Triton) or of a device copy, by its name; "other" for names in no family."""
    return _kernel_family(name) or "other"


def copy_class(copy_from: str, copy_to: str) -> str:
    """Class of a copy by its two devices ("cpu", "cuda:0", ...); unknown devices count as one and the same."""
    source, target = _host_or_device(copy_from), _host_or_device(copy_to)
    if not source or not target or source == target:
        return "copy-same-device"
    if source == "host":
        return "copy-host-to-device"
    return "copy-device-to-host" if target == "host" else "copy-device-to-device"


def _host_or_device(device: str) -> str:
    if device.split(":", maxsplit=1)[0] in ("cpu", "host", "pageable", "pinned"):
        return "host"
    return f"{device}:0" if device and ":" not in device else device


@lru_cache(maxsize=16384)
def _family(name: str) -> str:
    plain = _plain_name(name)
    forward = _BACKWARD.sub("", plain)
    candidates = [plain, forward]
    if _AUTOGRAD_NODE.fullmatch(name.removeprefix(_EVALUATE)):  # node names drop underscores: ThnnFusedLstmCell, Im2Col
        candidates += [f"_{forward}", re.sub(r"(?<=\d)_", "", forward)]
    for candidate in dict.fromkeys(candidates):
        if found := _first_match("operator_families.toml", candidate, whole=True):
            return found
    is_kernel = not _PLAIN_OPERATOR.fullmatch(name) and not name.startswith(_EVALUATE) and not _AUTOGRAD_NODE.fullmatch(name)
    return (_kernel_family(name) if is_kernel else "") or "other"


@lru_cache(maxsize=16384)
def _kernel_family(name: str) -> str:
    return _first_match("kernel_families.toml", name.lower(), whole=False)


def _first_match(file: str, name: str, *, whole: bool) -> str:
    for op_class, pattern in _families(file):
        if pattern.fullmatch(name) if whole else pattern.search(name):
            return op_class
    return ""


def _plain_name(name: str) -> str:
    """Lower-case name without "aten", overload, in-place underscore and autograd dressing."""
    name = name.removeprefix(_EVALUATE)
    if _AUTOGRAD_NODE.fullmatch(name):
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"(?<=\d)D", "d", name))
    parts = name.replace("::", ".").split(".")
    if parts[0] == "aten" and len(parts) > 1:
        parts = parts[1:2]
    elif len(parts) > 2 and parts[-1] in {"default", "out", "Tensor", "Scalar"}:
        parts = parts[:-1]
    plain = ".".join(parts).lower()
    return plain if plain.endswith("__") else plain.rstrip("_")


@lru_cache(maxsize=4)
def _families(file: str) -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Families of a data file in order: class and the alternation of its patterns."""
    text = resources.files("advisor.classify").joinpath(file).read_text(encoding="utf8")
    families = tomllib.loads(text)["family"]
    for family in families:
        if family["class"] not in (*OP_CLASSES, _COPY):
            raise ValueError(f'{file}: "{family["class"]}" is no operator class')
    return tuple((f["class"], re.compile("|".join(f"(?:{p})" for p in f["patterns"]))) for f in families)
