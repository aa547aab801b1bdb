"""Passes outside ``run`` in a thread per replica, as autograd has one per GPU: hooks, buckets.

Here the replicas are simulated. A pass from a list of losses, one per replica, is made in as many
threads; a hook stops one of them until the others have come to their end.
"""

import functools
import threading

import pytest
import torch

import mirror
from mirror.replica.gradients.grad_tracker import _wrap_backward
from tests.replica.gradients.bucketed import (
    NUM_LAYERS,
    SIZE,
    assert_same_grads,
    learn,
    loss_of,
    pair,
)
from tests.toy_models import replica_id

N = 3


class Threads:
    """Starts torch's engine once per output, each in a thread of its own.

    Attributes:
        late: the replica that stops, or ``None``.
        ahead: set when all other replicas' passes have ended.
    """

    def __init__(self, engine):
        self._engine = engine
        self.late, self.ahead = None, threading.Event()

    def run(self, outputs, grads, *args, **kwargs):
        errors = []

        def go_backward(output, grad):
            try:
                self._engine((output,), (grad,), *args, **kwargs)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=go_backward, args=pair)
            for pair in zip(outputs, grads, strict=True)
        ]
        self.ahead.clear()
        for thread in threads:
            thread.start()
        for r, thread in enumerate(threads):
            if r != self.late:
                thread.join()
        self.ahead.set()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


@pytest.fixture
def threads(monkeypatch):
    mirror.MirroredStrategy(["cpu"]).close()  # the first one wraps torch's function
    wrapped = torch.autograd._engine_run_backward
    threads = Threads(torch.autograd.graph._engine_run_backward)
    run_in_threads = _wrap_backward(threads.run)

    @functools.wraps(wrapped)  # it counts as wrapped
    def run_backward(outputs, *args, **kwargs):
        return (run_in_threads if len(outputs) == N else wrapped)(outputs, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run_backward)
    return threads


def losses_of(strategy, model, batch, threads, stops_at):
    """Per replica, a loss that leaves out the last layer, and one that does not."""

    def fn(x):
        for i, layer in enumerate(model.layers):
            x, before = layer(x).tanh(), x
            if i == stops_at and replica_id() == threads.late:
                x.register_hook(lambda grad: threads.ahead.wait(60) and None)
        return before.square().sum(), x.square().sum()

    parts = mirror.PerReplica(list(batch.tensor_split(N)))
    first, second = strategy.run(fn, args=(parts,))
    return list(first.values), list(second.values)


def plain_losses(plain, batch):
    x = batch
    for layer in plain.layers:
        x, before = layer(x).tanh(), x
    return before.square().sum(), x.square().sum()


@pytest.mark.parametrize("late", range(N))
@pytest.mark.parametrize("stops_at", [0, 2, NUM_LAYERS - 1])
def test_buckets_are_launched_by_whichever_thread_comes_last(
    make_bucketed, launches, threads, late, stops_at
):
    strategy = make_bucketed(N)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    batch, threads.late = torch.randn(10, SIZE), late
    for _ in range(2):
        _, losses = losses_of(strategy, model, batch, threads, stops_at)
        torch.autograd.backward(losses)
        plain_losses(plain, batch)[1].backward()
        assert_same_grads(strategy, model, plain)
    assert len(launches) == 2 * (NUM_LAYERS - 1)


@pytest.mark.parametrize("late", range(N))
@pytest.mark.parametrize("stops_at", [0, 2, NUM_LAYERS - 1])
def test_a_second_pass_adds_to_gradients_that_no_thread_takes_meanwhile(
    make_bucketed, launches, threads, late, stops_at
):
    """There is no forward between two losses, which would reduce the gradients of the first."""
    strategy = make_bucketed(N)
    plain, model = pair(strategy)
    for _ in range(3):  # then the copies' own hooks are gone, which would show another order
        loss_of(model, torch.randn(10, SIZE)).backward()
    model.zero_grad()
    launches.clear()
    batch, threads.late = torch.randn(10, SIZE), late
    first, second = losses_of(strategy, model, batch, threads, stops_at)
    torch.autograd.backward(first, retain_graph=True)
    assert not launches  # the first bucket, of the last layer, has no gradients
    torch.autograd.backward(second)
    assert not launches
    for loss in plain_losses(plain, batch):
        loss.backward(retain_graph=True)
    assert_same_grads(strategy, model, plain)


def test_a_pass_beside_another_one_launches_nothing(make_bucketed, launches):
    """A program's own threads may add to the same slots."""
    strategy = make_bucketed(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    batch, stopped, going_on = torch.randn(10, SIZE), threading.Event(), threading.Event()
    out, other = model(batch), model(batch)

    def stop(grad):
        stopped.set()
        going_on.wait(60)

    other.register_hook(stop)
    thread = threading.Thread(target=other.square().mean().backward)
    thread.start()
    assert stopped.wait(60)
    out.square().mean().backward()
    assert not launches
    going_on.set()
    thread.join()
    for _ in range(2):
        plain(batch).square().mean().backward()
    assert_same_grads(strategy, model, plain)


def test_passes_that_bring_no_gradient_do_not_count(make_bucketed, launches):
    strategy = make_bucketed(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    batch = torch.randn(10, SIZE)
    out = model(batch)
    for _ in range(3):
        torch.ones(1, requires_grad=True).sum().backward()
    out.square().mean().backward()
    assert len(launches) == NUM_LAYERS - 1
