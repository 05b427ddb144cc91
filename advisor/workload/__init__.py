"""StepProfile -> Workload: what the cost models need to know about a model, found in one profiled step of any PyTorch code."""

from advisor.workload.shape import shape
from advisor.workload.summary import model_summary, split_notes

__all__ = ["model_summary", "shape", "split_notes"]
