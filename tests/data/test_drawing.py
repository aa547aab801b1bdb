"""Prefetching draws the random numbers of a plain loop, in the same order."""

import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from tests.data.reading import SECONDS, Gate, distributed, whole
from tests.pairs import each_once

pytestmark = [
    pytest.mark.usefixtures("leave_nothing_behind"),
    # From Python 3.12 on, about every fork of workers while there are threads.
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]


class Augmented(Dataset):
    """Every example is noise from all three global generators."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor(
            [index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64
        )


def shuffled_forever(loader):
    while True:
        yield from loader


def noise():
    for i in range(8):
        yield torch.randn(3) if i % 3 == 1 else torch.full((3,), float(i))


def seeding():
    for i in range(6):
        torch.manual_seed(i)
        yield torch.rand(3)


def from_python():
    for _ in range(6):
        yield torch.tensor([random.random()] * 2)


EXAMPLES = TensorDataset(torch.arange(24.0))
DRAWING = {
    "augmentation": lambda: DataLoader(Augmented(), batch_size=3, shuffle=True),
    "shuffling": lambda: DataLoader(EXAMPLES, batch_size=3, shuffle=True),
    "workers": lambda: DataLoader(Augmented(), batch_size=3, shuffle=True, num_workers=2),
    "epochs in a generator": lambda: shuffled_forever(
        DataLoader(EXAMPLES, batch_size=6, shuffle=True)
    ),
    "noise now and then": noise,
    "a seed in the dataset": seeding,
    "Python's generator": from_python,
}


def trained(dataset, step_draws):
    """Returns what a loop draws that is left after some steps, and what comes after it."""
    torch.manual_seed(4), random.seed(4), np.random.seed(4)
    found = []
    for batch in dataset:
        found += [leaf.flatten().tolist() for leaf in tensors(batch)]
        if step_draws:
            found.append([torch.rand(()).item(), random.random(), np.random.rand()])
        if len(found) > 8:
            break
    return [*found, torch.rand(3).tolist(), random.random()]


def tensors(batch):
    if isinstance(batch, (list, tuple)):
        return [leaf for item in batch for leaf in tensors(item)]
    return [batch if isinstance(batch, torch.Tensor) else whole(batch)]


@each_once(
    make=[pytest.param(value, id=key) for key, value in DRAWING.items()], step_draws=[False, True]
)
def test_a_seed_gives_the_batches_and_draws_of_a_plain_loop(make, step_draws):
    plain = trained(make(), step_draws)
    for prefetch in (0, 1, 4, 4):
        assert trained(distributed(make(), prefetch), step_draws) == plain


def test_a_loader_that_draws_nothing_is_read_ahead_of_steps_that_draw():
    gate = Gate(4)
    gate.allowed.release(4)
    for i, _ in enumerate(distributed(gate)):
        torch.rand(3)
        gate.await_read(min(i + 3, 4))


class Awaited(Dataset):
    """Tells when an example has been read."""

    def __init__(self):
        self.read = 0
        self.arrived = threading.Condition()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        with self.arrived:
            self.read += 1
            self.arrived.notify_all()
        return index


@pytest.mark.parametrize("sampler", [None, WeightedRandomSampler([1.0] * 8, 8)])
def test_a_loader_that_only_shuffles_is_read_ahead(sampler):
    examples = Awaited()
    loader = DataLoader(examples, batch_size=2, sampler=sampler, shuffle=sampler is None)
    iterator = iter(distributed(loader))
    next(iterator)
    with examples.arrived:
        assert examples.arrived.wait_for(lambda: examples.read == 6, timeout=SECONDS)


def test_a_draw_in_the_middle_waits_until_it_is_asked_for():
    begun = threading.Event()

    def batches():
        yield torch.zeros(2)
        begun.set()
        yield torch.rand(2, generator=torch.default_generator)

    torch.manual_seed(6)
    expected = torch.rand(3), torch.rand(2)
    torch.manual_seed(6)
    iterator = iter(distributed(batches()))
    next(iterator)
    assert begun.wait(SECONDS)
    assert torch.equal(torch.rand(3), expected[0])
    assert torch.equal(whole(next(iterator)), expected[1])


def test_an_unused_draw_is_not_made(leaks):
    reads_on = threading.Event()

    class Late:
        def __iter__(self):
            yield torch.zeros(2)
            reads_on.set()
            yield torch.rand(2)

    before = torch.get_rng_state()
    iterator = iter(distributed(Late()))
    next(iterator)
    assert reads_on.wait(SECONDS)
    del iterator
    assert torch.equal(torch.get_rng_state(), before)
    assert leaks.threads("mirror input") == []
