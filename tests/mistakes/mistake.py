"""A catalogue of mistakes: what a program with one must end in, and the programs' common parts.

Each program has a mistake, or a habit of another framework. It trains as on one device all the
same, ends in an error, or warns; the message names the remedy. No program may continue silently
with other results than one device has.
"""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mirror

X = torch.linspace(-1, 1, 24).reshape(8, 3)
Y = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])


def each(table):
    """Parametrizes a test by the values of a table, under their names."""
    return pytest.mark.parametrize("case", table.values(), ids=table.keys())


def check_refusal(case, *args):
    """Calls the program of a case with ``args``: it must end in an error.

    Args:
        case: ``(program, type of the error, word of its message or notes, ...)``.
    """
    program, kind, *words = case
    refused(kind, *words)(program)(*args)


def refused(kind, *words):
    """Decorates a program that must end in an error; its message and notes have the words."""

    def decorate(program):
        @functools.wraps(program)
        def test(*args, **kwargs):
            with pytest.raises(kind) as caught:
                program(*args, **kwargs)
            notes = getattr(caught.value, "__notes__", ())
            _check_words("\n".join([str(caught.value), *notes]), words)

        return test

    return decorate


def warned(*words):
    """Decorates a program that warns, with a message that has the words."""

    def decorate(program):
        @functools.wraps(program)
        def test(*args, **kwargs):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                program(*args, **kwargs)
            _check_words("\n".join(str(warning.message) for warning in caught), words)

        return test

    return decorate


def _check_words(text, words):
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text!r}"


def net():
    """A small network, always with the same values."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model, x=X, y=Y):
    return nn.functional.cross_entropy(model(x), y)


def loader(size=8, **options):
    return DataLoader(TensorDataset(X, Y), batch_size=size, **options)


def mirrored(strategy):
    """A mirrored network and its optimizer, and the first batch, distributed."""
    with strategy.scope():
        model = net()
        optimizer = sgd(model)
    return model, optimizer, first(strategy, (X, Y))


def first(strategy, batch):
    """The first distributed batch of a dataset of one batch."""
    return next(iter(strategy.distribute_dataset([batch])))


def step(model, optimizer, x=X, y=Y):
    """An ordinary step of training."""
    loss = loss_of(model, x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def plain(program=step, steps=2):
    """The network that a program trains on one device."""
    model = net()
    optimizer = sgd(model)
    for _ in range(steps):
        program(model, optimizer)
    return model


def same(model, expected):
    """Whether two networks have the same values, to rounding."""
    pairs = zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
    return all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


def trains_as_plain(strategy, program, steps=2):
    """Asserts that a program on every replica trains as it does on one device."""
    model, optimizer, batch = mirrored(strategy)
    for _ in range(steps):
        strategy.run(program, args=(model, optimizer, *batch))
    strategy.check_replicas()
    assert same(model, plain(program, steps))


def context():
    return mirror.get_replica_context()


def value_of_three():
    """What a strategy of three replicas returns."""
    with mirror.MirroredStrategy(["cpu"] * 3) as other:
        return other.run(lambda: torch.ones(1))
