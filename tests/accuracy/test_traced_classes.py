"""Device seconds of ResNet-50 by class of operator, against two recorded steps of eager PyTorch that nothing was fitted on.

Published torch.profiler traces of DDP training in NCHW (test data of facebookresearch/HolisticTraceAnalysis), kernel milliseconds of one
step as `advise trace` sums them. The files name neither model nor batch: 53 convolutions and batch norms, 49 ReLUs and the gradient sizes
are those of ResNet-50, and 32 images is what its flops at fp32 on the V100 come to.
"""

from __future__ import annotations

import pytest

from cost_models.catalogue import find_gpu
from cost_models.convnet import resnet50_workload
from cost_models.terms.compute import op_seconds
from cost_models.types import OP_CLASSES

TRACED_MS = {
    ("a100-sxm-40gb", "tf32"): {"convolution": 18.7, "normalization": 10.4, "elementwise": 7.75},
    ("v100-sxm-32gb", "fp32"): {"convolution": 60.4, "normalization": 17.2, "elementwise": 13.5},
}


def modelled_ms(gpu: str, precision: str) -> dict[str, float]:
    total: dict[str, float] = {}
    for group in resnet50_workload(precision=precision).groups:
        seconds = op_seconds(group.ops, find_gpu(gpu), micro_batch=32, compute_dtype=precision)
        for code, value in zip(group.ops.op_class, seconds, strict=True):
            total[OP_CLASSES[code]] = total.get(OP_CLASSES[code], 0.0) + 1e3 * group.num_repeats * float(value)
    return total


@pytest.mark.parametrize("recorded", TRACED_MS, ids=lambda key: key[0])
def test_a_recorded_step_splits_as_modelled(recorded):
    traced, modelled = TRACED_MS[recorded], modelled_ms(*recorded)
    for name, value_ms in traced.items():
        assert modelled[name] == pytest.approx(value_ms, rel=0.15)
    assert sum(modelled[name] for name in traced) == pytest.approx(sum(traced.values()), rel=0.06)
