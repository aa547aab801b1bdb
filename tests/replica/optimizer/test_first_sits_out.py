"""Steps that the first replica sits out: its variables are those the others train."""

import copy

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same, assert_same_training

OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, foreach=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, centered=True),
}


def train_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    with torch.no_grad():  # a change before the next step of the same run
        for parameter in model.parameters():
            parameter.clamp_(-0.4, 0.4)
    return loss.detach()


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("n", [2, 3])
def test_the_first_replica_is_brought_along(make, n, steps, make_strategy):
    strategy = make_strategy(n)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = strategy.mirror(copy.deepcopy(plain))
    optimizer, plain_optimizer = make(model), make(plain)

    def step(model, optimizer, batch):
        for _ in range(steps):
            loss = train_step(model, optimizer, batch)
        return loss

    batches = [torch.randn(size, 3).double() for size in (1, 1, 4, 1, 2, 1, 1)]
    # Of a single example the replica with the largest weight takes it.
    options = mirror.InputOptions(weights=[1] * (n - 1) + [2])
    distributed = strategy.distribute_dataset(batches, options)
    for whole, batch in zip(batches, distributed, strict=True):
        losses = strategy.run(step, args=(model, optimizer, batch))
        expected = step(plain, plain_optimizer, whole)
        assert_same(strategy.reduce("mean", losses), expected, "loss")
        strategy.check_replicas()
    assert_same_training(model, optimizer, plain, plain_optimizer)
