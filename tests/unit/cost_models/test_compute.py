"""Device seconds of operators."""

import numpy as np
import pytest

from cost_models import op_seconds
from cost_models.catalogue import find_gpu
from cost_models.terms.compute import attention_kernel_share, peak_flops_per_s
from cost_models.types import BATCH_DIMS, OP_CLASSES, PHASES, PRICING_KINDS, TP_SPLITS, OpTable


def one_op(op_class="matmul", kind="gemm", phase="forward", batch_dim="m", tp_split="none", **sizes):
    values = {"m": 4096.0, "n": 4096.0, "k": 4096.0, "batch": 1.0, "work_share": 1.0, "bytes_per_sample": 0.0, "bytes_fixed": 0.0,
              "num_kernels": 1.0, **sizes}  # fmt: skip
    codes = {"op_class": OP_CLASSES.index(op_class), "kind": PRICING_KINDS.index(kind), "phase": PHASES.index(phase),
             "batch_dim": BATCH_DIMS.index(batch_dim), "tp_split": TP_SPLITS.index(tp_split)}  # fmt: skip
    return OpTable(**{k: np.array([v]) for k, v in codes.items()}, **{k: np.array([v]) for k, v in values.items()})


def test_a_large_product_runs_near_but_below_peak(a100):
    flops = 2 * 16384 * 8192 * 8192
    seconds = op_seconds(one_op(m=16384.0, n=8192.0, k=8192.0), a100)[0]
    assert 0.5 < flops / seconds / 312e12 < 0.95


def test_a_product_with_a_short_side_reaches_less(a100):
    rate = {m: 2 * m * 4096**2 / op_seconds(one_op(m=m), a100)[0] for m in (64.0, 512.0, 4096.0)}
    assert rate[64.0] < rate[512.0] < rate[4096.0]


def test_a_memory_bound_operator_takes_its_bytes(a100):
    op = one_op(op_class="normalization", kind="memory", batch_dim="none", bytes_per_sample=1e9)
    seconds = op_seconds(op, a100, micro_batch=4)[0]
    assert seconds > 4e9 / 2.0e12
    assert op_seconds(op, a100, micro_batch=8)[0] == pytest.approx(2 * seconds)


def test_causal_attention_costs_half_and_backward_two_and_a_half_times(a100):
    sizes = {"op_class": "attention", "kind": "attention", "batch_dim": "batch", "m": 4096.0, "n": 4096.0, "k": 128.0, "batch": 32.0}
    full = op_seconds(one_op(**sizes), a100)[0]
    assert op_seconds(one_op(**sizes, work_share=0.5), a100)[0] == pytest.approx(full / 2)
    assert op_seconds(one_op(**sizes, phase="backward"), a100)[0] == pytest.approx(2.5 * full)


def test_fused_attention_of_short_sequences_reaches_less(a100):
    sizes = {"op_class": "attention", "kind": "attention", "batch_dim": "batch", "k": 128.0, "batch": 32.0}
    rate = {s: s * s / op_seconds(one_op(**sizes, m=s, n=s), a100)[0] for s in (512.0, 4096.0, 65536.0)}
    assert rate[512.0] < 0.8 * rate[4096.0]
    assert 0.8 * rate[65536.0] < rate[4096.0] < rate[65536.0]


@pytest.mark.parametrize(("kernels", "gpu", "share"), [("native", "hopper", 1.0), ("flash2", "ampere", 1.0), ("flash2", "blackwell", 1.0)])
def test_kernels_written_for_a_family_reach_its_rate(kernels, gpu, share):
    assert attention_kernel_share(kernels, gpu) == share


def test_older_kernels_reach_less_of_a_newer_gpu():
    assert (
        attention_kernel_share("triton", "hopper") < attention_kernel_share("flash2", "hopper") < attention_kernel_share("flash2", "ampere")
    )


def test_tensor_parallelism_divides_the_split_dimension_only(a100):
    whole = op_seconds(one_op(n=8192.0), a100)[0]
    split = op_seconds(one_op(n=8192.0, tp_split="n"), a100, tp_degree=4)[0]
    assert whole / 4 < split < whole / 3  # a little worse than a quarter: the side gets shorter
    assert op_seconds(one_op(n=8192.0), a100, tp_degree=4)[0] == pytest.approx(whole)


def test_the_micro_batch_multiplies_its_dimension(a100):
    assert op_seconds(one_op(m=1024.0), a100, micro_batch=4)[0] == pytest.approx(op_seconds(one_op(m=4096.0), a100)[0])


def test_fp4_gains_less_than_its_peak_over_fp8():
    rate = {gpu: peak_flops_per_s(find_gpu(gpu), "fp4") / peak_flops_per_s(find_gpu(gpu), "fp8") for gpu in ("gb200-186gb", "gb300-288gb")}
    assert 1.6 < rate["gb200-186gb"] < 1.8  # of 2
    assert 2.2 < rate["gb300-288gb"] < 2.6  # of 3


def test_low_precision_is_faster_where_the_device_has_it(h100):
    op = one_op(m=16384.0)
    assert op_seconds(op, h100, compute_dtype="fp8")[0] < op_seconds(op, h100, compute_dtype="bf16")[0]
    assert op_seconds(op, h100, compute_dtype="bf16")[0] < op_seconds(op, h100, compute_dtype="fp32")[0]


def test_fp32_convolutions_use_tf32_and_products_do_not(a100):
    assert peak_flops_per_s(a100, "fp32") == 19.5e12
    assert peak_flops_per_s(a100, "fp32", convolution=True) == 156e12


@pytest.mark.parametrize(
    ("arguments", "word"), [({"compute_dtype": "int3"}, "int3"), ({"micro_batch": 0}, "positive"), ({"tp_degree": 0}, "positive")]
)
def test_bad_arguments_are_named(a100, arguments, word):
    with pytest.raises(ValueError, match=word):
        op_seconds(one_op(), a100, **arguments)
