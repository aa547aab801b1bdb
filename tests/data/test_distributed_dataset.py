"""Loaders and other iterables in a DistributedDataset."""

from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from mirror.data import DistributedDataset
from mirror.data.input_options import InputOptions
from mirror.errors import BatchError
from mirror.values import ABSENT

TWO = [torch.device("cpu")] * 2


def contents(dataset):
    return [
        [None if part is ABSENT else part.tolist() for part in batch.values] for batch in dataset
    ]


def test_a_loader_gives_its_batches_split_and_again_each_epoch():
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=3)
    dataset = DistributedDataset(loader, TWO)
    assert len(dataset) == 3
    for _ in range(2):
        assert contents(x for (x,) in dataset) == [[[0, 1], [2]], [[3, 4], [5]], [[6], [7]]]


def test_batches_smaller_than_the_number_of_replicas_leave_some_out():
    dataset = DistributedDataset([torch.arange(2), torch.arange(1)], TWO)
    assert contents(dataset) == [[[0], [1]], [[0], None]]


def test_a_generator_is_exhausted_once_and_has_no_length():
    dataset = DistributedDataset((torch.arange(2) for _ in range(2)), TWO)
    assert len(contents(dataset)) == 2
    assert contents(dataset) == []
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(dataset)


def test_a_loader_without_length_raises_its_own_error():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    dataset = DistributedDataset(DataLoader(Stream(), batch_size=2), TWO)
    with pytest.raises(TypeError, match="Stream"):
        len(dataset)
    assert contents(dataset) == [[[0], [1]], [[2], [3]]]


class OfTensorFlow:
    """What a ``tf.data.Dataset`` is: its own iterator gives tensors of another library."""

    def __init__(self, *batches):
        self.batches = batches

    def __iter__(self):
        raise AssertionError

    def __len__(self):
        return len(self.batches)

    def as_numpy_iterator(self):
        return iter(self.batches)


def test_a_dataset_of_tensorflow_gives_its_arrays():
    dataset = DistributedDataset(OfTensorFlow(np.arange(3), np.arange(1)), TWO)
    assert len(dataset) == 2
    for _ in range(2):
        assert contents(dataset) == [[[0, 1], [2]], [[0], None]]
    again = DistributedDataset(OfTensorFlow(np.arange(3), np.arange(1)), TWO)
    next(iter(dataset))
    again.load_state_dict(dataset.state_dict())
    assert contents(again) == [[[0], None]]


def test_tensorflow_itself_gives_its_batches():
    tf = pytest.importorskip("tensorflow")
    rows = tf.data.Dataset.from_tensor_slices({"x": np.arange(5.0), "y": np.arange(5)})
    dataset = DistributedDataset(rows.batch(3).prefetch(1), TWO)
    for _ in range(2):
        assert contents(batch["y"] for batch in dataset) == [[[0, 1], [2]], [[3], [4]]]
    assert len(dataset) == 2
    assert len(list(islice(DistributedDataset(rows.repeat().batch(3), TWO), 5))) == 5


def test_an_empty_dataset_has_no_batches():
    assert contents(DistributedDataset([], TWO)) == []
    assert len(DistributedDataset([], TWO)) == 0


def test_without_prefetch_batches_are_taken_only_when_asked_for():
    taken = []

    def batches():
        for i in range(3):
            taken.append(i)
            yield torch.arange(2)

    iterator = iter(DistributedDataset(batches(), TWO, InputOptions(prefetch=0)))
    assert taken == []
    next(iterator)
    assert taken == [0]


def test_two_iterations_do_not_disturb_each_other():
    dataset = DistributedDataset([torch.arange(2), torch.arange(4)], TWO)
    pairs = zip(dataset, dataset, strict=True)
    assert all(torch.equal(a.values[1], b.values[1]) for a, b in pairs)


@pytest.mark.parametrize("dataset", [None, 3, TensorDataset(torch.arange(3))])
def test_what_cannot_be_iterated_is_refused(dataset):
    with pytest.raises(TypeError, match=f"got a {type(dataset).__name__}; wrap"):
        DistributedDataset(dataset, TWO)


def test_a_bad_batch_is_refused_when_it_comes():
    dataset = DistributedDataset([torch.arange(2), (torch.ones(2), torch.ones(3))], TWO)
    iterator = iter(dataset)
    next(iterator)
    with pytest.raises(BatchError):
        next(iterator)
