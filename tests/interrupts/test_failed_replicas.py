"""An optimizer that failed on one replica is not waited for; memory may run out on one replica."""

import copy

import pytest
import torch
from torch import nn

import mirror
from mirror.replica.optimizers.optimizer_state import ParamGroupSwap
from tests.oracle import assert_same, finishes
from tests.pairs import pairwise
from tests.toy_models import replica_id


@pytest.mark.parametrize("which", ["before it notes that", "with it in hand"])
def test_the_others_do_not_wait_for_an_optimizer_that_one_failed_with(
    which, strategy, eager, long_drain, monkeypatch
):
    model = strategy.mirror(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swap_in, failures = ParamGroupSwap.swap_in, []

    def interrupt(self, *args):
        if len(failures) == 1:
            failures.append(True)
            if which == "with it in hand":
                swap_in(self, *args)
            else:
                self._alone.acquire()
            raise MemoryError("struck")
        swap_in(self, *args)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    strategy.run(step)
    monkeypatch.setattr(ParamGroupSwap, "swap_in", interrupt)
    failures.append(mirror)
    _, error, _ = finishes(lambda: strategy.run(step))
    assert type(error) is MemoryError
    strategy.run(step)
    step()
    strategy.check_replicas()


LARGE, SMALL = 12, 6


class Hungry(torch.autograd.Function):
    """Runs out of memory in backward, where ``fails`` says so."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.fails("backward")
        return grad, None


class Net(nn.Module):
    def __init__(self, fails):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.fails = [fails]

    def forward(self, x):
        self.fails[0]("forward")
        return Hungry.apply(self.layers(x), self.fails[0])


class SGD(torch.optim.SGD):
    """Runs out of memory before it changes anything."""

    fails = staticmethod(lambda where: None)

    def step(self, closure=None):
        self.fails("optimizer")
        return super().step(closure)


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pairwise(in_run=[False, True], where=["forward", "backward", "hook", "optimizer"], who=[0, 2])
def test_the_next_smaller_batch_trains(where, who, in_run, strategy):
    strategy_size = strategy.num_replicas_in_sync
    is_large = [False]

    def fails(here):
        replica = mirror.get_replica_context()  # None, or a default one, where one acts for all
        is_one = replica is not None and replica.num_replicas_in_sync > 1
        if is_large[0] and here == where and (not is_one or replica_id() == who):
            raise torch.OutOfMemoryError("out of memory")

    plain = Net(lambda where: None)
    model = Net(fails)
    model.load_state_dict(plain.state_dict())
    model = strategy.mirror(model)
    optimizers = [
        kind(m.parameters(), lr=0.1, momentum=0.9)
        for kind, m in ((torch.optim.SGD, plain), (SGD, model))
    ]
    optimizers[1].fails = fails
    model.layers[0].weight.register_hook(lambda grad: fails("hook"))

    def train(x):
        if in_run:
            (part,) = strategy.distribute_dataset([x])
            strategy.run(lambda part: step(model, optimizers[1], part), args=(part,))
        else:
            step(model, optimizers[1], x)

    for _ in range(2):
        is_large[0] = False
        x = torch.randn(SMALL * strategy_size, 3)
        train(x)
        step(plain, optimizers[0], x)
        before = copy.deepcopy((model.state_dict(), optimizers[1].state_dict()))
        is_large[0] = True
        with pytest.raises(torch.OutOfMemoryError) as raised:
            train(torch.randn(LARGE * strategy_size, 3))
        strategy.check_replicas()
        if where == "optimizer" and in_run and who > 0:  # after the first one's step
            assert any("as after this step" in note for note in raised.value.__notes__)
            model.load_state_dict(before[0])
            optimizers[1].load_state_dict(before[1])
        assert_same(model.state_dict(), before[0])
        assert_same(optimizers[1].state_dict(), before[1])
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(optimizers[1].state_dict(), optimizers[0].state_dict())
