"""A pass of another thread reads no slot of a strategy whose own pass is writing them.

torch's engine writes ``.grad`` without the GIL: a reader gets a freed tensor, once in many runs.
Here a node stops the strategy's pass, and meanwhile another thread makes passes of its own.
"""

import threading

import pytest
import torch
from torch import nn

import mirror
from mirror.replica.gradients import grad_tracker
from tests.oracle import assert_same_training

WIDTH, STEPS = 4, 4


class Stop(torch.autograd.Function):
    """Stops a backward pass in its middle: the later layer has its gradients already."""

    @staticmethod
    def forward(ctx, x, stop):
        ctx.stop = stop
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.stop()
        return grad, None


class Net(nn.Module):
    def __init__(self, stop=lambda: None):
        super().__init__()
        self.first, self.second, self.stop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), stop

    def forward(self, x):
        return self.second(Stop.apply(torch.tanh(self.first(x)), self.stop))


def loss_of(model, x):
    return model(x).square().mean()


def step_outside(strategy, model, optimizer, x):
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()


def step_in_run(strategy, model, optimizer, x):
    def step(part):
        step_outside(strategy, model, optimizer, part)

    (batch,) = strategy.distribute_dataset([x])
    strategy.run(step, (batch,))


WAYS = {"outside run": step_outside, "in run": step_in_run}


def make(num_devices, schedule="lockstep", stop=lambda: None):
    strategy = mirror.MirroredStrategy(["cpu"] * num_devices, schedule=schedule)
    torch.manual_seed(0)
    with strategy.scope():
        model = Net(stop)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return strategy, model, optimizer


def plain_passes():
    weight = torch.ones(3, requires_grad=True)
    return lambda: weight.square().sum().backward()


def passes_of_another(way, num_devices):
    trained = make(num_devices)
    return lambda: WAYS[way](*trained, torch.ones(6, WIDTH))


OTHERS = {
    "no strategy": plain_passes,
    "one device": lambda: passes_of_another("outside run", 1),
    "outside run": lambda: passes_of_another("outside run", 2),
    "in run": lambda: passes_of_another("in run", 2),
}


@pytest.mark.parametrize("make_pass", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", ["lockstep", "parallel"])
def test_a_pass_beside_another_reads_none_of_its_slots(monkeypatch, schedule, way, make_pass):
    is_beside, stops, going_on = threading.Event(), threading.Event(), threading.Event()
    readers = []

    def stop():
        if is_beside.is_set():
            stops.set()
            assert going_on.wait(60)

    def read(copy):
        if threading.current_thread() is thread and copy.variable.replicas is replicas:
            readers.append(copy.variable.name)
        return local_grad(copy)

    def pass_beside():
        assert stops.wait(60)
        try:
            for _ in range(3):
                make_pass()
        finally:
            going_on.set()

    strategy, model, optimizer = make(3, schedule, stop)
    replicas, make_pass, local_grad = (
        strategy._group.replicas,
        make_pass(),
        grad_tracker.local_grad,
    )
    torch.manual_seed(1)
    *first, last = torch.randn(STEPS + 1, 6, WIDTH)
    for x in first:  # then the copies have no hooks, and their slots have to be searched
        WAYS[way](strategy, model, optimizer, x)
    make_pass()
    thread = threading.Thread(target=pass_beside)
    monkeypatch.setattr(grad_tracker, "local_grad", read)
    is_beside.set()
    thread.start()
    WAYS[way](strategy, model, optimizer, last)
    thread.join()
    assert not readers

    torch.manual_seed(0)
    plain = Net()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x in (*first, last):
        step_outside(None, plain, plain_optimizer, x)
    assert_same_training(model, optimizer, plain, plain_optimizer)
    strategy.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", ["lockstep", "parallel"])
def test_gradients_are_freed_under_the_lock(monkeypatch, schedule, way):
    """torch releases the GIL while it frees one, and a pass of another thread may search."""
    freed = []

    def set_grad(copy, value):
        if value is None and local_grad(copy) is not None:
            freed.append(mutex.lock._is_owned())
        set_local_grad(copy, value)

    local_grad, set_local_grad = grad_tracker.local_grad, grad_tracker.set_local_grad
    strategy, model, optimizer = make(3, schedule)
    x = torch.ones(6, WIDTH)
    for _ in range(STEPS):
        WAYS[way](strategy, model, optimizer, x)
    mutex = strategy._group.access.unreduced.tracker.mutex
    monkeypatch.setattr(grad_tracker, "set_local_grad", set_grad)

    def fail(part):
        loss_of(model, part).backward()
        raise KeyError

    (batch,) = strategy.distribute_dataset([x])
    with pytest.raises(KeyError):
        strategy.run(fail, (batch,))
    if way == "outside run":
        loss_of(model, x).backward()
        model.zero_grad()
    assert freed
    assert all(freed)
    strategy.close()
