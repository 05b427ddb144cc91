"""The CPU's autocast with CUDA's lists: which operators write fp32, and that nothing stays behind."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from advisor.profiling import cuda_autocast


@pytest.fixture
def autocast():
    library = cuda_autocast.install()
    yield lambda dtype: torch.autocast("cpu", dtype=dtype)
    library._destroy()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "call",
    [lambda x: torch.softmax(x, -1), lambda x: functional.log_softmax(x, 1), lambda x: functional.layer_norm(x, (4,)), lambda x: x.sum(), lambda x: x.sum(0),
     lambda x: x.exp(), lambda x: x.pow(2), lambda x: x.cumsum(0)],
    ids=["softmax", "log_softmax", "layer_norm", "sum", "sum of a dimension", "exp", "pow", "cumsum"],
)  # fmt: skip
def test_fp32_comes_out(autocast, call, dtype):
    with FakeTensorMode(), autocast(dtype):
        assert call(torch.empty(4, 4, dtype=dtype)).dtype == torch.float32


def test_products_stay_short_and_a_named_dtype_is_kept(autocast):
    with FakeTensorMode(), autocast(torch.bfloat16):
        x = torch.empty(4, 4)
        assert (x @ x).dtype == torch.bfloat16
        assert torch.softmax(x.bfloat16(), -1, dtype=torch.float64).dtype == torch.float64
        assert torch.softmax(x.double(), -1).dtype == torch.float64


def test_gradients_come_back_short(autocast):
    x = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    with autocast(torch.bfloat16):
        torch.softmax(x, -1).square().sum().backward()
    assert x.grad.dtype == torch.bfloat16


def test_the_cpus_own_autocast_is_back_afterwards():
    cuda_autocast.install()._destroy()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.softmax(torch.ones(2, 2, dtype=torch.bfloat16), -1).dtype == torch.bfloat16


def test_real_tensors_compute(autocast):
    with autocast(torch.float16):
        assert torch.softmax(torch.ones(1, 4, dtype=torch.float16), -1).tolist() == [[0.25] * 4]
