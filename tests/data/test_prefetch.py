"""Prefetching: in order, bounded, and with the errors of the dataset."""

import contextlib
import gc
import traceback

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from mirror.errors import BatchError
from tests.data.reading import Broken, Gate, StreamGoesOn, distributed, whole
from tests.pairs import each_once

pytestmark = [
    pytest.mark.usefixtures("leave_nothing_behind"),
    # From Python 3.12 on, about every fork of workers while there are threads.
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]


def test_batches_are_read_ahead_as_far_as_asked_and_no_further():
    gate = Gate()
    gate.allowed.release(10)
    iterator = iter(distributed(gate, prefetch=3))
    for taken in range(1, 4):
        assert whole(next(iterator)).tolist() == [taken - 1] * 2
        gate.await_read(taken + 3)
        # The reader has nothing to do now: a fourth would be read before this returns, if at all.
        iterator._reader._changed.acquire()
        assert gate.read == taken + 3
        iterator._reader._changed.release()


def test_the_next_batch_is_read_while_the_consumer_works():
    gate = Gate(3)
    gate.allowed.release(1)
    iterator = iter(distributed(gate, prefetch=1))
    next(iterator)
    gate.allowed.release(1)
    gate.await_read(2)  # it was not requested


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_the_order_is_kept(prefetch):
    batches = [torch.arange(i, i + 3) for i in range(20)]
    found = [whole(batch) for batch in distributed(batches, prefetch)]
    assert all(map(torch.equal, found, batches))
    assert len(found) == 20


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_empty_dataset_gives_no_batches_and_no_error(prefetch):
    for dataset in ([], iter([]), DataLoader(TensorDataset(torch.empty(0, 2)), batch_size=2)):
        assert list(distributed(dataset, prefetch)) == []


def test_several_iterations_at_once_and_nested_ones():
    dataset = distributed(DataLoader(TensorDataset(torch.arange(6)), batch_size=2))
    found = [(whole(a)[0].item(), whole(b)[0].item()) for (a,) in dataset for (b,) in dataset]
    assert found == [(a, b) for a in (0, 2, 4) for b in (0, 2, 4)]


def test_nested_iterations_over_persistent_workers(leaks):
    loader = DataLoader(
        TensorDataset(torch.arange(4)), batch_size=2, num_workers=1, persistent_workers=True
    )
    dataset = distributed(loader)
    for _ in range(2):
        found = [(whole(a)[0].item(), whole(b)[0].item()) for (a,) in dataset for (b,) in dataset]
        assert found == [(0, 0), (0, 2), (2, 0), (2, 2)]
    assert len(leaks.processes()) == 2  # those that have ended are used again
    del dataset


def test_an_iterator_is_shared_and_loses_nothing_that_was_read_ahead():
    dataset = distributed(torch.full((2,), i) for i in range(8))
    found = [whole(next(iter(dataset)))[0].item() for _ in range(2)]
    for batch in dataset:
        found.append(whole(batch)[0].item())
        if len(found) == 5:
            break
    for batch in dataset:
        found.append(whole(batch)[0].item())
        found += [whole(inner)[0].item() for inner in dataset]
    assert found == list(range(8))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_closed_iterator_gives_nothing_and_the_next_one_goes_on(prefetch):
    dataset = distributed((torch.full((2,), i) for i in range(3)), prefetch=prefetch)
    iterator = iter(dataset)
    assert whole(next(iterator)).tolist() == [0, 0]
    iterator.close()
    assert list(iterator) == []
    assert [whole(batch)[0].item() for batch in dataset] == [1, 2]


def test_a_stream_that_was_read_ahead_goes_on_where_its_consumer_left():
    stream = StreamGoesOn()
    dataset = distributed(stream)
    found = []
    for _ in range(3):
        for batch in dataset:
            found.append(whole(batch)[0].item())
            if len(found) % 3 == 0:
                break
        assert stream.place == len(found)
    assert found == list(range(1, 10))


# Errors


def broken_at(place, error=Broken):
    for i in range(5):
        if i == place:
            raise error("in the dataset")
        yield torch.full((2,), i)


@each_once(
    place=[0, 3], error=[Broken, KeyboardInterrupt, SystemExit, BatchError], prefetch=[0, 2]
)
def test_an_error_arrives_at_its_batch_with_its_traceback(place, error, prefetch, leaks):
    found = []
    with pytest.raises(error) as caught:
        for batch in distributed(broken_at(place, error), prefetch):
            found.append(whole(batch)[0].item())
    assert found == list(range(place))
    assert "broken_at" in [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert leaks.threads("mirror input") == []


class Faulty(Dataset):
    """Example 3 cannot be read."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3:
            raise Broken(index)
        return index


@pytest.mark.parametrize("prefetch", [0, 2])
def test_after_an_error_one_can_go_on_where_the_loader_can(prefetch):
    iterator = iter(distributed(DataLoader(Faulty(), batch_size=1), prefetch))
    found = []
    while True:
        try:
            found.append(whole(next(iterator)).item())
        except Broken:
            found.append("broken")
        except StopIteration:
            break
    assert found == [0, 1, 2, "broken", 4, 5]
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_error_in_a_worker_arrives_and_the_workers_end():
    with pytest.raises(Broken, match="worker process 0"):
        list(distributed(DataLoader(Faulty(), batch_size=1, num_workers=1)))


def test_a_batch_that_cannot_be_split_is_an_error_of_its_own():
    batches = [torch.ones(2), (torch.ones(2), torch.ones(3)), torch.ones(4)]
    iterator = iter(distributed(batches))
    next(iterator)
    with pytest.raises(BatchError):
        next(iterator)
    assert len(whole(next(iterator))) == 4


def test_an_error_is_not_kept_alive_by_what_raised_it():
    collected = []

    class Traced(Broken):
        def __del__(self):
            collected.append(True)

    gc.disable()
    try:
        with contextlib.suppress(Traced):
            list(distributed(broken_at(2, Traced)))
        assert collected == [True]  # without the garbage collector
    finally:
        gc.enable()


# The caller's state


def test_the_callers_grad_mode_and_default_device_hold_in_the_dataset():
    def batches():
        for _ in range(3):
            yield torch.tensor(
                [torch.is_grad_enabled(), torch.is_inference_mode_enabled()], device="cpu"
            )

    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            expected = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
            for batch in distributed(batches()):
                assert whole(batch).tolist() == expected

    def generate():
        for _ in range(3):
            yield torch.arange(2, device="cpu"), torch.empty(2).device.type

    with torch.device("meta"):
        assert [kind for _, kind in distributed(generate())] == ["meta"] * 3


# Counting


def test_waiting_and_batches_are_counted(monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr("mirror.data.distributed_dataset.perf_counter", lambda: float(next(now)))
    dataset = distributed([torch.arange(2)] * 3, prefetch=0)
    iterator = iter(dataset)
    list(iterator)
    next(iter(dataset))
    assert (iterator.num_delivered, iterator.waited_seconds) == (3, 4.0)  # the end, too
    assert (dataset.num_delivered, dataset.waited_seconds) == (4, 5.0)
