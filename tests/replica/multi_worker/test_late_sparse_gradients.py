"""A gradient that is sparse for the first time after an order was agreed on stays sparse."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.errors import DivergenceError, GradientError
from tests.pairs import each_once
from tests.replica.multi_worker.programs import (
    Worker,
    assert_as_one_device,
    cross_entropy,
    net,
)

FIRST = 2  # pass that looks words up


class Late(nn.Module):
    """Looks words up from some pass on, for some examples; by parameters of no Embedding, too."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=True)
        self.table = nn.Parameter(torch.randn(5, 4))
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, has_words):
        h = self.first(x)
        if has_words:
            which = x[:, 0].gt(0).long() + x[:, 1].gt(0)
            h = h + self.words(which) + F.embedding(which, self.table, sparse=True)
        return self.last(h.tanh())


def of_one_kind(model):
    return [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)]


def of_two_kinds(model):
    sparse = [model.words.weight, model.table]
    dense = [*model.first.parameters(), *model.last.parameters()]
    return [torch.optim.SparseAdam(sparse, 0.1), torch.optim.SGD(dense, 0.1)]


def trains(place, make, no_sync=False):
    with place.scope():
        model = Late()
        optimizers = make(model)

    def backward(batch, has_words):
        place.backward(lambda x, y: F.cross_entropy(model(x, has_words), y), *batch)

    for i, batch in enumerate(place.batches):
        model.zero_grad()
        if no_sync:
            with place.no_sync():
                backward(place.batches[0], i >= FIRST)
        backward(batch, i >= FIRST and not (no_sync and i % 2))
        place.keep(model)
        for optimizer in optimizers[0 if i >= FIRST else -1 :]:
            optimizer.step()
    place.keep(model, grads=False)


@each_once(no_sync=[False, True], make=[of_one_kind, of_two_kinds], way=[1, 2, 3])
def test_late_sparse_gradients_stay_sparse(worker_pool, way, make, no_sync):
    program = partial(trains, make=make, no_sync=no_sync)
    assert_as_one_device(worker_pool, program, (1, 2), way, tolerance=3e-6)


def test_late_sparse_gradients_in_one_bucket(worker_pool):
    options = mirror.CommunicationOptions()
    program = partial(trains, make=of_two_kinds)
    assert_as_one_device(worker_pool, program, (2, 1), 3, communication_options=options)


# Workers that reduce something else are found, and do not mix what they have


def gone_wrong(what):
    place = Worker((1, 1), 3)
    told = []
    with place.scope():
        model = net()
    for step in range(4):
        x, y = place.batches[step]

        def loss_of(x, y, step=step):
            if step == 2 and place.rank == 1:
                if what == "skips":
                    return torch.zeros((), requires_grad=True)
                cross_entropy(model)(x, y).backward()
                raise ValueError("a bad batch")
            return cross_entropy(model)(x, y)

        try:
            place.backward(loss_of, x, y)
        except (DivergenceError, ValueError) as error:
            told.append((step, type(error).__name__))
            break
    place.strategy.close()
    return told


def test_a_worker_that_fails_after_its_pass_is_reported(worker_pool):
    (first,), (second,) = worker_pool(2).run(gone_wrong, "raises")
    assert first == (2, "DivergenceError")
    assert second == (2, "ValueError")


def test_a_worker_that_leaves_out_a_pass_is_found_at_the_next(worker_pool):
    found = worker_pool(2).run(gone_wrong, "skips")
    assert all("DivergenceError" in str(told) for told in found)


def non_finite(way, kept):
    guards = mirror.Guards(finite_gradients=True)
    place = Worker((1, 1), way, guards=guards)
    told = []
    with place.scope():
        model = net()
    for step, (x, y) in enumerate(place.batches[:4]):
        model.zero_grad()
        if step == 1:
            x[-1] = float("nan")  # the last worker's
        try:
            if kept:
                with place.no_sync():
                    place.backward(cross_entropy(model), x, y)
            else:
                place.backward(cross_entropy(model), x, y)
            next(model.parameters()).grad.sum()
        except GradientError as error:
            told.append((step, str(error)))
    place.strategy.close()
    return told


@each_once(way=[1, 3], kept=[False, True])
def test_a_gradient_that_is_not_finite_is_an_error_on_all_workers(worker_pool, way, kept):
    first, second = worker_pool(2).run(non_finite, way, kept)
    assert first == second
    ((step, told),) = first
    assert step == 1
    assert "replica 1 of 2 (worker 1, cpu)" in told


def carrying_a_graph():
    place = Worker((1, 1), 3)
    with place.scope():
        model = net()
    with pytest.raises(mirror.errors.StrategyError, match=r"torch\.autograd\.grad"):
        place.strategy.run(lambda: model(place.batches[0][0]).sum().backward(create_graph=True))
    place.backward(cross_entropy(model), *place.batches[0])
    place.strategy.close()
    return model[0].bias.grad


def test_gradients_that_carry_a_graph_are_refused_and_training_goes_on(worker_pool):
    first, second = worker_pool(2).run(carrying_a_graph)
    assert torch.equal(first, second)
