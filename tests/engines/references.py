"""The same trainings on one process, written by hand: what the distributed runs must reproduce."""

import importlib.util
import sys
from pathlib import Path

import torch


def load(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def functions(path, micro_batch, num_pieces, steps=3):
    """Four-function scripts: the global batch in pieces, as batch normalisation sees only a piece at a time."""
    torch.manual_seed(0)
    user = load(path)
    model = user.build_model()
    optimizer = user.build_optimizer(model)
    for _ in range(steps):
        batch = user.make_batch(micro_batch * num_pieces)
        items = list(batch.items() if isinstance(batch, dict) else enumerate(batch))
        total = 0.0
        for i in range(num_pieces):
            piece = {k: v[i * micro_batch : (i + 1) * micro_batch] for k, v in items}
            piece = piece if isinstance(batch, dict) else list(piece.values())
            loss = user.loss_fn(model, piece) / num_pieces
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {total:.6f}")


def llama(path, num_ranks, steps=3):
    """`llama3_8b.py --tiny` on the batches that its ranks draw: rank 0 goes on with seed 0, rank r starts from seed r."""
    from transformers import LlamaForCausalLM

    user = load(path)
    torch.manual_seed(0)
    config = user.LlamaConfig(**user.TINY, tie_word_embeddings=False, use_cache=False)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    others = [torch.Generator().manual_seed(rank) for rank in range(1, num_ranks)]
    shape = (1, config.max_position_embeddings)
    for _ in range(steps):
        draws = [torch.randint(config.vocab_size, shape), *(torch.randint(config.vocab_size, shape, generator=g) for g in others)]
        tokens = torch.cat(draws)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    kind, path, *numbers = sys.argv[1:]
    {"functions": functions, "llama": llama}[kind](path, *map(int, numbers))
