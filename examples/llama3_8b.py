"""Pretrain a model of Llama-3-8B's shape (transformers config, random weights) on sequences of 8,192 tokens in bf16.

advise examples/llama3_8b.py --gpu h100-sxm-80gb --nodes 2 --inter ib-ndr-8x
python examples/llama3_8b.py --tiny            # the same code, a toy that runs on a laptop
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(**(TINY if args.tiny else LLAMA3_8B), tie_word_embeddings=False, use_cache=False)
    model = LlamaForCausalLM(config).to(getattr(torch, args.dtype)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(args.steps):
        tokens = torch.randint(config.vocab_size, (args.micro_batch, config.max_position_embeddings), device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
