"""A step that cannot be taken once for all is refused, and one that fails leaves no trace."""

import copy
import threading
import weakref

import pytest
import torch
from torch import nn

import mirror
from mirror.replica.optimizers.optimizer_state import ParamGroupSwap
from tests.oracle import assert_same, in_run
from tests.toy_models import ONES, collect, mirrored_layer, ones_layer

# Optimizers


class NoisySGD(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.add_(-0.1 * p.grad + torch.randn_like(p))


class NoisyLangevin(torch.optim.SGD):
    """Steps as torch does, then draws: inside run that would be by turns."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)

    @torch.no_grad()
    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p))


NOISY = [NoisySGD, NoisyLangevin]


@pytest.mark.parametrize("kind", NOISY)
def test_optimizer_that_draws_noise_draws_it_once(make_strategy, kind):
    # Every replica drew its own noise, and their weights went apart at the first step.
    def train(layer):
        optimizer = kind(layer.parameters())
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            layer(ONES).mean().backward()
            optimizer.step()
        return layer.state_dict()

    strategy = make_strategy(3)
    assert_same(train(mirrored_layer(strategy)), train(ones_layer()))
    strategy.check_replicas()


@pytest.mark.parametrize("kind", NOISY)
@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_optimizer_that_draws_noise_is_refused_in_run(make_strategy, schedule, kind):
    # In run, too, every replica drew its own noise; there each steps alone, so it cannot work.
    strategy = make_strategy(2, schedule=schedule)
    layer = mirrored_layer(strategy)
    optimizer = kind(layer.parameters())

    def step(batch):
        layer(batch).mean().backward()
        optimizer.step()

    with pytest.raises(mirror.StrategyError, match="random numbers"):
        in_run(strategy, step, ONES)


def test_closure_that_raises_leaves_the_optimizer_as_it_was(make_strategy):
    # The next step without a closure ended as one with a closure: the groups kept one replica's
    # ordinary parameters forever, and no later step did anything.
    def fail():
        raise ValueError("no loss")

    def train(layer):
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="no loss"):
            optimizer.step(fail)
        for _ in range(2):
            optimizer.zero_grad()
            layer(ONES).sum().backward()
            optimizer.step()
        assert optimizer.param_groups[0]["params"][0] is layer.weight
        return layer.state_dict()

    strategy = make_strategy(2)
    assert_same(train(mirrored_layer(strategy)), train(ones_layer()))
    strategy.check_replicas()


@pytest.mark.replicated_state
def test_collective_inside_a_step_is_refused(make_strategy):
    # The merge took the optimizer back in mid-step: Adam began again in each step, in silence.
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)
    optimizer = torch.optim.Adam(layer.parameters())

    def count(optimizer, args, kwargs):
        mirror.get_replica_context().all_reduce("sum", torch.ones(()))

    optimizer.register_step_pre_hook(count)

    def step(batch):
        layer(batch).mean().backward()
        optimizer.step()

    with pytest.raises(mirror.StrategyError, match=r"inside optimizer\.step"):
        in_run(strategy, step, ONES)


# Lifetime


@pytest.mark.parametrize("failure", ["hook", "closure"])
def test_step_that_raised_keeps_nothing_alive(failure):
    # The frame of the failed step stayed referenced: model, optimizer and copies forever.
    def fail(*args):
        raise ValueError("out of memory")

    def make():
        strategy = mirror.MirroredStrategy(["cpu"] * 3)
        layer = mirrored_layer(strategy)
        optimizer = torch.optim.Adam(layer.parameters())
        layer(ONES).sum().backward()
        try:
            if failure == "hook":
                optimizer.register_step_pre_hook(fail)
                optimizer.step()
            else:
                optimizer.step(fail)
        except ValueError:
            pass
        return [weakref.ref(thing) for thing in (strategy, layer, optimizer)]

    alive = make()
    collect()
    assert [ref() for ref in alive] == [None, None, None]


def test_a_follower_steps_its_own_parameters_while_another_one_steps(monkeypatch):
    """Replicas 1 and 2 make their steps at once; one has swapped in its groups when one comes."""
    arrived = {1: threading.Event(), 2: threading.Event()}
    swap_in = ParamGroupSwap.swap_in

    def announce(self, r):
        if r in arrived:
            arrived[r].set()
        swap_in(self, r)

    class Waiting(torch.optim.SGD):
        def step(self, closure=None):
            context = mirror.get_replica_context()
            r = None if context is None else context.replica_id_in_sync_group
            if is_racing and r in arrived:
                assert arrived[3 - r].wait(20), "the other one made another step"
            return super().step(closure)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    is_racing = False
    strategy = mirror.MirroredStrategy(["cpu"] * 3, "naive", schedule="parallel")
    plain = nn.Linear(3, 1)
    with strategy.scope():
        model = strategy.mirror(copy.deepcopy(plain))
        optimizer = Waiting(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    monkeypatch.setattr(ParamGroupSwap, "swap_in", announce)
    data = [torch.arange(18.0).view(6, 3) / (10 + i) for i in range(4)]
    for x, batch in zip(data, strategy.distribute_dataset(data), strict=True):
        for event in arrived.values():
            event.clear()
        strategy.run(step, args=(batch,))
        is_racing = True  # the first run takes turns
        plain_optimizer.zero_grad()
        plain(x).square().mean().backward()
        plain_optimizer.step()
    strategy.check_replicas()
    assert_same(model.state_dict(), plain.state_dict())
    strategy.close()
