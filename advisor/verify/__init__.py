"""Runs a plan, shrunk to a few local processes, and holds what it computes against one process alone."""

from __future__ import annotations

from advisor.verify.verdicts import Check, EngineVerdict, PlanVerdict
from advisor.verify.verify import Request, verify_advice, verify_plan

__all__ = ["Check", "EngineVerdict", "PlanVerdict", "Request", "verify_advice", "verify_plan"]
