"""What is on its way when something ends: nothing is left behind, nothing goes to another."""

import threading
import weakref

import torch
from torch import nn

import mirror
from tests.ones import ONES, collect, mirrored_layer

# Lifetime


def test_gradients_that_nobody_looked_at_keep_nothing_alive():
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


def test_backward_after_close_starts_no_thread(make_strategy):
    # A bucket that was complete after `close` started the thread that `close` had ended anew.
    strategy = make_strategy(
        2, communication_options=mirror.CommunicationOptions(bytes_per_pack=0)
    )
    model = strategy.mirror(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    loss = model(torch.ones(4, 2)).mean()
    loss.backward(retain_graph=True)
    model.zero_grad()
    strategy.close()
    loss.backward()
    assert not any("mirror side" in thread.name for thread in threading.enumerate())
