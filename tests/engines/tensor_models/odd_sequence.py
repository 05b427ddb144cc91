"""nano_gpt.py on one token less: a sequence that two ranks can't share out evenly."""

import runpy
from pathlib import Path

nano = runpy.run_path(str(Path(__file__).with_name("nano_gpt.py")))
build_model, loss_fn, build_optimizer = nano["build_model"], nano["loss_fn"], nano["build_optimizer"]


def make_batch(batch_size=4):
    tokens, targets = nano["make_batch"](batch_size)
    return tokens[:, 1:], targets[:, 1:]
