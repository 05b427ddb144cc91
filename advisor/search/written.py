"""Which plans engines have files for: a strategy is shown by a plan that can be had, where one is about as good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cost_models.types import FloatArray, IntArray, Plan, PlanTable

#: Gives a clause on why no engine has files for a plan, such as "no engine here writes it"; "" where one has.
WhyNoFiles = Callable[[Plan], str]
#: What engines refuse plans for, beside the degrees that make a strategy; the batch's split hardly ever matters.
_HABITS = ("dp_shard_degree", "recompute", "schedule", "virtual_stages", "sequence_parallel")


def all_written(_: Plan) -> str:
    """Every plan has files, for all we know."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Plans and what the engines say of them; arrays are parallel to `plans`, but for `order`."""

    plans: PlanTable
    order: IntArray  # numbers of the plans that fit, best first
    strategy: IntArray  # equal for plans of one strategy
    measure: FloatArray  # what a plan is judged by, smaller being better
    why: WhyNoFiles
    share: float  # how much worse than the best of its strategy a plan with files may be to stand for it

    def chosen(self, best: Sequence[int]) -> dict[int, str]:
        """The best plan of each strategy, or one with files that is nearly as good, in their order; with why one has none."""
        found: dict[int, str] = {}
        for i in best:
            reason = self.why(self.plans.plan(i))
            other = self._variant(i) if reason else None
            found[i if other is None else other] = reason if other is None else ""
        return found

    def _variant(self, i: int) -> int | None:
        """The best plan with files of a plan's strategy; of plans of the same habits one is asked about."""
        near = self.order[
            (self.strategy[self.order] == self.strategy[i]) & (self.measure[self.order] <= self.measure[i] * (1 + self.share))
        ]
        habits = np.stack([getattr(self.plans, name)[near] for name in _HABITS], axis=1)
        _, first = np.unique(habits, axis=0, return_index=True)
        asked = ((int(j), self.plans.plan(int(j))) for j in near[np.sort(first)])
        return next((j for j, plan in asked if not self.why(plan)), None)
