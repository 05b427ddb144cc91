"""A script that trains a transformers GPT-2 (fused Conv1D weights) in parameter groups and saves its weights: `saves.py weights.pt`."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
sizes = {"vocab_size": 96, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))
decay = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
tokens = torch.randint(96, (12, 16), generator=torch.Generator().manual_seed(1))
for (batch,) in DataLoader(TensorDataset(tokens), batch_size=4):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.6f}")
torch.save(model.state_dict(), sys.argv[1])
