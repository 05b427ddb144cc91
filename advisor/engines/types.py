"""What an engine is given and what it must be able to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from cost_models.types import Plan

if TYPE_CHECKING:
    from advisor.profiling.schema import ProfileMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInput:
    """One plan for one script, with everything that the files are written from."""

    plan: Plan
    script: str  # path as the user gave it
    script_args: tuple[str, ...] = ()
    form: str = "script"  # "script" (unmodified) or "functions" (build_model ...)
    entry: str = ""  # function that builds the model, where it isn't `build_model`
    meta: ProfileMeta
    model: Mapping[str, Any] = field(default_factory=dict)  # the report's "model": block_paths, tp_pairs, unused_parameters, ...
    num_nodes: int = 1
    gpus_per_node: int = 1
    gpu: str = ""  # catalogue name
    precision: str = "fp32"  # of the matrix products: fp32, tf32, fp16, bf16
    optimizer: str = ""  # used only where the script declares none
    seed: int = 0
    folder: str = ""  # the plan's folder as the user will see it, e.g. "advice/plan-1"
    engines: tuple[str, ...] = ()  # names of the engines wanted; empty: all that can express the plan

    def __post_init__(self) -> None:
        if self.num_nodes * self.gpus_per_node != self.plan.world_size:
            raise ValueError(f"{self.num_nodes} nodes of {self.gpus_per_node} GPUs don't make the plan's world of {self.plan.world_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Whether an engine can express a plan. The reason is a sentence part that follows the engine's name."""

    engine: str
    supported: bool
    reason: str = ""


class Engine(Protocol):
    """What each engine module offers. Modules are the engines: no classes, no registry, one line in ENGINES."""

    NAME: str
    TITLE: str
    RUNTIMES: tuple[str, ...]  # names in `cost_models/runtimes` that it is priced by
    FOLDER: str  # of its files below the plan's folder; "" for the plan's folder itself
    TRAIN_FILE: str  # "" where the engine has no file that trains by itself
    ABOUT: Mapping[str, str]  # one line for the README by file name

    def supports(self, plan: Plan, model: Mapping[str, Any]) -> str:
        """Empty when the engine can express the plan, else the reason why not."""

    def files(self, inp: EngineInput, script_path: str) -> dict[str, str]:
        """Texts by file name. `script_path` leads from the engine's folder to the user's script."""

    def validate(self, files: Mapping[str, str], inp: EngineInput) -> list[str]:
        """What is wrong with the files; empty when they are right."""

    def start_line(self, inp: EngineInput, folder: str) -> str:
        """The command that trains with the files in `folder` (the engine's own, as the user sees it); "" where nothing can be started."""
