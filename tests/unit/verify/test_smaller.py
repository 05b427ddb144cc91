"""Models as they are verified: nothing is dropped, however a module calls attention."""

import subprocess
import sys

RUN = """
import torch
from torch import nn
from advisor.verify.smaller import without_dropout
without_dropout()
layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)
attention = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
x = torch.randn(2, 5, 16)
mask = nn.Transformer.generate_square_subsequent_mask(5)
assert torch.equal(layer(x, src_mask=mask, is_causal=True), layer(x, src_mask=mask, is_causal=True))
assert torch.equal(attention(x, x, x, need_weights=False)[0], attention(x, x, x, need_weights=False)[0])
assert torch.equal(attention(x, x, x)[0], attention(x, x, x)[0])
"""


def test_attention_modules_drop_nothing():
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=False)  # it changes torch for good
    assert done.returncode == 0, done.stderr
