"""Copies that travel while the devices compute."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from mirror.device.side_streams import CopyStreams, SideStream
from tests.gpu.fake import FakeGpus


def test_a_copy_to_the_cpu_is_the_tensor_itself_and_needs_no_waiting():
    streams, x = CopyStreams([torch.device("cpu")] * 2), torch.ones(3)
    assert streams.copy(x, torch.device("cpu")) is x
    assert streams.departed() == ()
    streams.receive((), [x])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_to_a_gpu_are_complete_for_what_received_them():
    device = torch.device("cuda", 0)
    streams = CopyStreams([device])
    for i in range(20):
        host = torch.full((2**22,), float(i))
        copy = streams.copy(host, device)
        events = streams.departed()
        host.fill_(-1)  # what was pinned is a copy
        streams.receive(events, [copy])
        assert (copy.min().item(), copy.max().item()) == (i, i)


def test_work_on_the_side_goes_before_the_blocks_of_a_computation_that_wait():
    with FakeGpus(2) as gpus:
        made, stream = [], torch.cuda.Stream

        def note(device, priority=0):
            made.append((device, priority))
            return stream(device, priority=priority)

        with mock.patch.object(torch.cuda, "Stream", note):
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
            whole = streams.pinned(torch.arange(6.0))
            parts = [streams.deliver(part, gpus.devices[0]) for part in whole.chunk(3)]
        assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
        assert pinned == [(6,)]


def test_what_is_ready_or_cannot_travel_so_is_not_pinned():
    leaf = torch.ones(2, requires_grad=True)
    assert CopyStreams([torch.device("cpu")]).pinned(leaf.detach()).is_pinned() is False
    with FakeGpus(1) as gpus:
        streams = CopyStreams(gpus.devices)
        ready = torch.ones(2).pin_memory()
        for tensor in (leaf, ready, torch.ones(2, device="cuda:0"), torch.eye(2).to_sparse()):
            assert streams.pinned(tensor) is tensor


def test_rows_that_are_one_and_the_same_memory_are_pinned_apart():
    # Memory cannot be written to where it lies over itself: pin_memory raises.
    with FakeGpus(1) as gpus:
        (device,), streams, pin = gpus.devices, CopyStreams(gpus.devices), Tensor.pin_memory
        strides = []
        with mock.patch.object(
            Tensor, "pin_memory", lambda x: strides.append(x.stride()) or pin(x)
        ):
            x = torch.arange(3.0).expand(2, 3)
            assert streams.deliver(x, device).tolist() == x.tolist()
            images = torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last)
            assert streams.pinned(images).stride() == images.stride()
        assert strides == [(3, 1), images.stride()]
