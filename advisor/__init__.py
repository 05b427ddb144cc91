"""parallel-advisor: how to train a PyTorch model in parallel, from one look at its training step.

import advisor
advice = advisor.advise("train.py", gpu="a100-sxm-80gb", nodes=4)
advice.plans_frame()
"""

from advisor.errors import AdvisorError
from advisor.pipeline import advise, plan, profile

__all__ = ["AdvisorError", "advise", "plan", "profile"]
