"""Epochs over a distributed dataset are those of the plain loop, also made again in each epoch."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import mirror
from tests.data.reading import StreamGoesOn, whole
from tests.pairs import each_once

EPOCHS = 4


def make_loader(num_workers, persistent, own_generator):
    generator = torch.Generator().manual_seed(7) if own_generator else None
    return DataLoader(
        TensorDataset(torch.arange(10)),
        batch_size=4,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=persistent,
        generator=generator,
    )


def consume(batches, stop_after):
    """Returns the examples of the batches, and what the program draws after them."""
    seen = []
    for i, (x,) in enumerate(batches):
        x = whole(x) if isinstance(x, mirror.PerReplica) else x
        seen.append(x.tolist())
        if i + 1 == stop_after:
            break
    del batches
    return seen, torch.rand(()).item()


@each_once(n=[1, 2, 3], prefetch=[0, 2], workers=["none", "new", "persistent"])
def test_every_epoch_has_the_order_of_the_plain_loop(make_strategy, n, prefetch, workers):
    num_workers, persistent = int(workers != "none"), workers == "persistent"
    draw = random.Random(f"{n} {prefetch} {num_workers} {persistent}")
    strategy = make_strategy(n)
    options = mirror.InputOptions(prefetch=prefetch)
    for own_generator in (False, True):
        stops = [draw.choice([None, None, 1, 2]) for _ in range(EPOCHS)]

        def plain(own_generator=own_generator, stops=stops):
            torch.manual_seed(0)
            loader = make_loader(num_workers, persistent, own_generator)
            return [consume(iter(loader), stop) for stop in stops]

        def distributed_once(own_generator=own_generator, stops=stops):
            torch.manual_seed(0)
            dataset = strategy.distribute_dataset(
                make_loader(num_workers, persistent, own_generator), options
            )
            return [consume(iter(dataset), stop) for stop in stops]

        def distributed_in_every_epoch(own_generator=own_generator, stops=stops):
            torch.manual_seed(0)
            loader = make_loader(num_workers, persistent, own_generator)
            return [consume(iter(strategy.distribute_dataset(loader, options)), s) for s in stops]

        expected = plain()
        assert distributed_once() == expected
        assert distributed_in_every_epoch() == expected


def test_a_loader_distributed_again_keeps_its_worker_processes(make_strategy, leaks):
    strategy = make_strategy(2)
    loader = make_loader(num_workers=1, persistent=True, own_generator=False)
    processes = []
    for _ in range(3):
        for _ in strategy.distribute_dataset(loader):
            pass
        processes.append(leaks.processes())
    assert len(processes[0]) == 1
    assert processes[1:] == processes[:1] * 2
    del loader
    assert leaks.processes() == []


def test_an_iterator_that_ends_after_a_state_was_loaded_changes_nothing(make_strategy):
    loader = make_loader(num_workers=0, persistent=False, own_generator=True)
    dataset = make_strategy(2).distribute_dataset(loader)
    state = dataset.state_dict()
    expected = [whole(x).tolist() for (x,) in dataset]
    iterator = iter(dataset)
    next(iterator)
    dataset.load_state_dict(state)
    seen = []
    for (x,) in dataset:
        iterator = None
        seen.append(whole(x).tolist())
    assert seen == expected


def test_a_stream_that_was_read_ahead_to_its_end_goes_on_where_its_consumer_left(make_strategy):
    dataset = make_strategy(2).distribute_dataset(StreamGoesOn(), mirror.InputOptions(prefetch=10))
    for _ in dataset:
        break
    assert [whole(x).tolist() for x in dataset] == [[i, i] for i in range(2, 10)]


def test_a_generator_that_the_program_draws_from_too_is_not_rewound(make_strategy):
    loader = make_loader(num_workers=0, persistent=False, own_generator=True)
    dataset = make_strategy(2).distribute_dataset(loader)
    for _ in dataset:
        drawn = torch.rand(4, generator=loader.generator)
        break
    for _ in range(5):
        assert not torch.rand(4, generator=loader.generator).equal(drawn)
    seen = []
    for _ in range(3):
        for _ in dataset:
            seen.append(torch.rand(4, generator=loader.generator).tolist())
            break
    assert len(set(map(tuple, seen))) == 3


class Hidden:
    """Holds a loader, or a generator, that nothing else knows of."""

    def __init__(self, kind):
        self.generator = torch.Generator().manual_seed(5)
        self.loader = DataLoader(
            TensorDataset(torch.arange(10)), batch_size=2, shuffle=True, generator=self.generator
        )
        self.read = getattr(self, kind)

    def __iter__(self):
        return self.read()

    def shuffled(self):
        for batch in self.loader:
            yield [leaf * 2 for leaf in batch]

    def noise(self):
        for i in range(5):
            yield [torch.full((2,), i) + torch.rand(2, generator=self.generator)]

    def noise_now_and_then(self):
        for i in range(5):
            random = torch.rand(2, generator=self.generator) if i % 3 == 2 else 0
            yield [torch.full((2,), i) + random]


@pytest.mark.parametrize("kind", ["shuffled", "noise", "noise_now_and_then"])
@pytest.mark.parametrize("stop", [1, 2, 4, 5, None])
def test_a_generator_that_only_the_dataset_holds_draws_for_what_is_taken(
    make_strategy, kind, stop
):
    plain = Hidden(kind)
    expected = [consume(plain, stop)[0] for _ in range(EPOCHS)]
    batches = make_strategy(2).distribute_dataset(Hidden(kind))
    assert [consume(batches, stop)[0] for _ in range(EPOCHS)] == expected
