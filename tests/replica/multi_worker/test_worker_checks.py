"""Workers that have drifted apart are named on every worker, with the difference."""

import gc
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import DivergenceError, ReplicaMismatchError
from tests.pairs import each_once
from tests.replica.multi_worker.programs import rank, strategy_of


def drift(of):
    with strategy_of(2) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(4, 4)).sum().backward()
        optimizer.step()
        assert strategy.check_replicas() == 4
        if rank() == 1 and of == "parameter":
            with torch.no_grad():
                model[1].bias[0] += 1e-7
        if rank() == 1 and of == "state":
            optimizer.state[model[0].weight]["momentum_buffer"][0, 0] += 1.0
        if rank() == 1 and of == "replica":
            (variable,) = [v for v in strategy._group.variables if v.owner() is model[0].bias]
            variable.targets[1].data = variable.targets[1].data + 1.0
        with pytest.raises(ReplicaMismatchError) as caught:
            strategy.check_replicas()
        return str(caught.value)


@pytest.mark.parametrize(
    ("of", "told"),
    [
        ("parameter", "parameter '1.bias' differs on worker 1 from worker 0"),
        ("state", "optimizer state 'momentum_buffer' of parameter '0.weight' differs on worker 1"),
        ("replica", "parameter '0.bias' differs on replica 3 of 4 (worker 1, cpu) from replica 2"),
    ],
)
def test_what_differs_is_named_on_all_workers(worker_pool, of, told):
    for message in worker_pool(2).run(drift, of):
        assert told in message


def make_cyclic():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model.itself = [model]  # only a garbage collection frees it
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer):
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()


def drop(case, num_local, inside):
    guards = mirror.Guards(replicas_every=1)
    gc.collect()
    gc.disable()
    try:
        with strategy_of(num_local, guards=guards) as strategy:
            with strategy.scope():
                kept = make_cyclic()
                dropped = [make_cyclic(), make_cyclic()]
            with strategy.scope() if inside else nullcontext():
                train(*kept)
                train(*dropped[0])
                train(*dropped[1])
                if case == "one has them" and rank() == 0:
                    dropped.clear()
                    gc.collect()
                if case == "each has another":
                    del dropped[rank()]
                    gc.collect()
                if case != "one keeps them" or rank() == 0:
                    dropped.clear()
                if case == "one keeps them":
                    with pytest.raises(DivergenceError) as caught:
                        strategy.check_replicas()
                    return str(caught.value)
                train(*kept)  # the guard looks
                return strategy.check_replicas()
    finally:
        gc.enable()


@each_once(case=["one has them", "each has another"], num_local=[1, 2], inside=[True, False])
def test_what_only_a_garbage_collection_frees_is_not_compared(
    worker_pool, case, num_local, inside
):
    assert worker_pool(2).run(drop, case, num_local, inside) == [4, 4]


def test_what_one_worker_alone_keeps_is_a_divergence(worker_pool):
    for message in worker_pool(2).run(drop, "one keeps them", 1, inside=True):
        assert "worker 0 of 2: check_replicas of 8 " in message
        assert "worker 1 of 2: check_replicas of 24 " in message
