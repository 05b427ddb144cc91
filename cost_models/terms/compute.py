"""Device seconds of operators: matrix products, convolutions and attention on a roofline, everything else by its bytes.

    seconds = max(flops / (peak x share x saturation x fill^w), bytes / (memory rate x share))

Convolutions choose tiles by their shape, so that one share of the peak stands for them, layout changes around them included (in recorded
traces of ResNet-50 in NCHW a quarter of the time): one for 16-bit, one for TF32. Between convolutions, batch normalisation and ReLU move
what a count of their operands says (1.02 to 1.16 of it in the same traces), and so do perceptrons; operators between the products of
transformers 1.5 times.
Grouped convolutions with few channels a group have no use for matrix units: they move their bytes `grouped_traffic` times.

`saturation` = 1 / ((1 + c_m/m)(1 + c_n/n)(1 + c_k/k)) lowers the rate of products with a short side; `fill` is the filled part
of the last wave of 128 x 128 tiles, of which products with a very long inner side have more (split-K). Shares and c are calibrated per GPU
family. Ignored: layout (NN, NT, TN), L2 reuse, clocks.
Backward fused attention does 2.5 times the forward work (it recomputes scores: 5 products instead of 2; Dao 2022). Its rate falls for
short sequences (few tiles to keep the pipeline of a block full, and half-empty ones on the diagonal) and depends on the kernels' generation:
FlashAttention-2 reaches 50 to 73% of an A100's peak, 1.3 to 1.5 times the rate of FlashAttention in Triton (Dao 2023, section 4), but only
35% of an H100's, whose asynchronous matrix units it doesn't know; kernels written for them (cuDNN, FlashAttention-3) reach 55 to 65%
(Shah et al. 2024, section 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models.calibrate_io import Calibration, load_calibration
from cost_models.types import BATCH_DIMS, OP_CLASSES, PHASES, PRICING_KINDS, TP_SPLITS, Device, FloatArray, IntArray, LayerGroup, OpTable

GEMM, CONVOLUTION, ATTENTION, MEMORY = (PRICING_KINDS.index(k) for k in ("gemm", "convolution", "attention", "memory"))
FORWARD, BACKWARD, OPTIMIZER = (PHASES.index(p) for p in ("forward", "backward", "optimizer"))
ATTENTION_CLASS = OP_CLASSES.index("attention")
_REORDERING = [OP_CLASSES.index(name) for name in ("attention", "normalization", "recurrent")]
#: Classes of achieved rate: constant that gives the share of the peak.
RATES = (
    "gemm",
    "low",
    "expert",
    "expert_low",
    "convolution",
    "tf32_convolution",
    "grouped_convolution",
    "attention",
    "batched",
    "scalar",
    "memory",
    "map",
)
BoolArray = npt.NDArray[np.bool_]
TILE = 128.0
SPLIT_DEPTH = 2.0**17  # inner size from which a product with few tiles is cut along it, so that every multiprocessor has a part
#: Block scales, transforms and products that stay in wider types take a fp4 product so much of what it takes in fp8, however fast fp4 is.
FP4_CONVERSION = 0.09
#: Rate of fused attention by older kernels against kernels written for the GPU family. On Blackwell frameworks that call FlashAttention-2
#: elsewhere turn to cuDNN's (torchtitan: ScaledDotProductAttention).
OLDER_KERNELS_SHARE = {"triton": {"ampere": 0.75, "hopper": 0.45}, "flash2": {"hopper": 0.62}}
FEW_CHANNELS = 8.0  # output channels per group up to which a convolution counts as grouped
FLASH_BACKWARD_FACTOR = 2.5
ELEMENT_BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpShapes:
    """Operators at the sizes one device executes; all arrays of equal length. Independent of the calibration."""

    flops: FloatArray
    m: FloatArray  # inf where saturation does not apply
    n: FloatArray
    k: FloatArray
    attention_rows: FloatArray  # keys that a query of fused attention meets, causal not halved; inf elsewhere
    wave_fill: FloatArray  # 0..1
    moved_bytes: FloatArray
    peak_flops_per_s: FloatArray
    memory_bytes_per_s: FloatArray
    rate: IntArray  # index into RATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What divides the operators of a cell, one value per operator (or broadcast)."""

    samples: FloatArray  # samples per forward pass over context degree
    tp_degree: FloatArray
    ep_degree: FloatArray
    sequence_parallel: FloatArray  # 0 or 1


def peak_flops_per_s(device: Device, dtype: str, *, convolution: bool = False) -> float:
    """Dense peak of a device for a dtype, with what the framework falls back to where the hardware lacks it.

    PyTorch runs fp32 convolutions in TF32 by default (torch.backends.cudnn.allow_tf32), fp32 products not.

    Raises:
        ValueError: the device has no rate that could serve.
    """
    peaks = device.peak_flops_per_s
    if convolution and dtype == "fp32":
        dtype = "tf32"
    if dtype == "fp4" and "fp4" in peaks and "fp8" in peaks:
        return 1.0 / (1.0 / peaks["fp4"] + FP4_CONVERSION / peaks["fp8"])
    for name in {"fp4": ("fp4", "fp8", "bf16", "fp16"), "fp8": ("fp8", "bf16", "fp16"), "bf16": ("bf16",), "fp16": ("fp16",)}.get(
        dtype, (dtype,)
    ):
        if name in peaks:
            return peaks[name]
    if "fp32" in peaks:
        return peaks["fp32"]
    raise ValueError(f"{device.name} has no peak rate for {dtype}")


def attention_kernel_share(kernels: str, family: str) -> float:
    """Factor on the rate of fused attention: 1 for kernels written for the GPU family.

    Args:
        kernels: one of `traits.ATTENTION_KERNELS`.
        family: of the device.
    """
    return OLDER_KERNELS_SHARE.get(kernels, {}).get(family, 1.0)


def device_shapes(
    ops: OpTable, split: Split, *, peaks: tuple[FloatArray, FloatArray], memory_bytes_per_s: FloatArray, num_sms: FloatArray,
    element_bytes: FloatArray, low_precision: IntArray, expert: IntArray, scalar: tuple[BoolArray, BoolArray], in_maps: BoolArray,
) -> OpShapes:  # fmt: skip
    """Operators as one device executes them: micro-batch multiplied in, tensor and expert parallelism divided out.

    Args:
        ops: operators of one sample.
        split: samples and degrees per operator.
        peaks: peak rates of products and of convolutions, per operator.
        memory_bytes_per_s: device memory rate per operator.
        num_sms: multiprocessors per operator.
        element_bytes: bytes per element of the matrix products.
        low_precision: 1 where the product runs in the low precision of the workload (fp8, fp4).
        expert: 1 where the product is a bank of experts, one independent product each.
        scalar: where products, and where convolutions, run in fp32 without matrix units.
        in_maps: where the operator belongs to a group of layers with convolutions, or to a model that `keeps_order`.
    """
    grow = {name: np.where(ops.batch_dim == i, split.samples, 1.0) for i, name in enumerate(BATCH_DIMS) if name != "none"}
    cut = {name: np.where(ops.tp_split == i, split.tp_degree, 1.0) for i, name in enumerate(TP_SPLITS) if name in ("m", "n", "k", "batch")}
    experts = np.where(expert > 0, np.minimum(split.ep_degree, np.maximum(ops.batch, 1.0)), 1.0)
    token_side = {name: np.where(ops.batch_dim == BATCH_DIMS.index(name), experts, 1.0) for name in ("m", "n", "k")}
    m, n, k = (np.maximum(getattr(ops, d) * grow[d] * token_side[d] / cut[d], 1.0) for d in ("m", "n", "k"))
    is_gemm, is_conv = ops.kind == GEMM, ops.kind == CONVOLUTION
    is_attention = ops.kind == ATTENTION
    batch = ops.batch * grow["batch"] / (cut["batch"] * experts)
    batch = np.where(is_attention, batch, np.maximum(batch, 1.0))  # context parallelism leaves each device a part of the queries of a head
    factor = np.where(
        is_attention, np.where(ops.phase == BACKWARD, 4.0 * FLASH_BACKWARD_FACTOR, 4.0), np.where(is_gemm | is_conv, 2.0, 0.0)
    )
    flops = factor * m * n * k * batch * ops.work_share
    batched = is_gemm & (ops.op_class == ATTENTION_CLASS)
    saturates = is_gemm & ~batched  # a convolution chooses tiles by its shape: its share of the peak stands for all
    tiles = np.ceil(m / TILE) * np.ceil(n / TILE) * batch
    waves = tiles * np.clip(num_sms / tiles, 1.0, np.maximum(k / SPLIT_DEPTH, 1.0)) / num_sms
    return OpShapes(
        flops=flops, m=np.where(saturates, m, np.inf), n=np.where(saturates, n, np.inf), k=np.where(saturates, k, np.inf),
        attention_rows=np.where(is_attention, n, np.inf),
        wave_fill=np.where(saturates, waves / np.ceil(waves), 1.0),
        moved_bytes=np.where(is_gemm, element_bytes * batch * (m * k + k * n + m * n), _bytes(ops, split)),
        peak_flops_per_s=np.where(is_conv, peaks[1], peaks[0]), memory_bytes_per_s=memory_bytes_per_s + np.zeros(len(ops)),
        rate=_rate_class(ops, low=low_precision, expert=expert, scalar=scalar, in_maps=in_maps, element_bytes=element_bytes),
    )  # fmt: skip


def _bytes(ops: OpTable, split: Split) -> FloatArray:
    """Bytes of operators priced by traffic: activations between split weights are divided, the rest only with sequence parallelism."""
    inner = (ops.tp_split != TP_SPLITS.index("none")) & (ops.tp_split != TP_SPLITS.index("sequence"))
    sequence = (ops.tp_split == TP_SPLITS.index("sequence")) & (split.sequence_parallel > 0)
    divisor = np.where(inner | sequence, split.tp_degree, 1.0)
    return ops.bytes_per_sample * split.samples / divisor + ops.bytes_fixed / np.where(inner, split.tp_degree, 1.0)


def _rate_class(
    ops: OpTable, *, low: IntArray, expert: IntArray, scalar: tuple[BoolArray, BoolArray], in_maps: BoolArray, element_bytes: FloatArray
) -> IntArray:  # fmt: skip
    is_gemm, is_conv = ops.kind == GEMM, ops.kind == CONVOLUTION
    batched = is_gemm & (ops.op_class == ATTENTION_CLASS)
    grouped = is_conv & (ops.batch > 1) & (np.minimum(ops.m, ops.n) <= FEW_CHANNELS)
    cases = {
        "batched": batched, "scalar": (is_gemm & scalar[0]) | (is_conv & scalar[1] & ~grouped), "grouped_convolution": grouped,
        "tf32_convolution": is_conv & (element_bytes > 2), "convolution": is_conv, "attention": ops.kind == ATTENTION,
        "expert_low": is_gemm & (expert > 0) & (low > 0), "expert": is_gemm & (expert > 0), "low": is_gemm & (low > 0), "gemm": is_gemm,
        "map": in_maps,
    }  # fmt: skip
    return np.select(list(cases.values()), [RATES.index(name) for name in cases], RATES.index("memory")).astype(np.int64)


def keeps_order(groups: Iterable[LayerGroup]) -> bool:
    """Whether a model is made of perceptrons alone: rows stay where they are, while attention, norms over rows and recurrence transpose them."""
    return not any(np.isin(group.ops.op_class, _REORDERING).any() for group in groups)


def rate_table(constants: Mapping[str, FloatArray]) -> FloatArray:
    """Achieved share of the peak per (pair of runtime and family, RATES), from the constants of the pairs."""
    gemm, low = constants["gemm_rate_share"], constants["low_precision_rate_share"]
    imbalance = constants["expert_imbalance"]
    convolution = constants["convolution_rate_share"]
    of = {
        "gemm": gemm, "low": gemm * low, "expert": gemm / imbalance, "expert_low": gemm * low / imbalance, "convolution": convolution,
        "tf32_convolution": convolution * constants["tf32_convolution_gain"], "attention": constants["attention_rate_share"],
        "batched": constants["batched_rate_share"], "scalar": constants["scalar_rate_share"],
    }  # fmt: skip
    return np.stack([of.get(name, np.ones_like(gemm)) for name in RATES], axis=1)


def memory_table(constants: Mapping[str, FloatArray]) -> FloatArray:
    """Achieved share of the memory rate per (pair, RATES): products count their operands, other operators move more than such a count."""
    share = constants["memory_rate_share"]
    more = {"memory": "memory_traffic", "map": "map_traffic", "grouped_convolution": "grouped_traffic"}
    return np.stack([share / constants[more[name]] if name in more else share for name in RATES], axis=1)


def shape_seconds(shapes: OpShapes, constants: Mapping[str, FloatArray], pair: IntArray) -> FloatArray:
    """Device seconds per operator.

    Args:
        shapes: operators as executed.
        constants: calibration constants, one value per pair of runtime and GPU family.
        pair: index of each operator's pair.
    """

    def of(name: str) -> FloatArray | float:
        values = constants[name]
        return float(values[0]) if len(values) == 1 else values[pair]

    share = rate_table(constants).ravel()[pair * len(RATES) + shapes.rate]
    short = (1.0 + of("gemm_half_m") / shapes.m) * (1.0 + of("gemm_half_n") / shapes.n) * (1.0 + of("gemm_half_k") / shapes.k)
    short = short * (1.0 + of("attention_half_rows") / shapes.attention_rows)
    fill = np.exp(of("wave_exponent") * np.log(shapes.wave_fill))
    compute_s = shapes.flops * short / (shapes.peak_flops_per_s * share * fill)
    memory_share = memory_table(constants).ravel()[pair * len(RATES) + shapes.rate]
    return np.maximum(compute_s, shapes.moved_bytes / (shapes.memory_bytes_per_s * memory_share))  # type: ignore[no-any-return]


def _scalar(device: Device, dtype: str, n: int) -> tuple[BoolArray, BoolArray]:
    """Where products and convolutions of n operators run in fp32 without matrix units."""
    product = dtype == "fp32"
    convolution = product and peak_flops_per_s(device, dtype, convolution=True) == peak_flops_per_s(device, dtype)
    return np.full(n, product), np.full(n, convolution)


def op_seconds(
    ops: OpTable, device: Device, *, micro_batch: float = 1, compute_dtype: str = "bf16", calibration: Calibration | None = None,
    tp_degree: int = 1, in_order: bool = False,
) -> FloatArray:  # fmt: skip
    """Modelled device seconds of each operator of one forward and backward pass on one device, fused attention by PyTorch's own kernels.

    Args:
        ops: operators of one sample.
        device: the accelerator.
        micro_batch: samples in the pass.
        compute_dtype: dtype of the matrix products: fp32, tf32, fp16, bf16, fp8.
        calibration: constants; the shipped ones by default.
        tp_degree: tensor-parallel degree the operators are divided by (without sequence parallelism).
        in_order: whether their model is one that `keeps_order`.

    Raises:
        ValueError: unknown dtype, or a size that isn't positive.
    """
    if compute_dtype not in ELEMENT_BYTES:
        raise ValueError(f"unknown dtype {compute_dtype!r}; known: {', '.join(ELEMENT_BYTES)}")
    if micro_batch <= 0 or tp_degree < 1:
        raise ValueError(f"micro_batch {micro_batch} and tp_degree {tp_degree} must be positive")
    n = len(ops)
    calibration = calibration or load_calibration()
    constants = calibration.table([("", device.family, device.name)])
    low = np.full(n, int(compute_dtype in ("fp8", "fp4")), dtype=np.int64)
    ones = np.ones(n)
    product_peak = peak_flops_per_s(device, compute_dtype) * np.where(
        ops.kind == ATTENTION, attention_kernel_share("flash2", device.family), 1.0
    )
    shapes = device_shapes(
        ops, Split(samples=ones * micro_batch, tp_degree=ones * tp_degree, ep_degree=ones, sequence_parallel=0.0 * ones),
        peaks=(product_peak, ones * peak_flops_per_s(device, compute_dtype, convolution=True)),
        memory_bytes_per_s=ones * device.memory_bytes_per_s, num_sms=ones * device.num_multiprocessors,
        element_bytes=ones * ELEMENT_BYTES[compute_dtype], low_precision=low, expert=np.zeros(n, dtype=np.int64),
        scalar=_scalar(device, compute_dtype, n), in_maps=np.full(n, in_order or bool((ops.kind == CONVOLUTION).any())),
    )  # fmt: skip
    return shape_seconds(shapes, constants, np.zeros(n, dtype=np.int64))


TERMS = (shape_seconds,)
