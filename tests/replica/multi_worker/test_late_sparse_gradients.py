"""A gradient that is sparse for the first time after an order was agreed on stays sparse."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.replica.multi_worker.beside_one_device import assert_as_one_device

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


@pytest.mark.parametrize("way", [1, 2, 3])
@pytest.mark.parametrize("make", [of_one_kind, of_two_kinds])
@pytest.mark.parametrize("no_sync", [False, True])
def test_late_sparse_gradients_stay_sparse(worker_pool, way, make, no_sync):
    program = partial(trains, make=make, no_sync=no_sync)
    assert_as_one_device(worker_pool, program, (1, 2), way, tolerance=3e-6)


def test_late_sparse_gradients_in_one_bucket(worker_pool):
    options = mirror.CommunicationOptions()
    program = partial(trains, make=of_two_kinds)
    assert_as_one_device(worker_pool, program, (2, 1), 3, communication_options=options)
