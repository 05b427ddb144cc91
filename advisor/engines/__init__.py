"""Files per plan for each engine that can express it.

An engine is a module here and a folder of templates; `ENGINES` lists them. Adding one touches nothing else.
"""

from __future__ import annotations

from advisor.engines.plan_json import read_plan
from advisor.engines.types import EngineInput, Support
from advisor.engines.write import ENGINES, engines_for, launch_line, plan_files, start_lines, why_no_engine, why_no_files, write_plan

__all__ = [
    "ENGINES", "EngineInput", "Support", "engines_for", "launch_line", "plan_files", "read_plan", "start_lines", "why_no_engine",
    "why_no_files", "write_plan",
]  # fmt: skip
