"""A worker without examples makes every pass, also where its loss depends on no parameter."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.replica.multi_worker.beside_one_device import assert_as_one_device, net

SIZES = (8, 1, 5, 1, 2, 1)


class Experts(nn.Module):
    """Calls the layers that its examples choose: none, without examples."""

    def __init__(self, sparse=False):
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=sparse)
        self.experts = nn.ModuleList([nn.Linear(4, 3) for _ in range(3)])
        self.unused = nn.Parameter(torch.ones(()))  # the smallest of all

    def forward(self, x):
        y = x.new_zeros(len(x), 3)
        chosen = x[:, 0].gt(0).long() + x[:, 1].gt(0)
        for k in chosen.unique().tolist():
            found = self.experts[k](x + self.words(chosen))
            y = y + (chosen == k)[:, None] * found
        return y


LOSSES = {
    "mean": lambda model, x, y: F.cross_entropy(model(x), y),
    "sum over a number": lambda model, x, y: F.mse_loss(model(x), F.one_hot(y, 3).float()),
    "quotient": lambda model, x, y: (model(x) - F.one_hot(y, 3)).square().sum() / (3 * len(x)),
    "smoothed": lambda model, x, y: F.cross_entropy(model(x), y, label_smoothing=0.1),
    "scaled": lambda model, x, y: 4.0 * F.cross_entropy(model(x), y),
}


def trains(place, loss, make=Experts, no_sync=False):
    with place.scope():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for i, batch in enumerate(place.batches):
        if no_sync and i % 3 != 2:
            with place.no_sync():
                place.backward(partial(LOSSES[loss], model), *batch)
            continue
        place.backward(partial(LOSSES[loss], model), *batch)
        place.keep(model)
        optimizer.step()
        optimizer.zero_grad()
    place.keep(model, grads=False)


@pytest.mark.parametrize("way", [1, 2, 3])
@pytest.mark.parametrize("loss", LOSSES)
def test_layers_that_no_example_chooses(worker_pool, loss, way):
    assert_as_one_device(worker_pool, partial(trains, loss=loss), (1, 1), way, SIZES)


@pytest.mark.parametrize("way", [1, 2, 3])
@pytest.mark.parametrize("options", [{"make": partial(Experts, sparse=True)}, {"no_sync": True}])
@pytest.mark.parametrize("counts", [(1, 2), (2, 1)])
def test_layers_that_no_example_chooses_among_more_replicas(worker_pool, counts, options, way):
    program = partial(trains, loss="mean", **options)
    assert_as_one_device(worker_pool, program, counts, way, SIZES)


def trains_from_a_dataset(place, loss, make):
    with place.scope():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def step(x, y):
            optimizer.zero_grad()
            LOSSES[loss](model, x, y).backward()
            optimizer.step()

        if hasattr(place, "strategy"):
            for batch in place.strategy.distribute_dataset(place.batches):
                place.strategy.run(step, args=batch)
        else:
            for batch in place.batches:
                step(*batch)
    place.keep(model, grads=False)


@pytest.mark.parametrize("make", [net, Experts])
@pytest.mark.parametrize("loss", LOSSES)
def test_batches_of_a_distributed_dataset(worker_pool, loss, make):
    program = partial(trains_from_a_dataset, loss=loss, make=make)
    assert_as_one_device(worker_pool, program, (1, 2), sizes=SIZES)


def asks_for_gradients(place):
    with place.scope():
        model = Experts()
    for batch in place.batches:
        if hasattr(place, "own_parts"):
            batch = [torch.cat(leaf) for leaf in zip(*place.own_parts(batch), strict=True)]
        loss = LOSSES["mean"](model, *batch)
        place.kept += torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def test_autograd_grad_of_a_loss_that_depends_on_no_parameter(worker_pool):
    assert_as_one_device(worker_pool, asks_for_gradients, (1, 1), 1, SIZES)


class WithPenalty(nn.Module):
    """Returns a 0-d value beside, or instead of, one per example."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind = net(), kind

    def forward(self, x, y):
        out = self.inner(x)
        loss, penalty = F.cross_entropy(out, y), out.square().mean()
        return {"loss": loss, "tuple": (out, penalty), "dict": {"out": out, "aux": penalty}}[
            self.kind
        ]


OF_OUTPUTS = {
    "loss": lambda out, y: out,
    "tuple": lambda out, y: F.cross_entropy(out[0], y) + 0.1 * out[1],
    "dict": lambda out, y: F.cross_entropy(out["out"], y) + 0.1 * out["aux"],
}


def trains_with_scalar_outputs(place, kind):
    with place.scope():
        model = WithPenalty(kind)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for batch in place.batches:
            place.backward(lambda x, y: OF_OUTPUTS[kind](model(x, y), y), *batch)
            optimizer.step()
            optimizer.zero_grad()
    place.keep(model, grads=False)


@pytest.mark.parametrize("counts", [(1, 1), (2, 2)])
@pytest.mark.parametrize("kind", OF_OUTPUTS)
def test_scalar_outputs_of_a_split_call_without_examples(worker_pool, kind, counts):
    program = partial(trains_with_scalar_outputs, kind=kind)
    assert_as_one_device(worker_pool, program, counts, 1, SIZES)


@pytest.mark.parametrize("counts", [(1, 1), (1, 2)])
@pytest.mark.parametrize("make", [net, Experts])
def test_a_loss_of_all_workers_where_gradients_are_added(worker_pool, make, counts):
    program = partial(trains, loss="mean", make=make)
    assert_as_one_device(worker_pool, program, counts, 2, SIZES, gradient_reduction="sum")


def normalized():
    return nn.Sequential(nn.Linear(4, 6), mirror.nn.SyncBatchNorm(6), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize("counts", [(1, 1), (1, 2)])
def test_collectives_in_the_model_where_gradients_are_added(worker_pool, counts):
    program, sizes = partial(trains, loss="mean", make=normalized), (8, 5, 3, 7)
    assert_as_one_device(worker_pool, program, counts, 2, sizes, gradient_reduction="sum")
