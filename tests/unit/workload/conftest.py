"""Hand-made profiles: rows as a capture would write them, small enough to check by hand."""

import math
from dataclasses import dataclass, field

import pytest

from advisor.profiling.schema import MODULE_COLUMNS, OPERATOR_COLUMNS, PARAMETER_COLUMNS, ProfileMeta, StepProfile, frame

CLASSES = {
    "addmm": "matmul", "mm": "matmul", "bmm": "matmul", "embedding": "embedding", "native_layer_norm": "normalization", "convolution": "convolution",
    "convolution_backward": "convolution", "scaled": "attention",
}  # fmt: skip


@dataclass
class Draft:
    """Collects rows; bytes follow from shapes at 4 bytes an element."""

    batch: int = 2
    ops: list = field(default_factory=list)
    modules: dict = field(default_factory=dict)
    params: list = field(default_factory=list)

    def op(self, module, name, inputs, outputs, *, phase="forward", weight="", flops=0, saved=0, op_class="", dtype="fp32", causal=0):
        def size(shapes):
            return 4 * sum(math.prod(s) for s in shapes)

        self.ops.append({
            "call": len(self.ops), "module": module, "phase": phase, "operator": f"aten.{name}", "op_class": op_class or CLASSES.get(name, "elementwise"),
            "input_shapes": inputs, "output_shapes": outputs, "dtype": dtype, "weight": weight, "flops": flops, "read_bytes": size(inputs),
            "written_bytes": size(outputs), "saved_bytes": saved, "causal": causal, "num_kernels": 1, "device": "cpu", "copy_from": "",
            "copy_to": "", "measured_s": float("nan"),
        })  # fmt: skip

    def module(self, path, class_name, *, calls=1, x=(), y=(), group=-1, layout=""):
        self.modules[path] = {"module": path, "class_name": class_name, "order": len(self.modules) if calls else -1, "num_calls": calls,
                              "num_params": 0, "total_params": 0, "input_shape": list(x), "output_shape": list(y), "input_group": group,
                              "weight_shape": [], "weight_layout": layout}  # fmt: skip

    def param(self, name, shape, *, aliases=(), trainable=True, got_grad=True):
        module = name.rpartition(".")[0]
        self.params.append({"name": name, "aliases": list(aliases), "module": module, "shape": list(shape), "dtype": "fp32",
                            "num_elements": math.prod(shape), "requires_grad": trainable, "got_grad": got_grad})  # fmt: skip

    def linear(self, path, n_in, n_out, tokens, *, group=-1, saved=True, bias=False):
        """Module, parameters and forward row of a linear layer on (batch, tokens, n_in)."""
        self.module(path, "Linear", x=(self.batch, tokens, n_in), y=(self.batch, tokens, n_out), group=group, layout="out_in")
        self.param(f"{path}.weight", (n_out, n_in))
        if bias:
            self.param(f"{path}.bias", (n_out,))
        rows = self.batch * tokens
        self.op(path, "mm", [[rows, n_in], [n_in, n_out]], [[rows, n_out]], weight=f"{path}.weight", flops=2 * rows * n_in * n_out,
                saved=4 * rows * n_in if saved else 0)  # fmt: skip

    def linear_backward(self, path, n_in, n_out, tokens):
        rows, flops = self.batch * tokens, 2 * self.batch * tokens * n_in * n_out
        self.op(path, "mm", [[n_out, rows], [rows, n_in]], [[n_out, n_in]], phase="backward", flops=flops)
        self.op(path, "mm", [[rows, n_out], [n_out, n_in]], [[rows, n_in]], phase="backward", weight=f"{path}.weight", flops=flops)

    def profile(self, **meta):
        settings = {"script": "model.py", "model_class": "Toy", "batch_size": self.batch, "optimizer": "adamw",
                    "optimizer_state_bytes_per_param": 8.0, "param_dtype": "fp32",
                    "num_params": sum(p["num_elements"] for p in self.params)}  # fmt: skip
        return StepProfile(
            meta=ProfileMeta(**(settings | meta)), operators=frame(self.ops, OPERATOR_COLUMNS),
            modules=frame(list(self.modules.values()), MODULE_COLUMNS), parameters=frame(self.params, PARAMETER_COLUMNS),
        )  # fmt: skip


def decoder(*, layers=4, width=16, heads=4, kv_heads=2, ffn=40, vocab=2048, seq=8, batch=2, tied=False, frozen_input=False):
    """A gated decoder with grouped queries and a vocabulary head, forward and backward."""
    d = Draft(batch=batch)
    rows, hidden, head = batch * seq, [batch, seq, width], width // heads
    kv = kv_heads * head
    d.module("", "Decoder")
    d.module("embed", "Embedding", x=(batch, seq), y=hidden, layout="embedding")
    d.param("embed.weight", (vocab, width), aliases=("head.weight",) if tied else ())
    d.op("embed", "embedding", [[vocab, width], [batch, seq]], [hidden], weight="embed.weight")
    for i in range(layers):
        _block_forward(d, f"layers.{i}", hidden, heads, head, kv_heads, kv, ffn, group=10 * i)
    d.module("norm", "LayerNorm", x=hidden, y=hidden)
    d.param("norm.weight", (width,))
    d.op("norm", "native_layer_norm", [hidden, [width]], [hidden], weight="norm.weight", saved=4 * rows * width)
    if tied:
        d.module("head", "Linear", x=hidden, y=[batch, seq, vocab], layout="out_in")
        d.op("head", "mm", [[rows, width], [width, vocab]], [[rows, vocab]], weight="embed.weight", flops=2 * rows * width * vocab, saved=4 * rows * width)  # fmt: skip
    else:
        d.linear("head", width, vocab, seq)
    d.op("", "_log_softmax", [[rows, vocab]], [[rows, vocab]], op_class="reduction", saved=4 * rows * vocab)
    d.op("", "_log_softmax_backward_data", [[rows, vocab]], [[rows, vocab]], op_class="reduction", phase="backward")
    d.op("head", "mm", [[vocab, rows], [rows, width]], [[vocab, width]], phase="backward", flops=2 * rows * width * vocab)
    d.op("head", "mm", [[rows, vocab], [vocab, width]], [[rows, width]], phase="backward", flops=2 * rows * width * vocab,
         weight="embed.weight" if tied else "head.weight")  # fmt: skip
    d.op("norm", "native_layer_norm_backward", [hidden, hidden, [width]], [hidden, [width]], phase="backward", op_class="normalization", weight="norm.weight")  # fmt: skip
    for i in reversed(range(layers)):
        _block_backward(d, f"layers.{i}", hidden, heads, head, kv, ffn, first=frozen_input and i == 0)
    d.op("embed", "embedding_dense_backward", [hidden, [batch, seq]], [[vocab, width]], phase="backward", op_class="embedding")
    return d.profile(seq_len=seq, vocab_size=vocab, num_heads=heads, num_kv_heads=kv_heads, logits_shape=[rows, vocab],
                     input_bytes=8 * rows, tied=[["embed.weight", "head.weight"]] if tied else [])  # fmt: skip


def _block_forward(d, path, hidden, heads, head, kv_heads, kv, ffn, *, group):
    batch, seq, width = hidden
    tensor = 4 * batch * seq * width
    d.module(path, "Layer", x=hidden, y=hidden)
    d.module(f"{path}.norm", "LayerNorm", x=hidden, y=hidden)
    d.param(f"{path}.norm.weight", (width,))
    d.op(f"{path}.norm", "native_layer_norm", [hidden, [width]], [hidden], weight=f"{path}.norm.weight", saved=tensor)
    d.module(f"{path}.attn", "Attention", x=hidden, y=hidden)
    d.linear(f"{path}.attn.q", width, width, seq, group=group)
    d.linear(f"{path}.attn.k", width, kv, seq, group=group, saved=False)
    d.linear(f"{path}.attn.v", width, kv, seq, group=group, saved=False)
    q, k = [batch, heads, seq, head], [batch, kv_heads, seq, head]
    d.op(f"{path}.attn", "_scaled_dot_product_flash_attention", [q, k, k], [q], op_class="attention", causal=1, saved=2 * tensor,
         flops=4 * batch * heads * seq * seq * head)  # fmt: skip
    d.linear(f"{path}.attn.o", width, width, seq, saved=False)
    d.op(path, "add", [hidden, hidden], [hidden])
    d.module(f"{path}.mlp", "MLP", x=hidden, y=hidden)
    d.linear(f"{path}.mlp.gate", width, ffn, seq, group=group + 1)
    d.linear(f"{path}.mlp.up", width, ffn, seq, group=group + 1, saved=False)
    inner = [batch, seq, ffn]
    d.op(f"{path}.mlp", "silu", [inner], [inner], saved=4 * batch * seq * ffn)
    d.op(f"{path}.mlp", "mul", [inner, inner], [inner], saved=8 * batch * seq * ffn)
    d.linear(f"{path}.mlp.down", ffn, width, seq)
    d.op(path, "add", [hidden, hidden], [hidden])


def _block_backward(d, path, hidden, heads, head, kv, ffn, *, first):
    batch, seq, width = hidden
    inner = [batch, seq, ffn]
    d.linear_backward(f"{path}.mlp.down", ffn, width, seq)
    d.op(f"{path}.mlp", "mul", [inner, inner], [inner], phase="backward")
    d.op(f"{path}.mlp", "silu_backward", [inner, inner], [inner], phase="backward")
    d.linear_backward(f"{path}.mlp.up", width, ffn, seq)
    d.linear_backward(f"{path}.mlp.gate", width, ffn, seq)
    d.linear_backward(f"{path}.attn.o", width, width, seq)
    q = [batch, heads, seq, head]
    d.op(f"{path}.attn", "_scaled_dot_product_flash_attention_backward", [q, q, q, q, q], [q, q, q], phase="backward", op_class="attention",
         causal=1, flops=10 * batch * heads * seq * seq * head)  # fmt: skip
    for name, n_out in (("v", kv), ("k", kv), ("q", width)):
        if first:  # nothing before the first block is trained: no input gradient
            rows = batch * seq
            d.op(
                f"{path}.attn.{name}",
                "mm",
                [[n_out, rows], [rows, width]],
                [[n_out, width]],
                phase="backward",
                flops=2 * rows * width * n_out,
            )
        else:
            d.linear_backward(f"{path}.attn.{name}", width, n_out, seq)
    d.op(
        f"{path}.norm",
        "native_layer_norm_backward",
        [hidden, hidden, [width]],
        [hidden, [width]],
        phase="backward",
        op_class="normalization",
    )


def conv_net(*, batch=4):
    """Stem, three residual blocks of which the first changes the width, and a classifier."""
    d = Draft(batch=batch)
    d.module("", "ConvNet")
    image = [batch, 3, 8, 8]
    d.module("stem", "Conv2d", x=image, y=[batch, 8, 8, 8], layout="convolution")
    d.param("stem.weight", (8, 3, 3, 3))
    d.op("stem", "convolution", [image, [8, 3, 3, 3]], [[batch, 8, 8, 8]], weight="stem.weight", flops=2 * batch * 64 * 8 * 27)
    width = 8
    for i in range(3):
        x, y = [batch, width, 8, 8], [batch, 16, 8, 8]
        d.module(f"blocks.{i}", "Block", x=x, y=y)
        for j, n_in in enumerate((width, 16)):
            path = f"blocks.{i}.conv{j}"
            d.module(path, "Conv2d", x=[batch, n_in, 8, 8], y=y, layout="convolution")
            d.param(f"{path}.weight", (16, n_in, 3, 3))
            d.op(path, "convolution", [[batch, n_in, 8, 8], [16, n_in, 3, 3]], [y], weight=f"{path}.weight", flops=2 * batch * 64 * 16 * n_in * 9)  # fmt: skip
        width = 16
    d.module("fc", "Linear", x=[batch, 16], y=[batch, 10], layout="out_in")
    d.param("fc.weight", (10, 16))
    d.op("fc", "mm", [[batch, 16], [16, 10]], [[batch, 10]], weight="fc.weight", flops=2 * batch * 160)
    for i in reversed(range(3)):
        for j in (1, 0):
            n_in = 8 if i == j == 0 else 16
            x, y, w = [batch, n_in, 8, 8], [batch, 16, 8, 8], [16, n_in, 3, 3]
            d.op(f"blocks.{i}.conv{j}", "convolution_backward", [y, x, w], [x, w], phase="backward", flops=4 * batch * 64 * 16 * n_in * 9)
    return d.profile(input_shapes=[image], optimizer="sgd", optimizer_state_bytes_per_param=4.0)


@pytest.fixture
def make_decoder():
    return decoder


@pytest.fixture
def make_conv_net():
    return conv_net


@pytest.fixture
def draft():
    return Draft
