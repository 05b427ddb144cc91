"""DDP 4: the model of examples/llama3_8b.py for torchtitan 0.3, found by `--module titan_config --config train`.

What the plan doesn't know is yours to set: tokenizer, data set, learning rate, number of steps, base of the rotary positions.
"""

from functools import partial

from torch import nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

LAYERS, WIDTH, INNER, HEADS, KV_HEADS = 32, 4096, 14336, 32, 8
VOCAB, SEQ_LEN = 128256, 8192
LINEAR_INIT = {"weight": partial(nn.init.trunc_normal_, std=0.02)}


def norm() -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=WIDTH, param_init={"weight": nn.init.ones_})


def layer() -> Llama3TransformerBlock.Config:
    rope = ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=SEQ_LEN, theta=10000)
    return Llama3TransformerBlock.Config(
        attention_norm=norm(),
        ffn_norm=norm(),
        attention=make_gqa_config(
            dim=WIDTH,
            n_heads=HEADS,
            n_kv_heads=KV_HEADS,
            wqkv_param_init=LINEAR_INIT,
            wo_param_init=LINEAR_INIT,
            inner_attention=get_attention_config("flex"),
            rope=rope,
        ),
        feed_forward=make_ffn_config(dim=WIDTH, hidden_dim=INNER, w1_param_init=LINEAR_INIT, w2w3_param_init=LINEAR_INIT),
    )


def train() -> Trainer.Config:
    model = Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCAB,
        enable_weight_tying=True,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=WIDTH, param_init={"weight": nn.init.normal_}),
        norm=norm(),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCAB, param_init=LINEAR_INIT),
        layers=[layer() for _ in range(LAYERS)],
    )
    return Trainer.Config(
        model_spec=ModelSpec(
            name="llama3",
            flavor="plan",
            model=model,
            parallelize_fn=parallelize_llama,
            pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=None,
            state_dict_adapter=Llama3StateDictAdapter,
        ),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB),
        hf_assets_path="./assets/tokenizer",
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        optimizer=default_adamw(lr=3e-4),
        checkpoint=CheckpointManager.Config(interval=500),
        activation_checkpoint=None,
    )
