"""Plans with stages for the small models, and a wrapper that counts what stages send each other.

python pipeline_cells.py train.py --steps 3
"""

from __future__ import annotations

import collections
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parent / "models"

#: Layers of each model by name, what runs before and after them, and weights with two names.
CHAINS: dict[str, dict[str, Any]] = {
    "gpt2": {"before": ["wte", "wpe"], "layers": [f"h.{i}" for i in range(4)], "after": ["ln_f", "lm_head"], "tied": [["wte.weight", "lm_head.weight"]]},
    "overflow": {"before": ["wte", "wpe"], "layers": [f"h.{i}" for i in range(4)], "after": ["ln_f", "lm_head"], "tied": [["wte.weight", "lm_head.weight"]]},
    "llama_gqa": {
        "before": ["model.embed_tokens"], "layers": [f"model.layers.{i}" for i in range(4)], "after": ["model.norm", "lm_head"],
        "tp_pairs": [{"column": [f"self_attn.{n}_proj" for n in "qkv"], "row": ["self_attn.o_proj"], "attention": True},
                     {"column": ["mlp.gate_proj", "mlp.up_proj"], "row": ["mlp.down_proj"]}],
        "vocab_size": 128, "whole_logits": "", "tp_tables": [{"module": "model.embed_tokens", "kind": "embedding", "rows": 128}, {"module": "lm_head", "kind": "head", "rows": 128}],
    },
    "bert": {"before": ["word", "position", "norm"], "layers": ["layer.0", "layer.1"], "after": ["decoder"]},
    "moe": {"before": ["embed"], "layers": ["layers.0", "layers.1"], "after": ["norm", "head"], "num_experts": 4},
}  # fmt: skip


def model_facts(name: str, last_layers: list[int]) -> dict[str, Any]:
    """The report's "model", its stages ending after the layers of these numbers (and the last one with the model)."""
    chain = dict(CHAINS[name])
    before, layers, after = (chain.pop(key) for key in ("before", "layers", "after"))
    starts = [0, *(number + 1 for number in last_layers)]
    stages = [layers[a:b] for a, b in zip(starts, [*starts[1:], len(layers)], strict=True)]
    stages[0], stages[-1] = before + stages[0], stages[-1] + after
    return {"block_paths": layers, "stages": stages, "can_pipeline": True, **chain}


@dataclass
class Sent:
    """Activations and gradients that this rank has sent, by their number of elements."""

    sizes: collections.Counter[int]


def count_sends() -> Sent:
    """Count from now on."""
    import torch.distributed as dist

    sent, plain = Sent(sizes=collections.Counter()), dist.P2POp.__init__

    def counting(self, op, tensor, *args, **kwargs) -> None:
        if op is dist.isend and tensor.is_floating_point():
            sent.sizes[tensor.numel()] += 1
        plain(self, op, tensor, *args, **kwargs)

    dist.P2POp.__init__ = counting
    return sent


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    counted = count_sends()
    runpy.run_path(sys.argv[0], run_name="__main__")
    print(f"sent {dict(counted.sizes)}")
