"""Streams of one thread carried to other threads, and copies that overlap computation."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor

from mirror.device.streams import CallerStreams, CopyStreams, ReplicaStreams, SideStream
from tests.gpu.fake import FakeGpus
from tests.gpu.order import StreamError


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

    def streams_seen():
        with streams.entering(gpus.devices[1]):
            inside = current(gpus.devices)
            torch.cuda.set_stream(torch.cuda.Stream("cuda:1"))
        return inside, current(gpus.devices)

    with torch.cuda.stream(one):
        streams = CallerStreams(gpus.devices)
    assert in_thread(streams_seen) == ([1, one, defaults[1]], [0, *defaults])
    streams = CallerStreams(gpus.devices)
    assert in_thread(streams_seen) == ([1, *defaults], [0, *defaults])


def test_an_action_for_all_replicas_uses_their_streams_and_leaves_them_ordered(gpus):
    devices = [gpus.devices[0], gpus.devices[1], gpus.devices[1]]
    streams = ReplicaStreams([(device,) for device in devices])
    own = [torch.cuda.Stream(device) for device in devices]
    brought = []

    def arrive(r):
        with torch.cuda.stream(own[r]):
            brought.append(torch.ones(1, device=devices[r]))
            streams.record(r)

    for r in range(3):
        in_thread(lambda r=r: arrive(r))
    with streams.make_caller_wait():
        assert current(devices)[1:] == [own[0], own[1], own[1]]
        total = brought[1] + brought[2]  # of two streams, on the one
        total += brought[0].to(devices[1])
    with torch.cuda.stream(own[2]):
        total + 1
    assert current(devices)[1:] == [*map(torch.cuda.default_stream, devices)]
    streams.forget()
    with streams.make_caller_wait():
        assert current(devices)[1:] == [*map(torch.cuda.default_stream, devices)]


def test_an_action_stays_on_its_stream_if_that_is_a_replicas(gpus):
    streams = ReplicaStreams([(device,) for device in gpus.devices])
    for r in range(2):
        streams.record(r)
    with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
        streams.record(0)
        mine = current(gpus.devices)
        with streams.make_caller_wait():
            assert current(gpus.devices) == mine


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("which", ["read", "made"])
def test_memory_is_kept_for_its_readers_and_for_recorded_streams(which, is_kept):
    gpus = FakeGpus(2)
    with pytest.raises(StreamError, match="given out") if not is_kept else nullcontext(), gpus:
        own, default = torch.cuda.Stream("cuda:0"), torch.cuda.default_stream("cuda:0")
        streams = ReplicaStreams([(device,) for device in gpus.devices])
        with torch.cuda.stream(own):
            grad = torch.ones(4, device="cuda:0")
            streams.record(0)
        default.wait_stream(own)
        flat = torch.cat([grad, grad])
        if is_kept:
            streams.keep([[grad], []], [[flat], []])
        if which == "read":
            del grad
            with torch.cuda.stream(own):
                torch.ones(4, device="cuda:0")
        else:
            own.wait_stream(default)
            with torch.cuda.stream(own):
                flat.mul_(2)
            del flat
            torch.ones(4, device="cuda:0")


def test_streams_are_complete_when_every_replica_has_noted_one(gpus):
    streams = ReplicaStreams([(gpus.devices[0],)] * 2)
    for replica_id in (0, 0, 1):
        assert not streams.are_complete([gpus.devices[0]] * 2)
        streams.record(replica_id)
    assert streams.are_complete([gpus.devices[0]] * 2)
    streams.forget()
    assert not streams.are_complete([gpus.devices[0]] * 2)


def test_streams_of_several_devices_are_noted_and_complete_position_by_position():
    with FakeGpus(4) as gpus:
        (a, b, c, d), own = gpus.devices, torch.cuda.Stream("cuda:3")
        streams = ReplicaStreams([(a, b), (c, d)])
        streams.record(0)
        with torch.cuda.stream(own):
            streams.record(1, d)
        assert streams.are_complete((b, d))
        assert not streams.are_complete((a, c))
        with streams.make_caller_wait():
            assert torch.cuda.current_stream(d) == own


def test_a_copy_to_the_cpu_is_the_tensor_itself_and_needs_no_waiting():
    streams, x = CopyStreams([torch.device("cpu")] * 2), torch.ones(3)
    assert streams.copy(x, torch.device("cpu")) is x
    assert streams.record_events() == ()
    streams.receive((), [x])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_to_a_gpu_are_complete_for_what_received_them():
    device = torch.device("cuda", 0)
    streams = CopyStreams([device])
    for i in range(20):
        host = torch.full((2**22,), float(i))
        copy = streams.copy(host, device)
        events = streams.record_events()
        host.fill_(-1)  # what was pinned is a copy
        streams.receive(events, [copy])
        assert (copy.min().item(), copy.max().item()) == (i, i)


def test_work_on_the_side_goes_before_the_blocks_of_a_computation_that_wait():
    with FakeGpus(2) as gpus:
        made, stream = [], torch.cuda.Stream

        def record(device, priority=0):
            made.append((device, priority))
            return stream(device, priority=priority)

        with mock.patch.object(torch.cuda, "Stream", record):
            SideStream(gpus.devices).start(lambda: None)()
        assert made == [(device, -1) for device in gpus.devices]


def test_a_delivered_tensor_may_be_used_and_freed_by_the_stream_that_received_it():
    with FakeGpus(2) as gpus:
        streams = CopyStreams(gpus.devices)
        for device in gpus.devices:
            for _ in range(3):
                with torch.cuda.stream(torch.cuda.Stream(device)):
                    own = streams.deliver(torch.full((4,), 2.0), device)
                    assert own.device == device
                    assert (own * 3).tolist() == [6] * 4
                    del own


def test_memory_is_pinned_once_for_all_parts():
    with FakeGpus(1) as gpus:
        streams, pin, pinned = CopyStreams(gpus.devices), Tensor.pin_memory, []
        with mock.patch.object(Tensor, "pin_memory", lambda x: pinned.append(x.shape) or pin(x)):
            whole = streams.pin(torch.arange(6.0))
            parts = [streams.deliver(part, gpus.devices[0]) for part in whole.chunk(3)]
        assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
        assert pinned == [(6,)]


def test_what_is_ready_or_cannot_travel_so_is_not_pinned():
    leaf = torch.ones(2, requires_grad=True)
    assert CopyStreams([torch.device("cpu")]).pin(leaf.detach()).is_pinned() is False
    with FakeGpus(1) as gpus:
        streams = CopyStreams(gpus.devices)
        ready = torch.ones(2).pin_memory()
        for tensor in (leaf, ready, torch.ones(2, device="cuda:0"), torch.eye(2).to_sparse()):
            assert streams.pin(tensor) is tensor


def test_rows_that_share_memory_are_pinned_separately():
    # Memory cannot be written to where its elements overlap: pin_memory raises.
    with FakeGpus(1) as gpus:
        (device,), streams, pin = gpus.devices, CopyStreams(gpus.devices), Tensor.pin_memory
        strides = []
        with mock.patch.object(
            Tensor, "pin_memory", lambda x: strides.append(x.stride()) or pin(x)
        ):
            x = torch.arange(3.0).expand(2, 3)
            assert streams.deliver(x, device).tolist() == x.tolist()
            images = torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last)
            assert streams.pin(images).stride() == images.stride()
        assert strides == [(3, 1), images.stride()]
