"""Streams of one thread, carried to others. See tests/gpu/test_training.py for whole steps."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mirror.accelerator.current_streams import CallersStreams, ReplicasStreams
from tests.gpu.fake import FakeGpus


@pytest.fixture
def gpus():
    with FakeGpus(2) as gpus:
        yield gpus


def in_thread(fn):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result(timeout=20)


def current(devices):
    return [torch.cuda.current_device(), *map(torch.cuda.current_stream, devices)]


def test_other_threads_have_the_callers_streams_for_as_long(gpus):
    one = torch.cuda.Stream("cuda:0")
    defaults = [*map(torch.cuda.default_stream, gpus.devices)]

    def seen():
        with streams.entered(gpus.devices[1]):
            inside = current(gpus.devices)
            torch.cuda.set_stream(torch.cuda.Stream("cuda:1"))
        return inside, current(gpus.devices)

    with torch.cuda.stream(one):
        streams = CallersStreams(gpus.devices)
    assert in_thread(seen) == ([1, one, defaults[1]], [0, *defaults])
    streams = CallersStreams(gpus.devices)
    assert in_thread(seen) == ([1, *defaults], [0, *defaults])


def test_who_acts_for_replicas_is_on_their_streams_and_leaves_them_ordered(gpus):
    devices = [gpus.devices[0], gpus.devices[1], gpus.devices[1]]
    streams = ReplicasStreams(devices)
    own = [torch.cuda.Stream(device) for device in devices]
    brought = []

    def arrive(r):
        with torch.cuda.stream(own[r]):
            brought.append(torch.ones(1, device=devices[r]))
            streams.note(r)

    for r in range(3):
        in_thread(lambda r=r: arrive(r))
    with streams.joined():
        assert current(devices)[1:] == [own[0], own[1], own[1]]
        total = brought[1] + brought[2]  # of two streams, on the one
        total += brought[0].to(devices[1])
    with torch.cuda.stream(own[2]):
        total + 1
    assert current(devices)[1:] == [*map(torch.cuda.default_stream, devices)]
    streams.forget()
    with streams.joined():
        assert current(devices)[1:] == [*map(torch.cuda.default_stream, devices)]


def test_who_acts_stays_on_the_stream_where_it_is_one_of_theirs(gpus):
    streams = ReplicasStreams(gpus.devices)
    for r in range(2):
        streams.note(r)
    with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
        streams.note(0)
        mine = current(gpus.devices)
        with streams.joined():
            assert current(gpus.devices) == mine
