"""Workers begin with worker 0's values, with any seeds."""

from functools import partial

import pytest
import torch
from torch import nn

from mirror.errors import DivergenceError
from tests.replica.multi_worker.programs import (
    Net,
    assert_as_one_device,
    rank,
    strategy_of,
    values_of,
)


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


def test_lazy_layers_are_equal_in_their_first_run(worker_pool):
    (first, values), (others, other_values) = worker_pool(2).run(lazy)
    assert first == others
    assert first[0] == first[1]
    assert values == other_values
    assert values["0.weight"] != values["1.weight"]


def lazy_and_draws(place, first_call):
    """Keeps the values of two lazy layers, and what the program draws after their first call."""
    torch.manual_seed(3)
    x = torch.ones(4, 5)
    with place.scope():
        model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyLinear(2)).eval()
        if first_call == "in the scope":
            model(x)
    if first_call == "after it":
        model(x)
    elif first_call == "in run":
        place.strategy.run(model, args=(x,)) if hasattr(place, "strategy") else model(x)
    place.keep(model, grads=False)
    place.kept.append(torch.rand(3))


@pytest.mark.parametrize("counts", [(1, 1), (2, 1)])
@pytest.mark.parametrize("first_call", ["in the scope", "after it", "in run"])
def test_lazy_layers_draw_what_one_device_draws(worker_pool, first_call, counts):
    program = partial(lazy_and_draws, first_call=first_call)
    assert_as_one_device(worker_pool, program, counts, tolerance=0.0)


def lazy_of_workers_seeded_apart():
    with strategy_of() as strategy:
        torch.manual_seed(rank())
        with strategy.scope():
            model = nn.LazyLinear(2)
        model(torch.ones(1, 5))
        return values_of(model), torch.rand(3).tolist()


def test_workers_with_different_seeds_draw_different_numbers_after_a_lazy_layer(worker_pool):
    (first, drawn), (others, also_drawn) = worker_pool(2).run(lazy_of_workers_seeded_apart)
    assert first == others
    assert drawn != also_drawn
