"""Reports of a strategy: what it did in its steps adds up to them."""

import torch

from tests.ones import ONES, mirrored_layer, sgd
from tests.oracle import finishes

# Threads


def test_strategies_in_threads_of_their_own_keep_their_times_apart(make_strategy):
    # The spans of the cross-replica context went to the strategy that ran last, whichever thread
    # they came from, and two threads popped from one list: `optimizer.step()` raised IndexError.
    def begin(strategy):
        layer = mirrored_layer(strategy)
        return sgd(layer), layer(ONES).mean()

    def end(optimizer, loss):
        loss.backward()
        optimizer.step()

    here, there = make_strategy(2), make_strategy(2)
    begun = begin(here)
    _, error, _ = finishes(lambda: end(*begin(there)))
    assert error is None
    end(*begun)
    assert [here.report().num_steps, there.report().num_steps] == [1, 1]


# Optimizers and their state


def test_a_subclass_that_steps_its_base_takes_one_step_of_the_report(make_strategy):
    # The steps of the base on every replica, inside the one that was called, ended a step each.
    class Subclass(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.SGD([torch.ones(1)])  # torch puts its hooks around the base's step now
    strategy = make_strategy(3)
    layer = mirrored_layer(strategy)
    optimizer = Subclass(layer.parameters(), lr=0.1)
    for i in range(3):
        layer(ONES).mean().backward()
        optimizer.step()
        assert strategy.report().num_steps == i + 1
