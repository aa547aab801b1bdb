"""Strategies created, used, failed and closed by several threads: their own, and shared ones."""

import gc
import random
import threading
import time

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import DivergenceError, StrategyError
from tests.oracle import assert_same, train

NUM_THREADS = 4
NUM_MODELS = 5
BACKENDS = ["auto", "naive", "direct", "ring"]
BATCH = (torch.linspace(-1, 1, 21).view(7, 3), torch.linspace(0, 1, 7).view(7, 1))


class RaisedError(Exception):
    """What a program raises on one of its replicas."""


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def model_of(seed):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(3, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return model


def plain_steps(seed, num_steps):
    model = model_of(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss_fn(model, BATCH).backward()
        optimizer.step()
    return model.state_dict()


def raises_on_one(strategy):
    def fn():
        if mirror.get_replica_context().replica_id_in_sync_group == 1:
            raise RaisedError
        mirror.get_replica_context().all_reduce("sum", torch.ones(2))

    with pytest.raises(RaisedError):
        strategy.run(fn)


def parts_ways(strategy):
    def fn():
        context = mirror.get_replica_context()
        context.all_reduce("sum", torch.ones(1 + context.replica_id_in_sync_group))

    with pytest.raises(DivergenceError):
        strategy.run(fn)


def use_own(draw, expected):
    """A strategy of this thread's own: trains exactly, between failures."""
    num_replicas, seed = draw.randint(2, 3), draw.randrange(NUM_MODELS)
    schedule = draw.choice(["lockstep", "staggered", "parallel"])
    strategy = mirror.MirroredStrategy(
        ["cpu"] * num_replicas, draw.choice(BACKENDS), schedule=schedule
    )
    with strategy.scope():
        model = strategy.mirror(model_of(seed))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    num_steps = draw.randint(1, 3)
    for _ in range(num_steps):
        for fail in draw.sample([raises_on_one, parts_ways], draw.randint(0, 2)):
            fail(strategy)
        train(draw.randint(1, 3), strategy, model, optimizer, [BATCH], loss_fn)
    assert_same(model.state_dict(), expected[seed, num_steps])
    if draw.random() < 0.7:
        strategy.close()
        with pytest.raises(StrategyError):
            strategy.run(lambda: None)


def use_shared(strategy, counts):
    """One that others use at this moment, too: it serves one thread, and refuses the others."""
    try:
        values = strategy.run(
            lambda: mirror.get_replica_context().all_reduce("sum", torch.ones(3))
        )
    except StrategyError as error:
        assert "another thread's run" in str(error)  # noqa: PT017
        counts.append("refused")
    else:
        assert [v.tolist() for v in values.values] == [[3.0] * 3] * 3
        counts.append("ran")


def many_threads(num_rounds):
    before = threading.active_count()
    errors, counts = [], []
    # Before there are strategies, which would wonder about a plain model.
    expected = {(s, k): plain_steps(s, k) for s in range(NUM_MODELS) for k in (1, 2, 3)}
    shared = mirror.MirroredStrategy(["cpu"] * 3, "naive")

    def work(seed):
        draw = random.Random(seed)
        try:
            for _ in range(num_rounds):
                use_own(draw, expected)
                for _ in range(5):
                    use_shared(shared, counts)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60 + 2 * num_rounds)
        assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]
    assert counts.count("ran") >= num_rounds
    shared.close()
    return before


def gone(before):
    """Waits until the threads of unreferenced strategies have ended."""
    deadline = time.monotonic() + 20
    while threading.active_count() > before:
        # A strategy that was dropped goes with a collection, and its threads with the next look.
        gc.collect()
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


# The threads draw from one generator, so a parallel run cannot tell which of them has drawn.
pytestmark = pytest.mark.filterwarnings('ignore:schedule="parallel". from now on')


def test_threads_with_strategies_of_their_own_and_a_shared_one_do_not_meet():
    gone(many_threads(2))


@pytest.mark.slow
def test_many_rounds_of_threads_do_not_meet():
    gone(many_threads(60))
