"""Bytes per parameter by precision and optimizer."""

import pytest

from advisor.profiling.schema import ProfileMeta
from advisor.workload.precision import plan_optimizer, plan_precision

FP32 = ProfileMeta(script="a.py", optimizer="adamw", optimizer_state_bytes_per_param=8.0)
AMP = ProfileMeta(script="a.py", optimizer="adamw", optimizer_state_bytes_per_param=8.0, autocast_dtype="fp16")
PURE = ProfileMeta(script="a.py", optimizer="adamw", optimizer_state_bytes_per_param=4.0, param_dtype="bf16")


def per_param(meta, precision):
    p = plan_precision(meta, precision)
    o = plan_optimizer(meta, None, param_bytes=p.param_bytes, num_tensors=10)
    return p.compute_dtype, p.param_bytes + p.master_bytes + p.grad_bytes + o.state_bytes_per_param


@pytest.mark.parametrize(
    ("meta", "precision", "expected"),
    [
        (FP32, None, ("fp32", 16.0)),
        (FP32, "bf16", ("bf16", 16.0)),
        (FP32, "fp8", ("fp8", 16.0)),
        (AMP, None, ("fp16", 16.0)),
        (AMP, "fp32", ("fp32", 16.0)),
        (PURE, None, ("bf16", 8.0)),
        (PURE, "bf16", ("bf16", 8.0)),
        (PURE, "fp32", ("fp32", 16.0)),
    ],
)
def test_state_follows_the_weights_dtype(meta, precision, expected):
    assert per_param(meta, precision) == expected


@pytest.mark.parametrize(("name", "state"), [("sgd", 0.0), ("sgd-momentum", 4.0), ("lion", 4.0), ("adamw", 8.0), ("adamw-8bit", 2.0)])
def test_another_optimizer_keeps_its_own_moments(name, state):
    assert plan_optimizer(FP32, name, param_bytes=4.0, num_tensors=10).state_bytes_per_param == state


def test_a_fused_optimizer_launches_less():
    fused = ProfileMeta(script="a.py", optimizer="adamw", optimizer_fused=True)
    assert (
        plan_optimizer(fused, None, param_bytes=4.0, num_tensors=400).num_kernels
        < plan_optimizer(FP32, None, param_bytes=4.0, num_tensors=400).num_kernels
    )
