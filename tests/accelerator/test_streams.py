"""Copies that travel while the devices compute."""

import pytest
import torch

from mirror.accelerator.streams import CopyStreams


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
