"""plan.json: everything that a plan's files were written from, so that they can be written again, or shrunk and verified."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from advisor.engines.types import EngineInput
from advisor.profiling.schema import ProfileMeta, check_value
from cost_models.types import RECOMPUTES, SCHEDULES, Plan

PLAN_FILE = "plan.json"
SCHEMA_VERSION = 1


def to_text(inp: EngineInput, script_path: str) -> str:
    """The text of plan.json; `script_path` leads from the plan's folder to the script."""
    values = dataclasses.asdict(inp)
    return json.dumps({"schema_version": SCHEMA_VERSION, "script_path": script_path, **values}, indent=1) + "\n"


def read_plan(folder: Path) -> EngineInput:
    """The input that a plan's folder was written from, its script made a path that holds from anywhere.

    Raises:
        ValueError: there is no plan.json, or it is none that this version reads.
        OSError: it can't be read.
    """
    file = folder / PLAN_FILE
    if not file.is_file():
        raise ValueError(f"{folder} holds no {PLAN_FILE}")
    try:
        return _from_values(json.loads(file.read_text(encoding="utf8")), folder)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} is no plan that this version reads ({error})") from error


def _from_values(values: object, folder: Path) -> EngineInput:
    if not isinstance(values, dict) or values.pop("schema_version", None) != SCHEMA_VERSION:
        raise ValueError(f"its schema_version is not {SCHEMA_VERSION}")
    script = (folder / values.pop("script_path")).resolve()
    known = {field.name for field in dataclasses.fields(ProfileMeta)}
    meta = ProfileMeta(**{key: value for key, value in values.pop("meta").items() if key in known})
    lists = {key: tuple(values.pop(key)) for key in ("script_args", "engines")}
    plan = Plan(**values.pop("plan"))
    _check_plan(plan)
    found = EngineInput(plan=plan, meta=meta, **{**values, **lists, "script": str(script)})
    for part in (meta, found):
        for field in dataclasses.fields(part):
            check_value(field.name, getattr(part, field.name), str(field.type))
    return found


def _check_plan(plan: Plan) -> None:
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        check_value(field.name, value, str(field.type))
        if field.type == "int" and value < 1 and field.name != "zero_stage":
            raise ValueError(f"{field.name} is {value}")
    if plan.zero_stage > 3 or plan.recompute not in RECOMPUTES or plan.schedule not in SCHEDULES:
        raise ValueError(f"no plan has zero_stage {plan.zero_stage}, recompute {plan.recompute} and schedule {plan.schedule}")
