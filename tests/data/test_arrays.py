"""mirror.data.from_arrays: batches of arrays in memory, in order or shuffled."""

import collections
import dataclasses

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


@pytest.mark.parametrize("size", [0, -1, 1.5, None, True])
def test_a_bad_batch_size_is_refused(size):
    with pytest.raises(ValueError, match="batch_size must be an int >= 1"):
        mirror.data.from_arrays(np.arange(3), size)


def test_bad_arrays_and_seeds_are_refused():
    with pytest.raises(BatchError, match="equally many"):
        mirror.data.from_arrays((np.arange(3), np.arange(4)), 2)
    with pytest.raises(BatchError, match="without any"):
        mirror.data.from_arrays([1, "a"], 2)
    for seed in ("x", 2**64):
        with pytest.raises(ValueError, match="seed must be an int of 64 bits or None"):
            mirror.data.from_arrays(np.arange(3), 2, seed=seed)
    with pytest.raises(ValueError, match="got 7; a seed is passed as seed="):
        mirror.data.from_arrays(np.arange(3), 2, 7)
