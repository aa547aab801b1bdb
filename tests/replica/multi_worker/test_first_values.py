"""Workers begin with worker 0's values, whatever they were seeded with."""

import pytest
import torch
from torch import nn

from mirror.errors import DivergenceError
from tests.replica.multi_worker.programs import Net, rank, strategy_of, values_of


def seeded_apart(num_local):
    with strategy_of(num_local) as strategy:
        torch.manual_seed(rank())
        with strategy.scope():
            model = Net()
        own = values_of(model)
        strategy.run(model.eval(), args=(torch.ones(2, 4),))
        strategy.check_replicas()
        later = strategy.mirror(nn.Linear(3, 3))
        strategy.run(lambda: later(torch.ones(1, 3)))
        return own, values_of(model), values_of(later)


@pytest.mark.parametrize("num_local", [1, 2])
def test_all_begin_with_worker_0s_values(worker_pool, num_local):
    (first, given, later), (others, also_given, also_later) = worker_pool(2).run(
        seeded_apart, num_local
    )
    assert first != others
    assert given == also_given == first
    assert later == also_later


def another_model():
    with strategy_of() as strategy:
        with strategy.scope():
            model = nn.Linear(3, 2 + rank())
        with pytest.raises(DivergenceError, match="first values of 2 variables and buffers"):
            strategy.run(model, args=(torch.ones(1, 3),))


def test_another_model_is_found(worker_pool):
    worker_pool(2).run(another_model)


def lazy():
    with strategy_of(2) as strategy:
        torch.manual_seed(rank())
        with strategy.scope():
            model = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(2))
        own = strategy.run(lambda: model(torch.ones(1, 5)).detach())
        strategy.check_replicas()
        return [value.tolist() for value in strategy.local_results(own)], values_of(model)


def test_lazy_layers_are_alike_in_their_first_run(worker_pool):
    (first, values), (others, other_values) = worker_pool(2).run(lazy)
    assert first == others
    assert first[0] == first[1]
    assert values == other_values
    assert values["0.weight"] != values["1.weight"]
