"""Steps of replicas that run at once: each steps a clone, and none waits for another step."""

import sys
import threading

import pytest
import torch
from torch import nn

from mirror.replica.optimizers import step_interceptor
from tests.oracle import assert_same, finishes
from tests.pairs import each_once
from tests.replica.optimizers.stepping import net
from tests.toy_models import replica_id

SGD_MODULE = sys.modules["torch.optim.sgd"]  # torch.optim deletes the name
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adamw, foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "adam, tensor rate": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(1e-2)),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=1e-2),
    "two groups": lambda ps: torch.optim.RMSprop([{"params": [p]} for p in ps], lr=1e-2),
}


@pytest.fixture
def make_devices(make_strategy):
    """Gives ``make(n, schedule)``: a strategy of replicas that step as on n devices."""

    def make(n, schedule):
        strategy = make_strategy(n, schedule=schedule)
        strategy._group.replicas.steps_once = strategy._group.replicas.is_one_device = False
        return strategy

    return make


def trained(strategy, make_optimizer, sizes=(9, 9, 2, 7)):
    torch.manual_seed(0)
    with strategy.scope():
        model = net()
        optimizer = make_optimizer(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        generator = torch.Generator().manual_seed(1)
        width = next(model.parameters()).shape[1]
        data = [(torch.randn(n, width, generator=generator),) for n in sizes]

        def step(batch):
            optimizer.zero_grad()
            model(batch[0]).square().mean().backward()
            optimizer.step()

        for batch in strategy.distribute_dataset(data):
            strategy.run(step, (batch,))
            scheduler.step()
            strategy.check_replicas()
    return model.state_dict(), optimizer.state_dict()


@each_once(kind=OPTIMIZERS, n=[2, 3])
def test_steps_at_once_have_the_bits_of_steps_in_turn(make_devices, kind, n):
    wanted = trained(make_devices(n, "lockstep"), OPTIMIZERS[kind])
    assert_same(trained(make_devices(n, "parallel"), OPTIMIZERS[kind]), wanted)


@pytest.mark.replicated_state
def test_no_replica_waits_for_the_step_of_another_one(make_devices, monkeypatch):
    strategy = make_devices(3, "parallel")
    strategy.run(lambda: None)
    all_step, sgd = threading.Barrier(3, timeout=30), SGD_MODULE.sgd

    def sgd_together(*args, **kwargs):
        all_step.wait()
        sgd(*args, **kwargs)

    monkeypatch.setattr(SGD_MODULE, "sgd", sgd_together)
    _, error, _ = finishes(lambda: trained(strategy, OPTIMIZERS["sgd"], sizes=(9, 9)))
    assert error is None


@pytest.mark.replicated_state
def test_a_step_that_fails_gives_the_optimizer_back(make_devices, monkeypatch):
    strategy = make_devices(3, "parallel")
    with strategy.scope():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, sgd = torch.ones(2, next(model.parameters()).shape[1]), SGD_MODULE.sgd

    def step():
        model(x).sum().backward()
        optimizer.step()

    def fail(*args, **kwargs):
        if replica_id() == 1:
            raise KeyError("planted")
        sgd(*args, **kwargs)

    for _ in range(2):
        strategy.run(step)
    with monkeypatch.context() as patched:
        patched.setattr(SGD_MODULE, "sgd", fail)
        _, error, _ = finishes(lambda: strategy.run(step))
    assert isinstance(error, KeyError)
    held = optimizer.param_groups[0]["params"]
    assert all(p is q for p, q in zip(held, model.parameters(), strict=True))
    strategy.check_replicas()
    strategy.run(step)
    strategy.check_replicas()


class Counted(torch.optim.SGD):
    """Not torch's own class: the first replica steps, then the others, one at a time."""


@pytest.mark.replicated_state
def test_a_replica_that_comes_while_another_one_steps_finds_the_optimizer(
    make_strategy, monkeypatch
):
    strategy = make_strategy(3, schedule="parallel")
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = Counted(model.parameters(), lr=0.1)
    find, sgd = step_interceptor._find_mirror, SGD_MODULE.sgd
    steps, has_looked = threading.Event(), threading.Event()
    found = []

    def step():
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()

    def find_second(*args):
        if replica_id() == 2:
            assert steps.wait(30)
            found.append(find(*args))
            has_looked.set()
            return found[-1]
        return find(*args)

    def sgd_slowly(*args, **kwargs):
        if replica_id() == 1:
            steps.set()
            assert has_looked.wait(30)
        sgd(*args, **kwargs)

    strategy.run(step)
    monkeypatch.setattr(step_interceptor, "_find_mirror", find_second)
    monkeypatch.setattr(SGD_MODULE, "sgd", sgd_slowly)
    _, error, _ = finishes(lambda: strategy.run(step))
    assert error is None
    assert found == [optimizer._mirror]
    strategy.check_replicas()
