"""Calls of libnccl: their order, their number, and when an operation is done."""

from types import SimpleNamespace

import pytest
import torch

from mirror.comm.nccl import clique, libnccl
from mirror.comm.nccl.clique import Work
from tests.benchmarks.test_calls import calls_of
from tests.comm.backends import can_launch_elsewhere
from tests.comm.nccl.fake_nccl import TIMEOUT, tensors


def begins_everywhere(group, n):
    """Whether each replica's part waits for all the others', by what its calls are."""
    waits_for = {i: {i} for i in range(n)}
    for i, function, arguments in group:
        if function in ("ncclAllReduce", "ncclReduceScatter", "ncclAllGather"):
            waits_for[i] = set(range(n))
        elif function == "ncclRecv" or (function == "ncclBroadcast" and arguments[-1] != i):
            waits_for[i].add(arguments[-1])
        elif function == "ncclReduce" and arguments[-1] == i:
            waits_for[i] = set(range(n))
    return all(len(others) == n for others in waits_for.values())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 16, 17])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_one_device_stands_for_all_only_where_it_has_waited_for_all(n, size):
    values = [torch.ones(size) for _ in range(n)]
    chunks = [value.tensor_split(n) for value in values]
    terms = [torch.empty(n, chunks[i][i].numel()) for i in range(n)]
    groups = {
        "all_reduce": libnccl.all_reduce_calls(values, "sum"),
        "reduce_scatter": libnccl.reduce_scatter_calls(values, "sum"),
        "all_gather": libnccl.all_gather_calls(values),
        "broadcast": libnccl.broadcast_calls(values, 1),
        "exchange": libnccl.exchange_calls(chunks, terms),
    }
    joint = {name for name, group in groups.items() if libnccl.are_joint(group, n)}
    assert all(begins_everywhere(groups[name], n) for name in joint)
    assert "all_reduce" in joint
    assert ("exchange" in joint) == (size >= n)
    assert ("all_gather" in joint) == ("reduce_scatter" in joint) == (size % n == 0)


@pytest.mark.parametrize("n", [1, 2, 8])
def test_an_operation_has_one_event_or_one_per_device(fake, monkeypatch, n):
    devices = []
    real = clique.record_event
    monkeypatch.setattr(clique, "record_event", lambda d: (devices.append(d), real(d))[1])
    communicator = fake.communicator(n)
    for collective, count in (("all_reduce", 1), ("broadcast", n)):
        devices.clear()
        getattr(communicator, collective)(tensors(n))
        assert len(devices) == count
    communicator.close()


# At N = 8. Of NCCL's functions: a group of 8 calls, and when it is in progress each communicator
# is asked once, and the first one until it is done. Before, in Python and C, 258 and 386 calls of
# a float32 all-reduce, 1,279 and 1,535 of a bfloat16 one.
MOST = [
    (torch.float32, 0, 160),
    (torch.float32, 8, 225),
    (torch.bfloat16, 0, 655),
    (torch.bfloat16, 8, 785),
]


@pytest.mark.parametrize(("dtype", "polls", "most"), MOST)
def test_an_all_reduce_over_8_calls_no_more_than_when_it_was_counted(fake, dtype, polls, most):
    communicator = fake.communicator(8)
    fake.polls(polls)
    values = [torch.ones(64, dtype=dtype) for _ in range(8)]

    def nccls():
        names = ("ncclGroupStart", "ncclGroupEnd", "ncclCommGetAsyncError", "ncclAllReduce")
        return [fake.calls(name) for name in names]

    communicator.all_reduce(values)
    before = nccls()
    communicator.all_reduce(values)
    num_groups = 1 if dtype == torch.float32 else 2
    asked = num_groups * (polls + 7 if polls else 0)
    counts = [after - count for count, after in zip(before, nccls(), strict=True)]
    assert counts == [num_groups, num_groups, asked, 8 if num_groups == 1 else 0]
    assert calls_of(lambda: communicator.all_reduce(values)) <= most
    fake.polls(0)
    communicator.close()


@pytest.mark.parametrize("polls", [0, 2])
def test_no_other_collective_is_launched_until_all_of_one_is_enqueued(fake, monkeypatch, polls):
    communicator, others = fake.communicator(2), []
    settle = clique.Clique._settle

    def settling(own, result):
        settle(own, result)
        others.append(can_launch_elsewhere())

    monkeypatch.setattr(clique.Clique, "_settle", settling)
    fake.polls(polls)
    communicator.all_reduce(tensors(2))
    assert others == [False]
    assert can_launch_elsewhere()
    fake.polls(0)
    communicator.close()


def test_a_wait_polls_at_first_and_sleeps_only_later(fake, monkeypatch):
    pauses = []
    monkeypatch.setattr(clique, "sleep", pauses.append)
    communicator = fake.communicator(2, timeout_seconds=TIMEOUT)
    fake.polls(6)
    for spin, expected in ((60, [0] * 5), (-1, [20e-6 * 2**i for i in range(5)])):
        monkeypatch.setattr(clique, "_SPIN_SECONDS", spin)
        pauses.clear()
        communicator.all_reduce(tensors(2))
        assert pauses == pytest.approx(expected)
    fake.polls(0)
    communicator.close()


GPUS = [torch.device("cuda", i) for i in range(3)]


def event(is_done):
    return SimpleNamespace(query=lambda: is_done)


def operation(*events):
    return Work("a sum", 1.0, 0.0, streams=(10, 11, 12), events=list(map(event, events)))


def test_it_is_done_when_all_of_its_events_have_happened():
    assert operation().is_done()  # nothing was enqueued
    assert operation(True).is_done()
    assert operation(True, True, True).is_done()
    assert not operation(False).is_done()
    assert not operation(True, True, False).is_done()


@pytest.mark.parametrize(
    ("events", "idle", "late"),
    [
        ((False,), (), (0, 1, 2)),
        ((False,), (11,), (0, 2)),
        ((False,), (10, 11), (2,)),
        ((True, False, True), (), (1,)),
        ((False, False, True), (10, 11, 12), (0, 1)),
    ],
)
def test_late_devices_are_found_by_their_events_or_streams(monkeypatch, events, idle, late):
    asked = []

    def has_nothing_left(device, stream):
        asked.append((device.index, stream))
        return stream in idle

    monkeypatch.setattr(clique, "is_stream_idle", has_nothing_left)
    expected = ", ".join(f"replica {i} (cuda:{i})" for i in late)
    assert operation(*events).late_replicas(GPUS) == expected
    assert asked == ([(0, 10), (1, 11)] if len(events) == 1 else [])
