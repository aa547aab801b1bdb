"""Replicas of simulated GPUs stall where CUDA blocks; those of distinct GPUs step themselves."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn

import mirror
from mirror.threads import schedule
from tests.gpu.fake import FakeGpus
from tests.toy_models import replica_id

SHARED, DISTINCT = ["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"]
NESTED = [(0, "before"), (1, "before"), (0, "after"), (1, "after")]
IN_TURN = [(0, "before"), (0, "after"), (1, "before"), (1, "after")]
BLOCKING = {
    "item": lambda x: x.sum().item(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "a copy of pageable memory": lambda x: torch.ones(2).to(x.device),
    "synchronize": lambda x: torch.cuda.synchronize(x.device),
    "a stream": lambda x: torch.cuda.current_stream(x.device).synchronize(),
    "an event": lambda x: torch.cuda.current_stream(x.device).record_event().synchronize(),
}


@contextmanager
def gpus_alone_stall():
    """Gives GPUs; the detector takes no thread for stalled that a busy machine lets wait."""
    with FakeGpus(2) as gpus:
        stalled = gpus.streams.stalls.threads

        def positions(threads):
            return [0 if thread.ident in stalled else object() for thread in threads]

        with mock.patch.object(schedule, "positions", positions):
            yield gpus


def order_of(devices, block, **options):
    """Returns in which order two replicas come to a call, and go on after it."""
    seen = []
    with gpus_alone_stall(), mirror.MirroredStrategy(devices, "naive", **options) as strategy:

        def step():
            x = torch.ones(2, device=mirror.get_replica_context().device)
            seen.append((replica_id(), "before"))
            block(x)
            seen.append((replica_id(), "after"))

        strategy.run(lambda: None)  # the first run takes turns
        strategy.run(step)
    return seen


@pytest.mark.parametrize("kind", BLOCKING)
def test_the_next_replica_begins_while_one_waits_for_its_gpu(kind):
    assert order_of(DISTINCT, BLOCKING[kind]) == NESTED


@pytest.mark.parametrize("options", [{"schedule": "lockstep"}, {"devices": SHARED}])
def test_replicas_that_take_turns_wait_for_their_gpus_alone(options):
    assert order_of(**{"devices": DISTINCT, "block": torch.Tensor.tolist} | options) == IN_TURN


@pytest.mark.parametrize(
    ("call", "num_stalls"),
    [
        (lambda x: x + 1, 0),
        (lambda x: torch.ones(2).pin_memory().to(x.device, non_blocking=True), 0),
        (lambda x: torch.ones(2).to(x.device, non_blocking=True), 0),
        (lambda x: x.copy_(x.flip(0)), 0),
        (lambda x: x.cpu() + x.add(1).cpu(), 2),
    ],
)
def test_what_waits_for_nothing_is_no_stall(call, num_stalls):
    with FakeGpus(2) as gpus, mirror.MirroredStrategy(DISTINCT, "naive") as strategy:
        strategy.run(lambda: None)
        before = gpus.streams.stalls.num
        strategy.run(lambda: call(torch.ones(2, device=mirror.get_replica_context().device)))
        assert gpus.streams.stalls.num - before == 2 * num_stalls


def test_a_replica_that_stalls_goes_on_when_the_others_wait_at_a_merge():
    seen = []
    with gpus_alone_stall(), mirror.MirroredStrategy(DISTINCT, "naive") as strategy:

        def step():
            context = mirror.get_replica_context()
            x = torch.full((2,), float(replica_id()), device=context.device)
            if replica_id() == 0:
                x.sum().item()
            seen.append(replica_id())
            return context.all_reduce("sum", x).tolist()

        strategy.run(lambda: None)
        assert strategy.local_results(strategy.run(step)) == ([1, 1], [1, 1])
    assert seen == [1, 0]


def test_a_replica_that_fails_ends_the_stalls_of_the_others():
    with FakeGpus(2), mirror.MirroredStrategy(DISTINCT, "naive") as strategy:

        def step():
            x = torch.ones(2, device=mirror.get_replica_context().device)
            if replica_id() == 1:
                raise ValueError("on purpose")
            x.sum().item()

        strategy.run(lambda: None)
        with pytest.raises(ValueError, match="on purpose"):
            strategy.run(step)


@pytest.mark.parametrize(("devices", "steps_once"), [(SHARED, True), (DISTINCT, False)])
def test_replicas_of_distinct_gpus_make_steps_of_their_own(devices, steps_once):
    steps = []
    with FakeGpus(2), mirror.MirroredStrategy(devices, "naive") as strategy:
        model = strategy.mirror(nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: steps.append(model.weight.device))

        def step():
            model(torch.ones(2, 2, device=mirror.get_replica_context().device)).sum().backward()
            optimizer.step()

        strategy.run(step)
        assert strategy._group.replicas.steps_once is steps_once
        strategy.check_replicas()
