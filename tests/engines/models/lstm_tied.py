"""An LSTM language model whose decoder is tied to its embedding."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, LAYERS, SEQ = 96, 32, 2, 12


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.decoder = nn.Linear(WIDTH, VOCAB)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens):
        hidden, _ = self.rnn(self.encoder(tokens))
        return self.decoder(hidden)


def build_model():
    return LanguageModel()


def make_batch(batch_size=4):
    tokens = torch.randint(VOCAB, (batch_size, SEQ + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)
