"""What is on its way when something ends: nothing is left behind, nothing goes to another."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import in_run
from tests.replica.gradients.bucketed import (
    SIZE,
    Deep,
    assert_same_grads,
    backward_in_run,
    batches,
    learn,
    loss_of,
    pair,
)
from tests.toy_models import ONES, collect, mirrored_layer

# Lifetime


def test_unread_gradients_keep_nothing_alive():
    # The list of arrived gradients and the copies' hooks held one another where the collector
    # cannot see: strategy, copies and threads stayed after the last use.
    def make():
        strategy = mirror.MirroredStrategy(["cpu"] * 3)
        layer = mirrored_layer(strategy)
        layer(ONES).sum().backward()
        return weakref.ref(strategy), weakref.ref(layer)

    alive = make()
    collect()
    assert [ref() for ref in alive] == [None, None]


# Optimizers and their state


def test_backward_after_close_starts_no_thread(make_strategy, leaks):
    # A bucket that was complete after `close` started the thread again that `close` had ended.
    strategy = make_strategy(
        2, communication_options=mirror.CommunicationOptions(bytes_per_pack=0)
    )
    model = strategy.mirror(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    loss = model(torch.ones(4, 2)).mean()
    loss.backward(retain_graph=True)
    model.zero_grad()
    strategy.close()
    loss.backward()
    assert leaks.threads("mirror side") == []


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_an_error_while_a_bucket_is_on_its_way_leaves_nothing_behind(make_bucketed, schedule):
    strategy = make_bucketed(2, schedule=schedule)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    reached = threading.Event()

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            if mirror.get_replica_context().replica_id_in_sync_group == 1:
                assert schedule == "staggered" or strategy._group.gradients.tracker.in_flight
                reached.set()
                raise ValueError("in backward")
            return grad

    def failing(x):
        x = Failing.apply(model.layers[0](x).tanh())
        for layer in model.layers[1:]:
            x = layer(x).tanh()
        x.square().mean().backward()

    with pytest.raises(ValueError, match="in backward"):
        in_run(strategy, failing, torch.randn(10, SIZE))
    assert reached.is_set()
    assert all(parameter.grad is None for parameter in model.parameters())
    batch = torch.randn(10, SIZE)
    backward_in_run(strategy, model, batch)
    loss_of(plain, batch).backward()
    assert_same_grads(strategy, model, plain)


def test_a_failing_reduction_is_raised_where_it_is_awaited(make_bucketed, monkeypatch):
    strategy = make_bucketed(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)

    def failing(*args):
        raise OSError("cable cut")

    with monkeypatch.context() as patch:
        patch.setattr(strategy._group.replicas.communicator, "all_reduce_checked", failing)
        with pytest.raises(OSError, match="cable cut"):
            backward_in_run(strategy, model, torch.randn(10, SIZE))
    batch = torch.randn(10, SIZE)
    backward_in_run(strategy, model, batch)
    loss_of(plain, batch).backward()
    assert_same_grads(strategy, model, plain)


def test_a_model_that_dies_after_backward_takes_no_gradients_of_another(make_bucketed):
    # What was on its way of it was still counted, and as many gradients of the next model's pass
    # were left out of their reduction.
    strategy = make_bucketed(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    loss_of(model, torch.randn(10, SIZE)).backward()
    gone = weakref.ref(model.layers[4].weight)
    variable = weakref.ref(model.layers[4].weight._mirrored)
    del model
    gc.collect()
    assert gone() is None
    plain, model = pair(strategy)
    for batch in batches(2):
        backward_in_run(strategy, model, batch)
        loss_of(plain, batch).backward()
        assert_same_grads(strategy, model, plain)
    gc.collect()
    assert variable() is None


def test_a_layer_replaced_after_backward_takes_no_gradients_of_the_others(make_bucketed):
    strategy = make_bucketed(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    batch = torch.randn(10, SIZE)
    for m in (plain, model):
        loss_of(m, batch).backward()
        m.layers[3] = nn.Linear(SIZE, SIZE)
        gc.collect()
    model.layers[3].load_state_dict(plain.layers[3].state_dict())
    assert_same_grads(strategy, model, plain)
    backward_in_run(strategy, model, batch)
    loss_of(plain, batch).backward()
    assert_same_grads(strategy, model, plain)


def test_closing_ends_the_thread_that_reduces(make_bucketed, leaks):
    strategy = make_bucketed(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    loss_of(model, torch.randn(10, SIZE)).backward()
    assert len(leaks.threads("mirror side")) == 1
    strategy.close()
    assert leaks.threads("mirror side") == []
    del model
    gc.collect()


def test_a_strategy_that_is_gone_leaves_no_threads(leaks):
    def use():
        packs = mirror.CommunicationOptions(bytes_per_pack=300)
        strategy = mirror.MirroredStrategy(["cpu"] * 2, communication_options=packs)
        model = strategy.mirror(Deep())
        for batch in batches(3):
            backward_in_run(strategy, model, batch)

    use()
    gc.collect()
    for thread in leaks.threads():
        thread.join(60)
        assert not thread.is_alive()
