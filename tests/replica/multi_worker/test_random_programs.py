"""Random programs: whatever workers do together, they have the gradients of one device."""

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.replica.multi_worker.beside_one_device import assert_as_one_device
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
@pytest.mark.parametrize("counts", [(1, 1), (1, 2)])
@pytest.mark.parametrize("seed", range(2, 14))
def test_more_random_programs(worker_pool, seed, counts):
    program = partial(takes_random_steps, seed=seed)
    assert_as_one_device(worker_pool, program, counts, 1 + seed % 3, tolerance=3e-6)
