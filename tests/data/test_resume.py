"""state_dict and load_state_dict of a distributed dataset: exact to the batch, every source."""

import random
from itertools import chain

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    TensorDataset,
)

from mirror.data import DistributedDataset, from_arrays
from mirror.values import PerReplica
from tests.data.resumable import (
    DATASETS,
    NUM_BATCHES,
    TWO,
    Numbers,
    contents,
    distributed,
    loader,
    seeded,
    stateful,
    through_a_file,
)
from tests.pairs import each_once, quick_of

# From Python 3.12 on, about every fork of workers while there are threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


IN_PROCESS = pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS.keys())


def uninterrupted(make, epochs, **options):
    torch.manual_seed(5)
    random.seed(5)
    dataset = distributed(make(), **options)
    return [[contents(batch) for batch in dataset] for _ in range(epochs)]


def resumed(make, epoch, count, epochs, tmp_path, **options):
    """Stops after ``count`` batches of an epoch; goes on elsewhere, under another seed."""
    torch.manual_seed(5)
    random.seed(5)
    dataset = distributed(make(), **options)
    for _ in range(epoch):
        list(dataset)
    iterator = iter(dataset)
    for _ in range(count):
        next(iterator)
    state = through_a_file(dataset.state_dict(), tmp_path)
    del iterator
    torch.manual_seed(99)
    random.seed(99)
    dataset = distributed(make(), **options)
    dataset.load_state_dict(state)
    return [[contents(batch) for batch in dataset] for _ in range(epoch, epochs)]


@each_once(
    make=[pytest.param(value, id=key) for key, value in DATASETS.items()],
    prefetch=[0, 2],
)
def test_at_every_batch_what_is_left_comes_and_later_epochs_as_they_would(
    make, prefetch, tmp_path
):
    expected = uninterrupted(make, 3)
    for count in range(NUM_BATCHES + 1):
        first, *later = resumed(make, 1, count, 3, tmp_path, prefetch=prefetch)
        assert first == expected[1][count:]
        assert later == expected[2:]


@each_once(persistent=[False, True], count=quick_of([0, 1, 3, 4], [1, 4]))
def test_a_loader_with_workers_resumes(count, persistent, tmp_path):
    def make():
        return loader(shuffle=True, num_workers=2, persistent_workers=persistent)

    expected = uninterrupted(make, 3)
    assert sorted(chain.from_iterable(expected[1])) == list(range(11))
    first, *later = resumed(make, 1, count, 3, tmp_path)
    assert first == expected[1][count:]
    assert later == expected[2:]


def test_an_iterable_style_loader_with_workers_resumes(tmp_path):
    def make():
        return DataLoader(Numbers(), batch_size=3, num_workers=1)

    expected = uninterrupted(make, 1)
    assert resumed(make, 0, 2, 1, tmp_path) == [expected[0][2:]]


def test_torchdata_with_workers_resumes(tmp_path):
    def make():
        return stateful(shuffle=True, num_workers=1)

    expected = uninterrupted(make, 2)
    for count in (0, 2, 4):
        first, later = resumed(make, 0, count, 2, tmp_path)
        assert first == expected[0][count:]
        assert sorted(chain.from_iterable(later)) == list(range(11))


def test_only_indices_are_skipped_and_no_data_read(tmp_path):
    read = []

    class Recording(Dataset):
        def __len__(self):
            return 11

        def __getitem__(self, index):
            read.append(index)
            return index

    def make():
        return DataLoader(Recording(), batch_size=3)

    state = None
    for batch in (dataset := distributed(make(), prefetch=0)):
        if 6 in contents(batch):
            state = dataset.state_dict()
            break
    read.clear()
    fresh = distributed(make())
    fresh.load_state_dict(state)
    assert [contents(batch) for batch in fresh] == [[9, 10]]
    assert read == [9, 10]


def test_a_generator_made_again_resumes_by_skipping():
    def make():
        return (torch.full((2,), i) for i in range(5))

    dataset = distributed(make())
    iterator = iter(dataset)
    next(iterator), next(iterator)
    state = dataset.state_dict()
    fresh = distributed(make())
    fresh.load_state_dict(state)
    assert [contents(batch)[0] for batch in fresh] == [2, 3, 4]
    assert list(fresh) == []


def test_what_a_generator_draws_goes_on_as_in_the_uninterrupted_run():
    def make():
        order = torch.randperm(12)
        return ([order[3 * i : 3 * i + 3], torch.randn(3)] for i in range(4))

    def run(dataset):
        for order, noise in dataset:
            yield contents(order), contents(noise), torch.rand(()).item()  # the step draws, too

    torch.manual_seed(3)
    expected = list(run(distributed(make())))
    torch.manual_seed(3)
    dataset = distributed(make())
    steps = run(dataset)
    next(steps), next(steps)
    state = dataset.state_dict()
    torch.manual_seed(3)  # the generator is made as it was made
    fresh = distributed(make())
    fresh.load_state_dict(state)
    assert list(run(fresh)) == expected[2:]


def test_between_epochs_the_next_one_is_the_one_that_would_come():
    for options in ({}, {"generator": seeded()}):
        dataset = distributed(loader(shuffle=True, **options))
        list(dataset)
        state = dataset.state_dict()
        expected = [contents(batch) for batch in dataset]
        fresh = distributed(loader(shuffle=True, **({"generator": seeded()} if options else {})))
        fresh.load_state_dict(state)
        assert [contents(batch) for batch in fresh] == expected


def test_a_loop_that_was_left_stands_where_it_was_left():
    dataset = distributed(loader())
    for batch in dataset:
        if 3 in contents(batch):
            break
    fresh = distributed(loader())
    fresh.load_state_dict(dataset.state_dict())
    assert [contents(batch) for batch in fresh] == [[6, 7, 8], [9, 10]]
    assert next(contents(batch) for batch in dataset) == [0, 1, 2]  # a new loop starts over


def test_a_loaded_state_is_given_out_until_the_iteration_begins():
    dataset = distributed(loader(shuffle=True))
    next(iter(dataset))
    state = dataset.state_dict()
    fresh = distributed(loader(shuffle=True))
    fresh.load_state_dict(state)
    torch.manual_seed(8)
    again = fresh.state_dict()
    assert again["num_consumed"] == 1
    assert torch.equal(again["streams"]["torch"], state["streams"]["torch"])


def test_a_state_does_not_change_when_the_iteration_goes_on():
    dataset = distributed(loader())
    iterator = iter(dataset)
    next(iterator)
    state = dataset.state_dict()
    list(iterator)
    assert state["num_consumed"] == 1


def test_the_number_of_replicas_may_change():
    dataset = DistributedDataset(loader(), TWO)
    next(iter(dataset))
    fresh = DistributedDataset(loader(), [torch.device("cpu")] * 3)
    fresh.load_state_dict(dataset.state_dict())
    assert [contents(batch) for batch in fresh] == [[3, 4, 5], [6, 7, 8], [9, 10]]


def test_drop_remainder_knows_the_first_size_after_resuming():
    dataset = distributed(loader(), drop_remainder=True)
    iterator = iter(dataset)
    for _ in range(3):
        next(iterator)
    fresh = distributed(loader(), drop_remainder=True)
    fresh.load_state_dict(dataset.state_dict())
    assert list(fresh) == []


def test_a_first_batch_may_be_empty():
    batches = [torch.ones(size, 1) for size in (0, 4, 4)]
    dataset = distributed(batches, drop_remainder=True)
    next(iter(dataset))
    fresh = distributed(batches, drop_remainder=True)
    fresh.load_state_dict(dataset.state_dict())
    assert len(list(fresh)) == 2


def test_the_resumed_iteration_leaves_the_global_stream_to_the_step():
    dataset = distributed(loader(shuffle=True))
    next(iter(dataset))
    state = dataset.state_dict()
    expected = torch.rand(3)
    fresh = distributed(loader(shuffle=True))
    fresh.load_state_dict(state)
    iterator = iter(fresh)
    next(iterator)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_batch_that_failed_counts_as_consumed(prefetch):
    class Faulty(Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            if index == 1:
                raise OSError("unreadable")
            return index

    dataset = distributed(DataLoader(Faulty(), batch_size=1), prefetch)
    iterator = iter(dataset)
    next(iterator)
    with pytest.raises(OSError, match="unreadable"):
        next(iterator)
    next(iterator)
    fresh = distributed(DataLoader(Faulty(), batch_size=1), prefetch)
    fresh.load_state_dict(dataset.state_dict())
    assert [contents(batch) for batch in fresh] == [[3], [4]]


def test_loading_ends_the_iterations_going_on():
    dataset = distributed(loader())
    iterator = iter(dataset)
    next(iterator)
    dataset.load_state_dict(dataset.state_dict())
    assert list(iterator) == []
    assert len(list(dataset)) == 3


def a_state(**changes):
    dataset = distributed(loader())
    next(iter(dataset))
    return dataset.state_dict() | changes


BAD = {
    "nothing": (None, TypeError, "got a NoneType"),
    "another dict": ({"epoch": 3}, ValueError, "got epoch"),
    "a key too many": (lambda: a_state(more=1), ValueError, "more"),
    "another version": (lambda: a_state(version=2), ValueError, "got version 2"),
    "another kind": (lambda: a_state(kind="stateful"), ValueError, "'stateful'"),
    "another length": (lambda: a_state(num_batches=5), ValueError, "of 5 batches; this one has 4"),
    "a count that is none": (
        lambda: a_state(num_consumed="1"),
        ValueError,
        "'num_consumed' is '1",
    ),
    "a negative count": (lambda: a_state(num_consumed=-1), ValueError, "below 0"),
    "no streams": (lambda: a_state(streams={}), ValueError, "random streams"),
    "damaged streams": (
        lambda: a_state(streams=a_state()["streams"] | {"torch": torch.zeros(3)}),
        ValueError,
        "random streams",
    ),
    "another source's order": (
        lambda: a_state(order={"streams": a_state()["streams"]}),
        ValueError,
        "of 0 samplers",
    ),
    "other samplers": (
        lambda: a_state(order=a_state()["order"] | {"samplers": []}),
        ValueError,
        "of 0 samplers",
    ),
}


@pytest.mark.parametrize(("make", "kind", "match"), BAD.values(), ids=BAD.keys())
def test_a_bad_state_is_refused_and_changes_nothing(make, kind, match):
    dataset = distributed(loader())
    state = make() if callable(make) else make
    before = torch.get_rng_state()
    with pytest.raises(kind, match=match):
        dataset.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(list(dataset)) == NUM_BATCHES


def test_a_dataset_that_has_become_shorter_is_refused():
    dataset = distributed(torch.arange(2) for _ in range(3))
    list(dataset)
    fresh = distributed(torch.arange(2) for _ in range(2))
    fresh.load_state_dict(dataset.state_dict())
    with pytest.raises(ValueError, match="counts as consumed, 3; this one ended after 2"):
        iter(fresh)


def test_parts_are_what_the_test_reads():
    (batch,) = distributed([torch.arange(3)])
    assert isinstance(batch, PerReplica)
    assert contents(batch) == [0, 1, 2]


TWENTY_TWO = TensorDataset(torch.arange(22))
BATCHED = {
    "loader": lambda size: DataLoader(TWENTY_TWO, size, shuffle=True),
    "sampler": lambda size: DataLoader(
        TWENTY_TWO, batch_sampler=BatchSampler(RandomSampler(TWENTY_TWO), size, drop_last=False)
    ),
    "arrays": lambda size: from_arrays(torch.arange(22), size),
    "shuffled arrays": lambda size: from_arrays(torch.arange(22), size, shuffle=True),
}


@each_once(
    **{"size,later": [(4, 8), (4, 3), (8, 10), (10, 8), (6, 22), (22, 1)]},
    make=[pytest.param(value, id=key) for key, value in BATCHED.items()],
)
def test_with_another_batch_size_each_example_of_the_pass_is_read_once(
    make, size, later, tmp_path
):
    """8 and 10 have the same number of batches."""
    whole = list(chain.from_iterable(uninterrupted(lambda: make(size), 1)[0]))
    assert sorted(whole) == list(range(22))
    for count in range(1, -(-22 // size) + 1):
        torch.manual_seed(5)
        iterator = iter(dataset := distributed(make(size)))
        read = list(chain.from_iterable(contents(next(iterator)) for _ in range(count)))
        for sizes in [(later,), (later, size)]:
            state = dataset.state_dict()
            for changed in sizes:  # the second change comes before the first batch after it
                again = distributed(make(changed))
                again.load_state_dict(state)
                state = through_a_file(again.state_dict(), tmp_path)
            rest = [contents(batch) for batch in again]
            assert [*read, *chain.from_iterable(rest)] == whole
            assert all(len(batch) == sizes[-1] for batch in rest[1:-1])


def test_another_batch_size_is_refused_where_positions_in_examples_are_not_known():
    def refused(before, after, match, **options):
        dataset = distributed(before, **options)
        next(iter(dataset))
        with pytest.raises(ValueError, match=match):
            distributed(after, **options).load_state_dict(dataset.state_dict())

    one = torch.arange(22)
    for repeat in (2, True):
        refused(
            from_arrays(one, 4, repeat=repeat),
            from_arrays(one, 8, repeat=repeat),
            "batches of 4 examples fits a loader with batches of 8 only if",
        )
    refused(from_arrays(one, 4), from_arrays(one[:8], 3), "of 4; this loader has 3 batches of 3")
    refused(
        from_arrays(one, 4),
        from_arrays(one, 3),
        "a multiple of the batch size",
        drop_remainder=True,
    )
