"""mirror.data.from_arrays: batches of arrays in memory, in order or shuffled."""

import collections
import dataclasses
import itertools
import os
from itertools import chain

import numpy as np
import pytest
import torch

import mirror
from mirror.errors import BatchError

Pair = collections.namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Sample:
    image: object
    name: object


def test_batches_come_in_order_and_the_last_has_what_is_left():
    loader = mirror.data.from_arrays(np.arange(7), batch_size=3)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(loader) == 3


def test_structures_and_kinds_are_kept():
    arrays = {
        "pair": Pair(torch.arange(5), np.arange(5)),
        "sample": Sample(np.arange(10).reshape(5, 2), np.array(["a", "b", "c", "d", "e"])),
        "objects": np.array([None, {}, 1, "x", ()], dtype=object),
        "scale": 2.0,
        "mode": "train",
    }
    for shuffle in (False, True):
        first, second = mirror.data.from_arrays(arrays, 3, shuffle=shuffle, seed=0)
        assert type(first["pair"]) is Pair
        assert isinstance(first["pair"].y, np.ndarray)
        assert type(first["sample"]) is Sample
        assert (first["scale"], first["mode"]) == (2.0, "train")
        assert first["sample"].image.shape == (3, 2)
        assert len(second["objects"]) == 2
        index = torch.cat([first["pair"].x, second["pair"].x])
        for batch, part in ((first, index[:3]), (second, index[3:])):
            assert batch["pair"].y.tolist() == part.tolist()
            assert batch["sample"].name.tolist() == ["abcde"[i] for i in part]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_arrays_are_never_changed(shuffle, make_strategy):
    strategy = make_strategy(2)
    arrays = [np.ones(5), torch.ones(5), torch.tensor(1.0)]
    for batch in strategy.distribute_dataset(mirror.data.from_arrays(arrays, 2, shuffle=shuffle)):
        strategy.run(lambda parts: [part.zero_() for part in parts], args=(batch,))
    assert all((array == 1).all() for array in arrays)


def orders(count, **options):
    loader = mirror.data.from_arrays(torch.arange(50), 50, **options)
    return [next(iter(loader)).tolist() for _ in range(count)]


def test_a_seed_gives_the_same_orders_and_every_pass_another_one():
    a, b = orders(2, shuffle=True, seed=3), orders(2, shuffle=True, seed=3)
    assert a == b
    assert a[0] != a[1]
    assert sorted(a[0]) == list(range(50))
    assert orders(1, shuffle=True, seed=4) != a[:1]


def test_without_a_seed_the_order_is_drawn_from_the_global_stream():
    torch.manual_seed(1)
    a = orders(2, shuffle=True)
    torch.manual_seed(1)
    assert orders(2, shuffle=True) == a
    assert orders(1, shuffle=True) != a[:1]


def test_no_examples_give_no_batches():
    for shuffle in (False, True):
        assert list(mirror.data.from_arrays(np.empty((0, 2)), 3, shuffle=shuffle)) == []
        for repeat in (2, True):  # an epoch without batches does not come again and again
            endless = mirror.data.from_arrays(np.empty((0, 2)), 3, shuffle=shuffle, repeat=repeat)
            assert list(endless) == []


def batches_of(loader, count=None):
    return [batch.tolist() for batch in itertools.islice(iter(loader), count)]


@pytest.mark.parametrize("repeat", [None, False, 1])
def test_without_repeat_a_pass_is_one_epoch(repeat):
    loader = mirror.data.from_arrays(np.arange(5), 2, repeat=repeat)
    assert batches_of(loader) == [[0, 1], [2, 3], [4]]
    assert len(loader) == 3


@pytest.mark.parametrize("shuffle", [False, True])
def test_repeated_epochs_are_those_of_as_many_passes(shuffle):
    plain = mirror.data.from_arrays(np.arange(5), 2, shuffle=shuffle, seed=3)
    epochs = [batches_of(plain) for _ in range(6)]
    assert (epochs[0] == epochs[1]) is not shuffle
    loader = mirror.data.from_arrays(np.arange(5), 2, shuffle=shuffle, seed=3, repeat=3)
    assert len(loader) == 9
    assert batches_of(loader) == [*chain.from_iterable(epochs[:3])]
    assert batches_of(loader) == [*chain.from_iterable(epochs[3:])]
    endless = mirror.data.from_arrays(np.arange(5), 2, shuffle=shuffle, seed=3, repeat=True)
    assert batches_of(endless, 18) == [*chain.from_iterable(epochs)]
    assert batches_of(endless, 6) == [*chain.from_iterable(epochs[1:3])]
    with pytest.raises(TypeError, match=r"repeat=True\) never ends: it has no len\(\)"):
        len(endless)


def test_repeated_orders_without_a_seed_follow_the_global_stream_and_draw_from_it_once():
    def drawn(num_batches):
        torch.manual_seed(1)
        loader = mirror.data.from_arrays(np.arange(50), 25, shuffle=True, repeat=True)
        return batches_of(loader, num_batches), torch.rand(()).item()

    few, many = drawn(2), drawn(20)
    assert many[0][:2] == few[0]
    assert many[1] == few[1]
    epochs = [a + b for a, b in zip(many[0][::2], many[0][1::2], strict=True)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 10


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("seed", [None, 0])
def test_a_run_over_batches_that_never_end_resumes(num_replicas, seed, make_strategy):
    def distributed():
        strategy = make_strategy(num_replicas)
        loader = mirror.data.from_arrays(torch.arange(7), 3, shuffle=True, seed=seed, repeat=True)
        return strategy, strategy.distribute_dataset(loader)

    def steps(strategy, batches, count):
        """Draws from the global stream in every step, as dropout on one device does."""
        found = []
        for batch in itertools.islice(batches, count):
            found.append(torch.cat(strategy.local_results(batch)).tolist())
            torch.rand(1000)
        return found

    torch.manual_seed(4)
    strategy, dataset = distributed()
    expected = steps(strategy, iter(dataset), 12)
    for count in (0, 1, 3, 7):
        torch.manual_seed(4)
        strategy, dataset = distributed()
        iterator = iter(dataset)
        assert steps(strategy, iterator, count) == expected[:count]
        state = dataset.state_dict()
        torch.manual_seed(99)
        strategy, dataset = distributed()
        dataset.load_state_dict(state)
        assert steps(strategy, iter(dataset), 12 - count) == expected[count:]
        with pytest.raises(TypeError, match="never ends"):
            len(dataset)


@pytest.mark.parametrize("repeat", [1, 2, 3])
@pytest.mark.parametrize("num_examples", [2, 3, 6, 7])
def test_drop_remainder_drops_the_last_batch_of_the_last_epoch(
    num_examples, repeat, make_strategy
):
    loader = mirror.data.from_arrays(torch.arange(num_examples), 3, repeat=repeat)
    sizes = list(map(len, loader))
    if sizes[-1] < sizes[0]:
        sizes.pop()
    strategy = make_strategy(2)
    dataset = strategy.distribute_dataset(loader, mirror.InputOptions(drop_remainder=True))
    assert [sum(map(len, strategy.local_results(batch))) for batch in dataset] == sizes
    if repeat == 1 or num_examples != 7:
        assert len(dataset) == len(sizes)
    else:
        with pytest.raises(TypeError, match="is not known before they are read"):
            len(dataset)


@pytest.mark.parametrize("repeat", [0, -1, 1.5, "forever"])
def test_a_bad_repeat_is_refused(repeat):
    with pytest.raises(ValueError, match=r"repeat must be a number of epochs, .* got "):
        mirror.data.from_arrays(np.arange(3), 2, repeat=repeat)


@pytest.mark.parametrize("size", [0, -1, 1.5, None, True])
def test_a_bad_batch_size_is_refused(size):
    with pytest.raises(ValueError, match="batch_size must be an int >= 1"):
        mirror.data.from_arrays(np.arange(3), size)


def test_bad_arrays_and_seeds_are_refused():
    with pytest.raises(BatchError, match="same number of examples"):
        mirror.data.from_arrays((np.arange(3), np.arange(4)), 2)
    with pytest.raises(BatchError, match="without any"):
        mirror.data.from_arrays([1, "a"], 2)
    for seed in ("x", 2**64):
        with pytest.raises(ValueError, match="seed must be an int of 64 bits or None"):
            mirror.data.from_arrays(np.arange(3), 2, seed=seed)
    with pytest.raises(ValueError, match="got 7; a seed is passed as seed="):
        mirror.data.from_arrays(np.arange(3), 2, 7)


def first_of_endless(sharding):
    strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
    rank = int(os.environ["RANK"])
    arrays = torch.arange(6) if sharding == "data" else torch.arange(6) + 10 * rank
    endless = mirror.data.from_arrays(arrays, 4, repeat=True)
    dataset = strategy.distribute_dataset(endless, mirror.InputOptions(sharding=sharding))
    parts = itertools.islice(dataset, 5)
    return [strategy.local_results(part)[0].tolist() for part in parts]


@pytest.mark.parametrize("sharding", ["data", "off"])
def test_batches_that_never_end_come_to_all_workers(worker_pool, sharding):
    first, second = worker_pool(2).run(first_of_endless, sharding)
    if sharding == "data":
        assert first == [[0, 1], [4], [0, 1], [4], [0, 1]]
        assert second == [[2, 3], [5], [2, 3], [5], [2, 3]]
    else:
        assert first == [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3], [4, 5], [0, 1, 2, 3]]
        assert second == [[10 + x for x in batch] for batch in first]
