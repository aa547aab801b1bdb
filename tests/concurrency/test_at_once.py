"""Replicas that run at once: what each computes with, and that all of them end."""

import copy
import threading

import pytest
import torch
from torch import nn

import mirror
from mirror.concurrency import pace
from tests.oracle import assert_same, finishes, in_run


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_of_replicas_that_run_at_once_use_their_own_weights(
    make_strategy, monkeypatch, kind
):
    # In every call an RNN makes a list of its weights, an attribute of the module that replicas
    # share, and reads it a moment later: what another replica had put there in between.
    monkeypatch.setattr(pace, "LONG_SECONDS", -1.0)  # all start at once
    monkeypatch.setattr(pace, "LOOKS", 1)
    both_have_made_theirs = threading.Barrier(2, timeout=10)

    class Met(kind):
        def _init_flat_weights(self):
            super()._init_flat_weights()
            if mirror.has_strategy():
                both_have_made_theirs.wait()

    plain = Met(3, 2, batch_first=True)
    strategy = make_strategy(2, schedule="staggered")
    strategy.run(lambda: None)
    layer = strategy.mirror(copy.deepcopy(plain))

    def grads(x, layer=layer):
        return torch.autograd.grad(layer(x)[0].sum(), list(layer.parameters()))

    x = torch.randn(4, 5, 3)
    own, error, _ = finishes(lambda: strategy.local_results(in_run(strategy, grads, x)))
    assert error is None
    assert_same(list(own), [grads(part, plain) for part in x.chunk(2)])
