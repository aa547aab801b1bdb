"""Programs of several workers have the gradients and buffers of one device."""

import random
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.pairs import each_once
from tests.replica.multi_worker.programs import (
    Net,
    OneDevice,
    Worker,
    assert_as_one_device,
    rank,
    strategy_of,
)
from tests.replica.multi_worker.test_multi_worker_gradients import Heads

NUM_STEPS = 14


def takes_random_steps(place, seed):
    draws = random.Random(seed)
    with place.scope():
        model = Heads()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    parameters = list(model.parameters())

    def make_pass():
        which = draws.sample(range(3), draws.randint(1, 3))
        batch = draws.choice(place.batches)
        place.backward(lambda x, y: F.cross_entropy(model(x, which), y), *batch)

    def keep_back():
        with place.no_sync():
            for _ in range(draws.randint(1, 2)):
                make_pass()

    def freeze():
        model.heads[draws.randrange(3)].requires_grad_(draws.random() < 0.6)

    def drop():
        draws.choice(parameters).grad = None

    steps = [make_pass, make_pass, keep_back, freeze, drop, optimizer.step, optimizer.zero_grad]
    for _ in range(NUM_STEPS):
        draws.choice(steps)()
        if draws.random() < 0.5:
            place.keep(model)
    optimizer.step()
    place.keep(model, grads=False)


@pytest.mark.parametrize("seed", range(2))
def test_random_programs(worker_pool, seed):
    assert_as_one_device(worker_pool, partial(takes_random_steps, seed=seed), way=1 + 2 * seed)


@pytest.mark.slow
@each_once(seed=range(2, 14), counts=[(1, 1), (1, 2)])
def test_more_random_programs(worker_pool, seed, counts):
    program = partial(takes_random_steps, seed=seed)
    assert_as_one_device(worker_pool, program, counts, 1 + seed % 3, tolerance=3e-6)


SIZES = (8, 5, 2, 1, 8)  # of global batches: a worker without examples among them


def gan(place, order, is_detached):
    """Alternates steps; keeps what gradients there are after each, and the last values."""
    with place.scope():
        generator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
        critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    of_generator, of_critic = (
        torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=0.1)
        for model in (generator, critic)
    )

    def critics_loss(x, _):
        fake = generator(x)
        judged, real = critic(fake.detach() if is_detached else fake), critic(x + 1)
        wrong = F.binary_cross_entropy_with_logits(judged, torch.zeros_like(judged))
        return wrong + F.binary_cross_entropy_with_logits(real, torch.ones_like(real))

    def generators_loss(x, _):
        judged = critic(generator(x))
        return F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))

    steps = {"c": (of_critic, critics_loss), "g": (of_generator, generators_loss)}
    for x, y in place.batches:
        for which in order:
            optimizer, loss_of = steps[which]
            optimizer.zero_grad()
            place.backward(loss_of, x.double(), y)
            optimizer.step()
            place.keep(generator, critic)
    place.keep(generator, critic, grads=False)
    return place.kept


def on_worker(way, *args):
    place = Worker((1, 1), way, SIZES)
    try:
        return gan(place, *args)
    finally:
        place.strategy.close()


@each_once(**{"way,order": [(1, "cg"), (3, "gcc")]}, is_detached=[True, False])
def test_a_pass_of_one_network_leaves_the_others_gradients(worker_pool, way, order, is_detached):
    expected = gan(OneDevice(SIZES), order, is_detached)
    for found in worker_pool(2).run(on_worker, way, order, is_detached):
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def passes(sizes, *, in_run=False):
    """Trains a step by two calls of these sizes per worker; returns what was warned of."""
    with mirror.MultiWorkerMirroredStrategy(["cpu"]) as strategy:
        rank = strategy._group.replicas.workers.rank
        with strategy.scope():
            model = nn.Linear(3, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                if in_run:
                    strategy.run(lambda: sum(_losses(model, sizes[rank])).backward())
                else:
                    sum(_losses(model, sizes[rank])).backward()
                assert model.weight.grad is not None
        return [str(one.message) for one in caught if "proportions" in str(one.message)]


def _losses(model, sizes):
    return [model(torch.ones(size, 3)).mean() for size in sizes]


@pytest.mark.parametrize(
    "sizes", [[(4, 4), (4, 4)], [(4, 4), (2, 2)], [(4, 2), (8, 4)], [(3,), (5,)]]
)
def test_equal_proportions_are_right(worker_pool, sizes):
    assert worker_pool(2).run(passes, sizes) == [[], []]


def test_passes_of_different_sizes_warn_once_on_all_workers(worker_pool):
    for told in worker_pool(2).run(passes, [(4, 2), (4, 4)]):
        (message,) = told
        assert "worker 0: 4, 2; worker 1: 4, 4" in message
        assert "inside strategy.run" in message


def test_inside_run_nothing_warns(worker_pool):
    assert worker_pool(2).run(passes, [(4, 2), (4, 4)], in_run=True) == [[], []]


BATCH = torch.arange(48.0).reshape(12, 4).sin()


def buffers_after_training(strategy, batches, aggregation):
    with strategy.scope():
        model = Net()
    if aggregation is not None:
        model.norm.register_buffer("seen", torch.zeros(()))
        mirror.set_aggregation(model.norm, "seen", aggregation)

    def step(x):
        if aggregation is not None:
            model.norm.seen += x.sum()
        return model(x)

    for _ in range(2):
        strategy.run(step, args=(mirror.PerReplica(list(batches)),))
    return {name: value.tolist() for name, value in model.named_buffers()}


def trained(num_local, aggregation):
    with strategy_of(num_local) as strategy:
        batches = BATCH.chunk(2)[rank()].chunk(num_local)
        return buffers_after_training(strategy, batches, aggregation)


def of_one_process(num_local, aggregation):
    with mirror.MirroredStrategy(["cpu"] * 2 * num_local) as strategy:
        torch.manual_seed(0)
        return buffers_after_training(strategy, BATCH.chunk(2 * num_local), aggregation)


@pytest.mark.parametrize("aggregation", [None, "sum", "mean", "first"])
@pytest.mark.parametrize("num_local", [1, 2])
def test_they_are_those_of_as_many_replicas_of_one_process(worker_pool, num_local, aggregation):
    first, second = worker_pool(2).run(trained, num_local, aggregation)
    assert first == second
    for name, value in of_one_process(num_local, aggregation).items():
        assert first[name] == pytest.approx(value, rel=1e-6), name
