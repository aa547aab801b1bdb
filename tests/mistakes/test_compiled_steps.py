"""A mistake in a call of a compiled step ends as it does without compiling."""

import contextlib
import logging
import traceback

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirror
from tests.compiler.training import Beside, batches, usual_step
from tests.mistakes.mistake import refused
from tests.pairs import each_once

X = torch.arange(24.0).reshape(6, 4) / 24


class OwnError(Exception):
    """What a user's code raises."""


def own_error(model, x):
    raise OwnError("of my own", 3)


def assertion(model, x):
    assert model(x).shape == (1, 1), "not one"


def chained(model, x):
    try:
        raise KeyError("first")
    except KeyError as error:
        raise ValueError("second") from error


def undefined_name(model, x):
    return model(nowhere)  # noqa: F821


MISTAKES = [
    own_error,
    assertion,
    chained,
    undefined_name,
    lambda model, x: model(torch.cat([x, x], 1)).mean(),
    lambda model, x: (model(x) + torch.ones(5)).mean(),
    lambda model, x: (model(x) @ torch.ones(5, 2)).mean(),
    lambda model, x: model(x).view(7, -1).mean(),
    lambda model, x: torch.cat([model(x), x], 0).mean(),
    lambda model, x: torch.stack([model(x), x]).mean(),
    lambda model, x: model(x.double()).view(5).mean(),
    lambda model, x: {"a": model(x)}["b"],
    lambda model, x: [model(x)][3],
    lambda model, x: model.missing(x),
    lambda model, x: model(x, x),
    lambda model, x: model(x) / (1 // 0),
    lambda model, x: nn.Module()(x),
    lambda model, x: model(x).sum(5),
    lambda model, x: model(x)[:, 9].mean(),
    lambda model, x: model(x),  # no loss
    lambda model, x: model(x).detach().mean(),
    lambda model, x: model.weight.add_(1).mean(),
    lambda model, x: F.cross_entropy(model(x), x),
    lambda model, x: F.nll_loss(model(x), torch.zeros(3, dtype=torch.long)),
    lambda model, x: F.conv2d(x, torch.ones(2, 2, 3, 3)).mean(),
    lambda model, x: F.embedding(x, torch.ones(2, 2)).mean(),
    lambda model, x: next(iter([])),
    lambda model, x: torch.add(model(x)),  # type: ignore[call-overload]
    lambda model, x: torch.softmax(model(x), dim=1, missing=2),  # type: ignore[call-arg]
    lambda model, x: (lambda a, b, c, d, e, f, g: a)(*model(x)),
]


def outcome(num_replicas, mistake, *, is_compiled, num_good, inside, **options):
    """Returns a mistaken call's error: type, text, cause and own lines; and the parameters."""
    strategy = mirror.MirroredStrategy(["cpu"] * num_replicas)
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x, is_mistaken):
        optimizer.zero_grad()
        loss = mistake(model, x) if is_mistaken else model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    def run(*args):
        return strategy.run(step, args)

    call = strategy.compile(step, mode="trace", **options) if is_compiled else run
    with strategy.scope() if inside else contextlib.nullcontext():
        for _ in range(num_good):
            call(X, False)
        with pytest.raises(Exception) as caught:  # noqa: PT011  which one is compared
            call(X, True)
        for _ in range(2):  # all goes on as if nothing had been
            call(X, False)
    error = caught.value
    lines = [
        (frame.name, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == __file__ and frame.name not in ("outcome", "run")
    ]
    left = [parameter.detach().clone() for parameter in model.parameters()]
    strategy.close()
    return type(error), str(error), repr(error.__cause__), lines, left


# The first call that is traced, and one that is traced again.
@each_once(mistake=MISTAKES, num_replicas=[1, 2])
def test_a_mistake_in_a_traced_call_is_the_error_of_an_uncompiled_one(
    mistake, num_replicas, capfd, caplog
):
    num_good = {1: 3, 2: 1}[num_replicas]
    options = {"num_good": num_good, "inside": True}
    *expected, values = outcome(num_replicas, mistake, is_compiled=False, **options)
    *error, left = outcome(num_replicas, mistake, is_compiled=True, **options)
    assert error == expected
    torch.testing.assert_close(left, values)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "Error" not in capfd.readouterr().err


@pytest.mark.parametrize("mistake", MISTAKES[:6])
def test_a_mistake_makes_no_step_uncompiled_for_good(mistake, caplog):
    *error, left = outcome(
        2, mistake, is_compiled=True, num_good=2, inside=False, fallback="eager"
    )
    *expected, values = outcome(2, mistake, is_compiled=False, num_good=2, inside=False)
    assert error == expected
    torch.testing.assert_close(left, values)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def only_uncompiled(model, optimizer):
    usual = usual_step(model, optimizer)

    def step(x, y):
        if torch.compiler.is_compiling():
            raise RuntimeError("no trace can have this")
        return usual(x, y)

    return step


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_call_fails_after_it_was_made_if_only_its_trace_fails(num_replicas):
    beside = Beside(num_replicas, make_step=only_uncompiled)
    data = batches([6, 6])
    first, second = beside.strategy.distribute_dataset(data)
    beside.compiled(*first)
    with pytest.raises(mirror.CompileError, match=r"no trace can have this.*was made uncompiled"):
        beside.compiled(*second)
    for batch in data:
        beside.plain_step(*batch)
    beside.compare()


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_call_whose_trace_alone_fails_falls_back_with_one_warning(num_replicas, caplog):
    beside = Beside(num_replicas, make_step=only_uncompiled, fallback="eager")
    with caplog.at_level(logging.WARNING):
        beside.train(batches([6] * 4))
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 1


@each_once(kind=[nn.Embedding, nn.EmbeddingBag], padding=[None, 0], num_replicas=[1, 2])
def test_sparse_gradients_are_refused_by_their_name(kind, padding, num_replicas):
    strategy = mirror.MirroredStrategy(["cpu"] * num_replicas)
    with strategy.scope():
        model = kind(5, 2, sparse=True, padding_idx=padding)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    compiled = strategy.compile(step, mode="trace")
    x = torch.tensor([[0, 1], [2, 3], [3, 0]])
    compiled(x)
    program = refused(mirror.CompileError, "test_compiled_steps.py", "is sparse", "sparse=False")
    program(compiled)(x)
    strategy.close()
