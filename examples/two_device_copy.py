"""A hand-split model: the encoder on one GPU, the decoder on another, activations copied between them each step.

People write this when a model does not fit one card. Only one of the two GPUs works at a time; the advisor says what to do instead.

    advise examples/two_device_copy.py --gpu rtx-4090 --gpus-per-node 2
"""

import torch
from torch import nn

WIDTH, DEPTH, BATCH, SEQ = 1024, 8, 16, 512


def stack(depth):
    layers = (nn.TransformerEncoderLayer(WIDTH, nhead=16, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(depth))
    return nn.Sequential(*layers)


class SplitModel(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first_device, self.second_device = first, second
        self.embed = nn.Embedding(32000, WIDTH).to(first)
        self.encoder = stack(DEPTH).to(first)
        self.decoder = stack(DEPTH).to(second)
        self.head = nn.Linear(WIDTH, 32000).to(second)

    def forward(self, tokens):
        x = self.encoder(self.embed(tokens.to(self.first_device)))
        x = self.decoder(x.to(self.second_device))  # device-to-device copy, and its gradient copied back
        return self.head(x)


def main():
    two_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= 2
    first, second = ("cuda:0", "cuda:1") if two_gpus else ("cpu", "cpu")
    model = SplitModel(first, second)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for step in range(20):
        tokens = torch.randint(32000, (BATCH, SEQ))
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.to(second).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
