"""What a function given to merge_call does reaches all replicas, those too that sat out."""

import time

import pytest
import torch

import mirror
from tests.oracle import in_run
from tests.toy_models import mirrored_layer, sgd


def test_merge_call_brings_idle_replicas_along(make_strategy):
    # A replica without a part of the batch kept the weights from before the others' step.
    strategy = make_strategy(3)
    layer = mirrored_layer(strategy)
    optimizer = sgd(layer, lr=2.0)

    def evaluate(strategy):
        return layer(torch.ones(3, 1)).detach().flatten().tolist()

    def step(batch):
        layer(batch).mean().backward()
        optimizer.step()
        return mirror.get_replica_context().merge_call(evaluate)

    outputs = in_run(strategy, step, torch.ones(2, 1))
    assert strategy.local_results(outputs)[0] == [-1.0, -1.0, -1.0]
    strategy.check_replicas()


def test_merge_call_that_raises_leaves_replicas_alike(make_strategy):
    # What the function wrote before it raised reached the first replica only.
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)

    @torch.no_grad()
    def write_and_fail(strategy):
        layer.weight.add_(1)
        raise ValueError("after writing")

    def step():
        with pytest.raises(ValueError, match="after writing"):
            mirror.get_replica_context().merge_call(write_and_fail)
        return layer(torch.ones(1, 1)).item()

    assert strategy.local_results(strategy.run(step)) == (2.0, 2.0)
    strategy.check_replicas()


def test_merge_call_may_take_longer_than_the_timeout_while_its_runs_move(make_strategy):
    # An evaluation in merge_call was cut off: the outer run saw none of its inner runs move.
    options = mirror.CommunicationOptions(timeout_seconds=0.75)
    strategy = make_strategy(2, communication_options=options)

    def evaluate(strategy):
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            strategy.run(lambda: None)
        return 1

    results = strategy.run(lambda: mirror.get_replica_context().merge_call(evaluate))
    assert strategy.local_results(results) == (1, 1)
