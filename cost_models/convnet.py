"""Workload of ResNet-50 from its published architecture (He et al. 2015, stride on the 3 x 3 convolution), for published runs.

Convolutions are implicit products: rows = output pixels, columns = output channels, inner = input channels x kernel. Batch
normalisation and ReLU are priced by their traffic as eager PyTorch runs them. Other convolutional networks come from a traced script.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cost_models.types import BATCH_DIMS, OP_CLASSES, PHASES, PRICING_KINDS, TP_SPLITS, LayerGroup, OpTable, OptimizerSpec, Workload

_STAGES = ((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7))  # blocks, width, output side
_DTYPES = {
    "fp32": ("fp32", 4.0),
    "tf32": ("tf32", 4.0),
    "fp16": ("fp16", 2.0),
    "bf16": ("bf16", 2.0),
    "amp": ("bf16", 2.0),
    "amp16": ("fp16", 2.0),
}


@dataclass(slots=True)
class _Layers:
    """Collects operators and parameters of one group; sizes per image."""

    element_bytes: float
    rows: list[tuple[float, ...]] = field(default_factory=list)
    num_params: float = 0.0
    saved_bytes: float = 0.0

    def _add(
        self, op_class: str, kind: str, phase: str, batch_dim: str, *, sizes: tuple[float, float, float], moved: float, fixed: float
    ) -> None:
        codes = (
            OP_CLASSES.index(op_class),
            PRICING_KINDS.index(kind),
            PHASES.index(phase),
            BATCH_DIMS.index(batch_dim),
            TP_SPLITS.index("none"),
        )
        self.rows.append((*codes, *sizes, 1.0, 1.0, moved, fixed, 1.0))

    def convolution(self, side_in: int, side: int, channels_in: int, channels: int, kernel: int) -> None:
        """A convolution with batch normalisation; forward, input gradient, weight gradient."""
        pixels, pixels_in, inner = float(side * side), float(side_in * side_in), float(channels_in * kernel * kernel)
        weights, b = inner * channels, self.element_bytes
        moved = b * (pixels_in * channels_in + pixels * channels)
        self._add("convolution", "convolution", "forward", "m", sizes=(pixels, channels, inner), moved=moved, fixed=b * weights)
        if channels_in > 3:
            self._add("convolution", "convolution", "backward", "m", sizes=(pixels, inner, channels), moved=moved, fixed=b * weights)
        self._add("convolution", "convolution", "backward", "k", sizes=(channels, inner, pixels), moved=moved, fixed=b * weights)
        elements = pixels * channels
        self._traffic("normalization", 3 * b * elements, 5 * b * elements)
        self.num_params += weights + 2 * channels
        self.saved_bytes += 2 * b * elements

    def relu(self, elements: float) -> None:
        self._traffic("elementwise", 2 * self.element_bytes * elements, 3 * self.element_bytes * elements)

    def _traffic(self, op_class: str, forward: float, backward: float) -> None:
        for phase, moved in (("forward", forward), ("backward", backward)):
            self._add(op_class, "memory", phase, "none", sizes=(1.0, 1.0, 1.0), moved=moved, fixed=0.0)

    def linear(self, inner: int, out: int) -> None:
        for phase, dim, sizes in (
            ("forward", "m", (1, out, inner)),
            ("backward", "m", (1, inner, out)),
            ("backward", "k", (out, inner, 1)),
        ):
            self._add("matmul", "gemm", phase, dim, sizes=sizes, moved=0.0, fixed=0.0)
        self.num_params += inner * out + out

    def group(self, name: str, *, repeats: int = 1, boundary: float = 0.0, block: bool = True) -> LayerGroup:
        columns = np.array(self.rows, dtype=np.float64).T
        names = list(OpTable.__dataclass_fields__)
        table = OpTable(**{n: c.astype(np.int64) if i < 5 else c for i, (n, c) in enumerate(zip(names, columns, strict=True))})
        return LayerGroup(
            name=name, num_repeats=repeats, ops=table, num_params=self.num_params, num_trainable_params=self.num_params,
            saved_other_bytes=self.saved_bytes, selective_other_bytes=self.saved_bytes, boundary_bytes=boundary * self.element_bytes,
            temporary_bytes=self.saved_bytes / 2, can_recompute=block, can_cut=block,
        )  # fmt: skip


def _bottleneck(element_bytes: float, side_in: int, side: int, channels_in: int, width: int) -> _Layers:
    """1 x 1, 3 x 3 (with the stride), 1 x 1 to four times the width, and a projection where the shape changes."""
    layers = _Layers(element_bytes)
    layers.convolution(side_in, side_in, channels_in, width, 1)
    layers.relu(side_in * side_in * width)
    layers.convolution(side_in, side, width, width, 3)
    layers.relu(side * side * width)
    layers.convolution(side, side, width, 4 * width, 1)
    if side_in != side or channels_in != 4 * width:
        layers.convolution(side_in, side, channels_in, 4 * width, 1)
    layers.relu(2.0 * side * side * 4 * width)  # residual sum and ReLU
    return layers


def resnet50_workload(*, precision: str = "amp16", name: str = "resnet50") -> Workload:
    """ResNet-50 on 224 x 224 images with SGD and momentum.

    Args:
        precision: fp32, tf32, fp16, bf16, amp (bf16) or amp16 (fp16); mixed precision keeps fp32 weights.
        name: shown in reports.

    Raises:
        ValueError: unknown precision.
    """
    if precision not in _DTYPES:
        raise ValueError(f"unknown precision {precision!r}; known: {', '.join(_DTYPES)}")
    dtype, element = _DTYPES[precision]
    stem = _Layers(element)
    stem.convolution(224, 112, 3, 64, 7)
    stem.relu(112 * 112 * 64)
    groups, channels, side_in = [stem.group("stem", boundary=56 * 56 * 64, block=False)], 64, 56
    for index, (blocks, width, side) in enumerate(_STAGES, start=1):
        output = float(side * side * 4 * width)
        groups.append(_bottleneck(element, side_in, side, channels, width).group(f"layer{index}.0", boundary=output))
        channels, side_in = 4 * width, side
        groups.append(_bottleneck(element, side, side, channels, width).group(f"layer{index}.*", repeats=blocks - 1, boundary=output))
    head = _Layers(element)
    head.linear(2048, 1000)
    groups.append(head.group("fc", block=False))
    num_params = sum(g.num_params * g.num_repeats for g in groups)
    return Workload(
        name=name, groups=tuple(groups), num_params=num_params, num_trainable_params=num_params,
        optimizer=OptimizerSpec(name="sgd", state_bytes_per_param=4.0, num_kernels=20.0), compute_dtype=dtype, param_bytes=4.0, master_bytes=0.0,
        grad_bytes=4.0, input_bytes=3 * 224 * 224 * element, model_flops=3 * 2 * 4.09e9, can_pipeline=True,
    )  # fmt: skip
