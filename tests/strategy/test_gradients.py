"""Gradients as a strategy promises them: reduction, no_sync, check_replicas."""

import copy

import pytest
import torch
from torch import nn

import mirror
from tests.strategy.programs import here


def test_inside_run_every_observer_sees_the_reduced_gradient(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(nn.Linear(1, 1, bias=False))
    (batch,) = strategy.distribute_dataset([torch.arange(7.0).view(7, 1)])

    def fn(x):
        model(x).mean().backward()
        return model.weight.grad.clone()

    result = strategy.run(fn, args=(batch,))
    for gradient in result.values:
        assert gradient.item() == pytest.approx(3.0)
        assert torch.equal(gradient, result.values[0])
    assert model.weight.grad.item() == pytest.approx(3.0)


def test_sum_reduction_sums(make_strategy):
    strategy = make_strategy(3, gradient_reduction="sum")
    model = strategy.mirror(nn.Linear(1, 1, bias=False))

    def fn():
        model(torch.tensor([1.0 + here()])).sum().backward()
        return model.weight.grad.item()

    assert strategy.run(fn).values == (6.0, 6.0, 6.0)


def test_under_no_sync_a_replica_sees_its_own_gradient(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(nn.Linear(1, 1, bias=False))

    def fn(scale):
        model(torch.tensor([scale * (1.0 + here())])).sum().backward()

    with strategy.no_sync():
        strategy.run(fn, args=(1.0,))
        strategy.run(fn, args=(10.0,))
    strategy.run(fn, args=(100.0,))
    assert model.weight.grad.item() == pytest.approx(111 * 1.5)


def test_check_replicas_counts_parameters_and_names_what_differs(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    assert strategy.check_replicas() == 4

    def poke():
        if here() == 2:
            with torch.no_grad():
                model[1].weight[0, 1] += 1e-7 + model[1].weight[0, 1].abs()

    strategy.run(poke)
    with pytest.raises(mirror.ReplicaMismatchError, match=r"2") as error:
        strategy.check_replicas()
    assert "1.weight" in str(error.value)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert strategy.check_replicas() == 4


class Unfaithful(torch.optim.SGD):
    """Keeps another momentum on the last replica."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"].add_(here() // 2)


def test_check_replicas_sees_the_optimizer_state(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(nn.Linear(2, 1))
    optimizer = Unfaithful(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()

    strategy.run(step)
    with pytest.raises(mirror.ReplicaMismatchError, match="2"):
        strategy.check_replicas()
