"""Scripts that declare functions: what they may return, and the sentence that names the one that is wrong."""

import numpy as np
import pytest
import torch

from advisor.profiling.child import one_line
from advisor.profiling.functions import ContractError, train


def declared(**changes):
    functions = {"build_model": lambda: torch.nn.Linear(4, 3), "make_batch": lambda batch_size: torch.randn(batch_size, 4)}
    return {**functions, **changes}


async def coroutine():
    return torch.nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"build_model": lambda: None}, "build_model() must return a torch.nn.Module, and returned None"),
        ({"build_model": 3}, "build_model must be a function"),
        ({"build_model": coroutine}, "`async def`"),
        ({"build_model": lambda config: config}, "build_model() can't be called with 0 arguments"),
        ({"build_model": lambda: torch.nn.ReLU()}, "none of its parameters requires a gradient"),
        ({"make_batch": 3}, "make_batch must be a function"),
        ({"make_batch": lambda _: None}, "make_batch(batch_size) must return a tensor, or a tuple or dict of tensors, and returned None"),
        ({"make_batch": lambda _: "text"}, "of type str"),
        ({"make_batch": lambda _: np.zeros(3)}, "of type ndarray"),
        ({"make_batch": lambda a, b: (a, b)}, "make_batch(batch_size) can't be called with 1 argument:"),
        ({"loss_fn": lambda model, batch: 3.0}, "loss_fn(model, batch) must return a scalar tensor, and returned an object of type float"),
        ({"loss_fn": lambda model, batch: model(batch)}, "of shape [8, 3]"),
        ({"loss_fn": lambda model, batch: model(batch).sum().detach()}, "no gradient"),
        ({"loss_fn": lambda model: model}, "loss_fn(model, batch) can't be called with 2 arguments"),
        ({"build_optimizer": lambda model: None}, "build_optimizer(model) must return a torch optimizer, and returned None"),
        ({"build_optimizer": lambda model: ([1], [None])}, "of type tuple"),
    ],
)
def test_a_wrong_function_is_named_with_what_it_must_return(changes, words):
    with pytest.raises(ContractError) as error:
        train(declared(**changes), "build_model", None, num_steps=1, device="cpu")
    assert words in str(error.value)
    assert "make_batch(batch_size) returns" in error.value.hint


def test_right_functions_train():
    model = torch.nn.Linear(4, 3)
    before = model.weight.detach().clone()
    optimizers = {"build_optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.1)}
    losses = {"loss_fn": lambda model, batch: model(batch["x"]).square().mean()}
    functions = declared(build_model=lambda: model, make_batch=lambda n=2: {"x": torch.randn(n, 4)}, **losses, **optimizers)
    train(functions, "build_model", None, num_steps=1, device="cpu")
    assert not torch.equal(model.weight, before)


def test_what_a_script_says_becomes_part_of_one_sentence():
    assert one_line("a\x1b[31m red\x1b[0m\r\n\tb \x1b]0;title\x07c\ud800") == "a red b c?"
    assert len(one_line("z" * 100_000)) == 300
