"""What a GPU runs where a CPU trace shows something else: kernels per operator, dropout as one kernel with a mask of one byte.

Counts are those of eager PyTorch 2.x with CUDA libraries, read from its native CUDA sources (a kernel per pass; sorts and
compactions launch several). They feed the launch-overhead term, where an error of one kernel in ten does not matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from advisor.workload.records import Op, num_elements

#: Kernels per call; names without "aten." and trailing underscores. Everything else: what the profile says (1).
NUM_KERNELS = {
    "convolution_backward": 2.0,  # input and weight gradients
    "native_layer_norm_backward": 3.0,  # input gradient, then weight and bias in two passes
    "_fused_rms_norm_backward": 2.0,
    "native_group_norm": 3.0,
    "native_group_norm_backward": 5.0,
    "embedding_dense_backward": 6.0,  # sort of the indices, segment offsets, accumulation
    "_scaled_dot_product_flash_attention_backward": 3.0,  # row sums, gradients, conversion of the query gradient
    "_scaled_dot_product_flash_attention_for_cpu_backward": 3.0,
    "_scaled_dot_product_efficient_attention_backward": 3.0,
    "_scaled_dot_product_cudnn_attention_backward": 3.0,
    "nll_loss_backward": 2.0,  # zeros, then scatter
    "topk": 4.0,
    "sort": 4.0,
    "nonzero": 4.0,
    "index_put": 6.0,
    "cumsum": 2.0,
    "randperm": 4.0,
}


def gpu_kernels(name: str, traced: float) -> float:
    """Kernels launched by one call of an operator.

    Args:
        name: operator without "aten.".
        traced: what the profile says.
    """
    return max(NUM_KERNELS.get(name.rstrip("_"), 1.0), traced)


def with_fused_dropout(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Rows with dropout as `native_dropout`, which CUDA has and the CPU spells as a random mask, its scaling and a product.

    The fused kernel keeps one byte per element instead of a mask in the tensor's dtype.
    """
    rows = list(ops)
    found: list[Op] = []
    i = 0
    while i < len(rows):
        names = [op.name for op in rows[i : i + 3]]
        product = rows[min(i + 2, len(rows) - 1)]
        if names == ["bernoulli_", "div_", "mul"] and len({op.module for op in rows[i : i + 3]}) == 1 and len(product.inputs) == 2:
            elements = num_elements(product.outputs[0])
            found.append(
                dataclasses.replace(
                    product,
                    name="native_dropout",
                    inputs=product.inputs[:1],
                    read_bytes=product.written_bytes,
                    written_bytes=product.written_bytes + elements,
                    saved_bytes=min(product.saved_bytes, elements),
                )
            )
            i += 3
        else:
            found.append(rows[i])
            i += 1
    return tuple(found)
