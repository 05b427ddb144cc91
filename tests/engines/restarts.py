"""The tiny transformer with dropout and batches from NumPy; one rank can be killed at a step, once there is a checkpoint."""

import os
import signal
import time
from pathlib import Path

import numpy
import tiny_transformer
import torch
from tiny_transformer import SEQ, VOCAB, Tiny

steps = 0


class Dropping(Tiny):
    def forward(self, tokens):
        return torch.nn.functional.dropout(super().forward(tokens), float(os.environ.get("DROPOUT", "0")), self.training)


def build_model():
    return Dropping()


def make_batch(batch_size=4):
    global steps
    steps += 1
    if os.environ.get("KILLED") == f"{os.environ['RANK']}:{steps}":  # "rank:step"
        while not Path(os.environ["CHECKPOINTS"], "latest").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return {"tokens": torch.from_numpy(numpy.random.randint(VOCAB, size=(batch_size, SEQ + 1)))}


def make_eval_batch(batch_size=4):
    return tiny_transformer.make_batch(batch_size)


def loss_fn(model, batch):
    return tiny_transformer.loss_fn(model, batch)


def build_optimizer(model):
    return tiny_transformer.build_optimizer(model)
